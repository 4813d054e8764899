"""Every kernel compiles to machine code if NVRTC is available; no GPU is needed."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from graph_passes.executors.cuda.kernel_library import C_TYPES, HOPPER, SOURCES, architecture, compile_kernel
from graph_passes.executors.cuda.kernels.depthwise import BLOCKS, CHANNELS, COLUMNS, KERNELS, STRIDES
from graph_passes.executors.cuda.kernels.quantised_conv import TILES
from graph_passes.executors.cuda.kernels.quantised_conv_stream import TILES as STREAMS
from graph_passes.executors.cuda.kernels.quantised_conv_taps import CHANNELS as TAPS_CHANNELS
from graph_passes.executors.cuda.kernels.quantised_conv_taps import (
    EIGHTS,
)
from graph_passes.executors.cuda.kernels.quantised_pair import Z_COLUMNS
from graph_passes.operators.activations import FUNCTIONS

# as in optimizer.cu
RULES = ["Sgd<false>", "Sgd<true>", "Lars<false>", "Lars<true>", "AdamW", "Lamb", "Lion", "RmsProp"]

# Kernels with wgmma: for Hopper only, in 16-bit types.
WARPGROUPS = ("conv1x1_forward.cu", "conv1x1_pair.cu", "conv1x1_statistics.cu", "conv3x3.cu", "conv3x3_weights.cu",
              "dgrad_reduce.cu", "dgrad_stream.cu", "norm_backward.cu", "norm_conv1x1.cu", "norm_dgrad.cu",
              "stem_forward.cu", "stem_pool.cu", "stem_weights.cu")

# Template arguments, after the dtype, that the executor requests.
FLAGS = {
    "dgrad_reduce": ["64, NONE, true, false", "128, WHOLE, false, false", "256, WHOLE, true, false",
                     "64, WHOLE, true, true", "256, NONE, false, true", "128, COMPACT, false, false",
                     "256, COMPACT, true, true"],
    "dgrad_stream": ["WHOLE, false", "NONE, false", "WHOLE, true", "NONE, true", "COMPACT, false", "COMPACT, true"],
    "conv1x1_forward": ["64, true, true, false", "128, false, true, false", "256, false, false, false",
                        "256, true, true, false", "64, false, true, true", "256, false, true, true"],
    "conv1x1_statistics": ["64, 1", "128, 1", "128, 2"],
    "norm_relu_conv1x1": ["64, 1", "128, 1", "128, 2"],
    "conv1x1_pair": ["64", "128"],
    "conv3x3_forward": ["true, false", "false, true"],
    **{f"depthwise_{kind}": [f"{size}, {stride}" for size in KERNELS for stride in STRIDES]
       for kind in ("forward", "statistics", "dgrad", "wgrad")},
    "norm_conv1x1": ["64, false", "64, true", "128, false", "128, true", "256, false", "256, true"],
    "norm_dgrad": ["128", "256"],
    "norm_backward": ["64, 64, true, false, false", "128, 64, true, true, false", "256, 64, false, true, false",
                      "256, 64, false, false, true", "512, 128, false, true, false", "128, 128, true, true, false",
                      "256, 128, false, false, true"],
    "batch_norm_apply": ["false, false, false", "false, true, false", "true, true, false", "true, true, true"],
    "batch_norm_backward_reduce": [
        "NO_RELU, NONE, false, false", "NO_RELU, WHOLE, true, false", "RECOMPUTED, NONE, false, false",
        "RECOMPUTED, WHOLE, true, false", "BITS, NONE, true, false", "BITS, WHOLE, true, false",
        "BITS, NONE, true, true", "BITS, WHOLE, true, true", "RECOMPUTED, COMPACT, true, false",
        "BITS, COMPACT, true, false", "BITS, COMPACT, true, true"],
    "batch_norm_backward_apply": ["NO_RELU, false, false", "NO_RELU, true, false", "RECOMPUTED, false, false",
                                  "RECOMPUTED, true, false", "NO_RELU, false, true"],
    "batch_norm_relu_max_pool_backward_reduce": ["false", "true"],
    "batch_norm_pair_apply": ["false", "true"],
    "batch_norm_pair_backward_reduce": ["NONE, false", "WHOLE, false", "COMPACT, false", "NONE, true", "WHOLE, true"],
    "batch_norm_pair_backward_apply": ["false", "true"],
    "activation": [f"{name}_" for name in FUNCTIONS],
    "activation_backward": [f"{name}_" for name in FUNCTIONS],
    "relu_backward": ["false", "true"],
    "broadcast": ["false", "true"],
    "bias_add_relu": ["false, false", "false, true", "true, true"],
    "exchange_boxes": ["4", "3"],
    "softmax_cross_entropy": ["false", "true"],
    "max_pool_backward": ["false", "true"],
    "average_pool": ["false", "true"],
    "average_pool_backward": ["false", "true"],
    "inspect_gradients": ["false, false", "false, true", "true, true"],
    "update": RULES,
    "accumulate": ["Lamb"],
    "quantised_average_pool": ["4, IMAGE", "1, PADDING", "4, SUM"],
    "quantised_conv_direct": ["false, false", "true, true"],
    "quantised_conv": [f"{groups}, {columns}, {flags}" for groups, columns in TILES.values()
                       for flags in ("false, false, true", "true, true, true")],
    "quantised_conv_squares": ["4, 1, 64, true", "2, 1, 64, false", "3, 4, 64, true", "3, 8, 128, true"],
}
# Kernels that write int8 or floats.
WRITES_INT8 = ("quantised_average_pool", "quantised_conv_direct", "quantised_conv",
               "quantised_conv_squares")


def kernels() -> list[tuple[str, str]]:
    """(file, kernel) for all __global__ functions in kernels/."""
    found = []
    for path in sorted(SOURCES.glob("*.cu")):
        text = re.sub(r"__(launch_bounds|cluster_dims)__\([^)]*\)", "", path.read_text())
        for template, name in re.findall(r"(template <[^>]*>\s*)?__global__ void\s+(\w+)\(", text):
            found.append((path.name, name if template else f"{name}!"))
    return found


def expressions(kernel: str, c_type: str) -> list[str]:
    if kernel.endswith("!"):  # the kernel is not a template
        return [kernel[:-1]]
    if kernel == "copy_columns":
        return [f"copy_columns<{kind}, {fill}>" for kind in (c_type, f"Packed<{c_type}>") for fill in ("false", "true")]
    if kernel == "trust_ratios":  # the same for all types
        return [f"trust_ratios<{rule}>" for rule in RULES if rule.startswith("La")]
    if kernel == "convert_input":
        return [f"convert_input<float, {c_type}>", f"convert_input<half, {c_type}>"]
    if kernel == "quantised_max_pool":  # the same for all types
        return ["quantised_max_pool<4, 3>", "quantised_max_pool<1, 0>"]
    if kernel == "quantised_conv_stream":  # writes int8 only
        return [f"quantised_conv_stream<{teams}, {columns}, {flags}>" for teams, columns in STREAMS.values()
                for flags in ("true, true, false", "false, true, false", "false, false, false", "false, true, true")]
    if kernel == "quantised_conv_taps":  # writes int8 only; each shape with one of two epilogues
        shapes = [f"{size}, {stride}, {channels}, {eights}" for size, stride in EIGHTS for channels in TAPS_CHANNELS
                  for eights in EIGHTS[size, stride]]
        return [f"quantised_conv_taps<{shape}, {flags}>"
                for shape, flags in zip(shapes, itertools.cycle(("false, false", "true, true")), strict=False)]
    if kernel == "quantised_pair":  # writes int8 only
        return [f"quantised_pair<{columns}, {two}>" for columns in Z_COLUMNS for two in ("false", "true")]
    if kernel == "quantised_stem_pool":  # writes int8 only
        return ["quantised_stem_pool<true>", "quantised_stem_pool<false>"]
    if c_type == "float" and f"{kernel}.cu" in WARPGROUPS:
        return []
    if kernel in WRITES_INT8 and c_type == "half":
        return [f"{kernel}<{result}, {flags}>" for result in ("half", "int8") for flags in FLAGS[kernel]]
    return [f"{kernel}<{c_type}{', ' + flags if flags else ''}>" for flags in FLAGS.get(kernel, [""])]


def test_all_sources_are_found() -> None:
    assert {source for source, _ in kernels()} == {path.name for path in SOURCES.glob("*.cu")}
    assert {"batch_norm_apply", "accumulate", "add_metrics!"} <= {kernel for _, kernel in kernels()}


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.cu")), ids=lambda path: path.name)
def test_every_kernel_tells_the_shapes_of_its_operands(path: Path) -> None:
    comments = re.findall(r"((?://[^\n]*\n)*)(?:template <[^>]*>\s*)?__global__ ", path.read_text())
    assert comments
    assert all("// Shapes: " in comment for comment in comments)


def compile_for(path: Path, names: list[str], arch: str) -> None:
    """Compile all kernels of a file together, because each call of NVRTC reads all included files. Little optimization
    takes a quarter of the time."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=arch, std="c++17", include_path=[str(SOURCES)], name=path.name, ofast_compile="max")
    compiled = Program(path.read_text(), "c++", options).compile("cubin", name_expressions=tuple(names))
    cubin, symbols = bytes(compiled.code), [compiled.symbol_mapping[name] for name in names]
    assert cubin[:4] == b"\x7fELF"
    assert len(set(symbols)) == len(names)
    assert all((symbol if isinstance(symbol, bytes) else symbol.encode()) in cubin for symbol in symbols)


