"""Python reads constants and structs of the CUDA sources as the compiler does; no GPU needed."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from graph_passes.executors.cuda import declarations
from graph_passes.executors.cuda.declarations import SOURCES, Declarations
from graph_passes.executors.cuda.kernels.conv1x1_forward import Walk

NORM_BACKWARD = [f"Shape<{k}, {columns}>" for columns, all_k in ((64, (64, 128, 256)), (128, (128, 256, 512)))
                 for k in all_k]
DGRAD_REDUCE = [f"Shape<{k}, {add}, {pair}>" for k in (64, 128, 256) for add in (0, 1) for pair in (0, 1)]
TILES = [f"Tile<{groups}, {columns}>" for groups, columns in ((2, 128), (2, 64), (4, 128), (2, 256), (1, 128))]
# Templates by source: constants, structs.
TEMPLATES = {
    "norm_backward.cu": ([f"{shape}::BLOCKS" for shape in NORM_BACKWARD],
                         [f"Shared<{shape}>" for shape in NORM_BACKWARD]),
    "dgrad_reduce.cu": ([f"{shape}::{name}" for shape in DGRAD_REDUCE for name in ("THREADS", "ROWS", "COLUMNS")],
                        [f"Shared<{shape}>" for shape in DGRAD_REDUCE]),
    "depthwise.cu": ([f"Piece<half, {size}>::{name}" for size in (3, 5, 7)
                      for name in ("CHANNELS", "COLUMNS", "BLOCKS")], []),
    "norm_conv1x1.cu": ([f"{name}<{columns}>" for name in ("BLOCK", "STREAMED") for columns in (64, 128, 256)], []),
    "quantised_conv.cu": ([f"{tile}::{name}" for tile in TILES for name in ("ROWS", "THREADS", "STAGES")],
                          [f"Stage<{tile}>" for tile in TILES]),
    "quantised_conv_stream.cu": (["THREADS<2>", "THREADS<4>"], [
        f"Control<{teams}, {columns}, {convolutions}>" for teams, columns in ((2, 128), (2, 256), (4, 128))
        for convolutions in (1, 2)]),
    "quantised_pair.cu": ([], [f"PairControl<{columns}, {two}>" for columns in (64, 128) for two in (0, 1)]),
}


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("source", [path.name for path in sorted(SOURCES.glob("*.cu"))])
def test_values_are_the_compilers(source: str) -> None:
    """All constants and structs of a source and of the files that it includes, and the templates that Python names."""
    from cuda.core import Program, ProgramOptions

    cuda = Declarations(source)
    constants, structs = (plain + of_template for plain, of_template in
                          zip(cuda.names(), TEMPLATES.get(source, ([], [])), strict=True))
    asserts = [f"static_assert({name} == {cuda.value(name)}u);" for name in constants]
    asserts += [f"static_assert(sizeof({name}) == {cuda.sizeof(name)});" for name in structs]
    assert asserts
    options = ProgramOptions(arch="sm_90a", std="c++17", include_path=[str(SOURCES)])
    Program("\n".join([f'#include "{source}"', *asserts]), "c++", options).compile("cubin")


def test_structs_become_fields() -> None:
    """The fields keep their order, and include arrays, pointers and structs."""
    assert [name for name, _ in Walk._fields_] == ["rows", "x_row", "x_line", "y_row", "y_line"]
    tensor = dict(Declarations("optimizer.cu").fields("Tensor"))
    assert tensor["state"] == ctypes.c_void_p * 2 and tensor["size"] == ctypes.c_uint32
    grid = dict(Declarations("batch_norm.cuh").fields("Grid"))
    assert [name for name, _ in grid["down"]._fields_] == ["value", "factor", "shift"]
    with pytest.raises(TypeError, match="ctypes has no type for the member rows"):
        Declarations("stem_rows.cuh").fields("ImageRows")


def test_what_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "before.cuh").write_text("constexpr int A = 3, B = (A + 1) * 2;  // B: 8\n")
    (tmp_path / "a.cu").write_text("""#include "before.cuh"
template <int N> constexpr bool LARGE = N > B;
template <int N_> struct Shape {
    static constexpr int N = N_, M = LARGE<N> ? 2 : (A << 2) / 4;
    static_assert(N > 0, "a; b");
};
struct Small { float x; };
template <class S> struct alignas(64) Large {
    Small small[S::M], *more;  // 8 bytes behind a gap
    alignas(32) uint4 vectors[2][A];
    __device__ int get() const { return A; }
    bool last = 1 << 2 == 4 && !(A != 3);
};
""")
    monkeypatch.setattr(declarations, "SOURCES", tmp_path)
    cuda = Declarations("a.cu")
    assert cuda.values("A", "B", "LARGE<8>", "LARGE<B + 1>", "Shape<9>::M", "Shape<1>::M") == (3, 8, 0, 1, 2, 3)
    assert cuda.sizeof("Large<Shape<9>>") == cuda.sizeof("Large<Shape<1>>") == 192  # 24 or 16, 32 + 96, 1
    with pytest.raises(KeyError):
        cuda.value("C")
