"""The sizes, shares and sums of the section kernels, and the kernels of a CPU against NumPy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from common.mxnet_compat import mx
from gpu_report import deepbench, kernels, kernels_cpu, kernels_cuda
from gpu_report.datasheets import DATASHEETS, datasheet_of
from gpu_report.deepbench import Convolution, Gemm
from gpu_report.figures import Figure
from gpu_report.section import Bench
from graph_passes.errors import GraphError, TransientError
from train.devices import Placement

ODD = Convolution(9, 7, 3, 2, 5, 3, 2, 1, 0, 2, 1)  # 7 x 9 pixels, filters of 2 x 3


def bench(folder: Path, seconds: float = 60.0, device: str = "some CPU", on: str = "cpu(0)",
          executor: str = "mxnet") -> Bench:
    return Bench(Placement(executor, on, ""), device, folder, seconds)


def test_sizes():
    assert str(Gemm(5124, 9124, 2560, True, False)) == "5124 x 9124 x 2560 TN"
    assert Gemm(2, 3, 5).flops == 60
    first = deepbench.CONVOLUTIONS[0]
    assert (first.out_height, first.out_width) == (79, 341), "what DeepBench's next layer reads"
    assert str(first) == "32 x 161 x 700 x 1, 32 of 5 x 20, stride 2"
    assert (ODD.out_height, ODD.out_width) == (6, 5)
    assert ODD.flops == 2 * (2 * 6 * 5 * 5) * (3 * 2 * 3)
    for sizes in (deepbench.GEMMS, deepbench.CONVOLUTIONS, deepbench.SMALL_GEMMS):
        assert len({str(size) for size in sizes}) == len(sizes)
    assert set(deepbench.SMALL_GEMMS) <= set(deepbench.GEMMS), "or they could not be compared"


def test_datasheets():
    sheet = datasheet_of("NVIDIA H200")
    assert sheet and sheet.tflops["fp16"] == 989.5 and sheet.gigabytes_per_second == 4800
    assert datasheet_of("NVIDIA H200 NVL").tflops["fp16"] == 835.5
    assert datasheet_of("NVIDIA H100 80GB HBM3").tflops["int8"] == 1979
    assert datasheet_of("Tesla V100-SXM2-16GB").tflops["fp16"] == 125
    assert datasheet_of("Tesla V100-PCIE-32GB").tflops["fp16"] == 112
    assert datasheet_of("NVIDIA L40") is None and datasheet_of("AMD EPYC") is None
    assert all(sheet.source.startswith("https://") for sheet in DATASHEETS)


def test_shares_and_totals():
    size = "2 x 2"
    passes = [Figure(f"convolution {direction}", size, "fp16", ms, "ms", 0.001 * ms, "", {"tflops": 12 / ms})
              for direction, ms in zip(kernels.PASSES, (1.0, 2.0, 3.0), strict=True)]
    (total,) = kernels.totals(passes)
    assert (total.value, total.more["tflops"], total.error) == (6.0, 6.0, 0.003)
    assert list(kernels.totals(passes[:2])) == [], "not of two passes"
    gemms = [Figure("GEMM", str(tflops), "fp16", 1.0, "ms", more={"tflops": tflops}) for tflops in (400.0, 800.0)]
    copy = Figure("copy", "1 MiB", "", 2400.0, "GB/s")
    found = list(kernels.with_shares([copy, *gemms, total], "NVIDIA H200"))
    assert found[0].more == {"of_datasheet": 0.5}
    assert found[1].more["of_best_gemm"] == 0.5 and found[1].more["of_datasheet"] == pytest.approx(400 / 989.5)
    assert found[3].more["of_best_gemm"] == pytest.approx(6 / 800)
    assert all("of_datasheet" not in figure.more for figure in kernels.with_shares(gemms, "some CPU"))


class Machine:
    """A GPU that has no fp8, and no room for the largest products."""

    precisions = ("fp16", "int8", "fp8")
    copy_bytes = 1 << 20

    def close(self) -> None: ...

    @contextlib.contextmanager
    def copy(self) -> Iterator[Callable[[], float]]:
        raise TransientError("the GPU has 1.0 of 1.0 GiB free, 4.0 GiB more are needed: use a smaller batch size")
        yield

    @contextlib.contextmanager
    def gemm(self, size: Gemm, precision: str) -> Iterator[Callable[[], float]]:
        if precision == "fp8":
            raise GraphError("there is no fp8")
        if size.flops > 1e12:
            raise TransientError("there is no room for it")
        yield lambda: 2.0

    @contextlib.contextmanager
    def convolution(self, size: Convolution, direction: str, precision: str) -> Iterator[Callable[[], float]]:
        assert precision == "fp16" or direction == "forward", "8 bits have no gradients"
        yield lambda: 1.0


@pytest.fixture
def on_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_cuda, "open_machine", lambda placement: Machine())


@pytest.mark.usefixtures("on_machine")
def test_what_a_gpu_has_not_is_said(tmp_path, capsys):
    section = kernels.measure(bench(tmp_path, device="NVIDIA H200", on="gpu(0)", executor="cuda"))
    gemms = [figure for figure in section.figures if figure.what == "GEMM"]
    too_large = [size for size in deepbench.GEMMS if size.flops > 1e12]
    assert too_large and len(gemms) == 2 * (len(deepbench.GEMMS) - len(too_large))
    assert all(figure.value == 2.0 and figure.limit == "" and figure.error == 0 for figure in gemms)
    assert sum(figure.what == "convolution, total" for figure in section.figures) == len(deepbench.CONVOLUTIONS)
    assert section.notes[0].startswith("copy: the GPU has 1.0 of 1.0 GiB free")
    assert f"and {len(deepbench.GEMMS) - 8} more: there is no fp8" in section.notes[1]
    assert "there is no room for it" in section.notes[2] and len(section.notes) == 3
    assert "GEMM 1760 x 16 x 1760 NN in fp8: left out, there is no fp8" in capsys.readouterr().out


@pytest.mark.usefixtures("on_machine")
def test_time_that_is_over(tmp_path):
    section = kernels.measure(bench(tmp_path, seconds=-1.0, on="gpu(0)", executor="cuda"))
    assert section.figures == () and "the section had used up its -1 s" in section.notes[1]


def test_a_gpu_without_cudnn_9(tmp_path):
    section = kernels.measure(bench(tmp_path, device="Tesla P100", on="gpu(0)"))
    assert section.notes == ("the section: it is measured through cuDNN 9, which Tesla P100 cannot run",)


def test_problems_for_cudnn():
    problem = kernels_cuda._problem(ODD, "wgrad", "float16")
    assert (problem.x, problem.w, problem.y) == ((2, 7, 9, 3), (5, 2, 3, 3), (2, 6, 5, 5))
    assert (problem.pad, problem.stride, problem.flops) == ((0, 1), (1, 2), ODD.flops)
    assert kernels_cuda._problem(deepbench.CONVOLUTIONS[4], "fprop", "int8").kind == "fprop_bias_relu"
    with pytest.raises(GraphError, match="3 channels with 5 filters: both must be multiples of 16"):
        kernels_cuda._problem(ODD, "fprop", "float8")


# --- kernels on the CPU ---


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[mx.nd.NDArray]:
    """The random arrays that the measurements of the kernels draw, in order."""
    found: list[mx.nd.NDArray] = []

    def draw(shape: tuple[int, ...]) -> mx.nd.NDArray:
        found.append(mx.nd.random.uniform(-1, 1, shape))
        return found[-1]

    monkeypatch.setattr(kernels_cpu, "_random", draw)
    return found


@pytest.mark.parametrize("transposes", [(False, False), (True, False), (False, True)])
def test_product_on_the_cpu(drawn, transposes, monkeypatch):
    """The product of column-major matrices, to which the stated sizes apply."""
    results = []
    dot = mx.nd.dot
    monkeypatch.setattr(mx.nd, "dot", lambda *values, **options: results.append(dot(*values, **options)) or results[-1])
    size = Gemm(5, 7, 11, *transposes)
    with kernels_cpu.CpuMachine().gemm(size, "fp32") as sample:
        assert sample() > 0
    a, b = (np.asfortranarray(array.asnumpy().T) for array in drawn)  # as a column-major reader sees them
    expected = (a.T if size.transpose_a else a) @ (b.T if size.transpose_b else b)
    assert expected.shape == (5, 7)
    np.testing.assert_allclose(results[-1].asnumpy().T, expected, atol=1e-5)  # sums of 11 products in fp32


@pytest.mark.parametrize("direction", kernels.PASSES)
def test_convolution_on_the_cpu(drawn, direction, monkeypatch):
    results = []
    convolution = mx.nd.Convolution
    monkeypatch.setattr(mx.nd, "Convolution", lambda *values, **options: results.append(convolution(*values, **options))
                        or results[-1])
    with kernels_cpu.CpuMachine().convolution(ODD, direction, "fp32") as sample:
        assert sample() > 0
    data, weight, gradient = (array.asnumpy().astype(float) for array in drawn)
    padded = np.pad(data, ((0, 0), (0, 0), (0, 0), (1, 1)))
    out, data_gradient, weight_gradient = np.zeros(gradient.shape), np.zeros(padded.shape), np.zeros(weight.shape)
    for y, x in np.ndindex(gradient.shape[2:]):
        window = np.s_[:, :, y : y + 2, 2 * x : 2 * x + 3]
        out[:, :, y, x] = np.einsum("nchw,kchw->nk", padded[window], weight)
        data_gradient[window] += np.einsum("nk,kchw->nchw", gradient[:, :, y, x], weight)
        weight_gradient += np.einsum("nk,nchw->kchw", gradient[:, :, y, x], padded[window])
    found, expected = {"forward": (results[-1], out), "data gradient": (drawn[0].grad, data_gradient[..., 1:-1]),
                       "weight gradient": (drawn[1].grad, weight_gradient)}[direction]
    np.testing.assert_allclose(found.asnumpy(), expected, atol=2e-5)  # sums of up to 60 products in fp32
    assert [array.grad is not None for array in drawn] == [direction == "data gradient", direction == "weight gradient",
                                                           False]