TENSOR_CORES = (*WARPGROUPS, "stem.cu")  # only in 16-bit types, by instructions of each type


def variants(path: Path, dtype: str) -> list[str]:
    """The kernels of a file for networks of this type. For bfloat16 one variant each, since only helpers that all of
    them use differ from float16."""
    return [name for source, kernel in kernels() if source == path.name
            for name in expressions(kernel, C_TYPES[dtype])[:1 if dtype == "bfloat16" else None]]


def dtypes(path: Path) -> list[str]:
    """The types for which a file's variants differ. `test_compiles_for_each_generation` compiles the other files in
    bfloat16."""
    other = "bfloat16" if path.name in TENSOR_CORES else "float32"
    return ["float16"] + [other] * (variants(path, other) != variants(path, "float16"))


@pytest.mark.long(but=["elementwise*", "embedding*", "dropout*", "softmax*", "pool*"])
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("path, dtype", [
    pytest.param(path, dtype, id=f"{path.name}-{dtype}") for path in sorted(SOURCES.glob("*.cu"))
    for dtype in dtypes(path)])
def test_compiles_in_every_variant(path: Path, dtype: str) -> None:
    compile_for(path, variants(path, dtype), architecture(HOPPER))


@pytest.mark.usefixtures("nvrtc")
def test_compiles_one_kernel_as_the_executor_does() -> None:
    cubin, symbol = compile_kernel("elementwise.cu", "add<half>", architecture(HOPPER))
    assert cubin[:4] == b"\x7fELF" and symbol.encode() in cubin


# Compute capabilities of the generations from Turing to Blackwell; 8.6 and 8.9 have what 8.0 has.
CAPABILITIES = [(7, 5), (8, 0), HOPPER, (10, 0), (12, 0)]


def serves(source: str, capability: tuple[int, int]) -> bool:
    """Whether the kernels of a file support this GPU: other GPUs use other kernels (test_without_gpu.py)."""
    if source in (*WARPGROUPS, "quantised_conv_squares.cu", "quantised_conv_stream.cu", "quantised_conv_taps.cu",
                  "quantised_pair.cu", "quantised_stem_pool.cu"):
        return capability == HOPPER
    return source not in ("stem.cu", "quantised_conv.cu") or capability >= (8, 0)  # cp.async


@pytest.mark.long(but=["sm_80-*pool*"])
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("capability, path", [
    pytest.param(capability, path, id=f"{architecture(capability)}-{path.name}") for capability in CAPABILITIES
    for path in sorted(SOURCES.glob("*.cu")) if serves(path.name, capability)
    and not (capability == HOPPER and "float32" not in dtypes(path))])  # all of these are compiled above
def test_compiles_for_each_generation(capability: tuple[int, int], path: Path) -> None:
    """Each kernel in one variant, in the newest type: generations differ in their instructions."""
    from cuda.bindings import nvrtc

    arch = architecture(capability)
    _, known = nvrtc.nvrtcGetSupportedArchs()
    if 10 * capability[0] + capability[1] not in known:
        pytest.skip(f"this NVRTC does not know {arch}: it has {', '.join(f'sm_{number}' for number in known)}")
    names = [expressions(kernel, C_TYPES["bfloat16"])[0] for source, kernel in kernels() if source == path.name]
    compile_for(path, names, arch)


@pytest.mark.usefixtures("nvrtc")
def test_what_a_thread_of_depthwise_convolutions_works_on() -> None:
    """Python divides the work by the numbers in the kernel's template."""
    from cuda.core import Program, ProgramOptions

    asserts = "".join(f"static_assert(Piece<half, {size}>::{name} == {values[size]});\n" for size in KERNELS
                      for name, values in (("CHANNELS", CHANNELS), ("COLUMNS", COLUMNS), ("BLOCKS", BLOCKS)))
    options = ProgramOptions(arch="sm_90a", std="c++17", include_path=[str(SOURCES)])
    text = '#include "depthwise.cu"\nstatic_assert(sizeof(Moments) == 12);\n' + asserts
    Program(text, "c++", options).compile("cubin")
