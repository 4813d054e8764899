"""Products through cuBLASLt against NumPy in float64, and 8-bit convolutions through cuDNN, in every precision."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from graph_passes.errors import GraphError
from graph_passes.executors.cuda.device import Gpu, e4m3
from graph_passes.executors.cuda.gemm import WORKSPACE_BYTES, GemmLibrary, GemmProblem

# Bounds relative to the largest magnitude in the result: rounding of the operands and of the result. fp32: sums of 200
# products.
TOLERANCES = {"fp32": 1e-5, "tf32": 2**-9, "fp16": 2**-9, "bf16": 2**-7, "fp8": 2**-7, "int8": 0.0}


def decoded(octets: np.ndarray) -> np.ndarray:
    """The values of FP8 E4M3 bytes, without NaN. Source: arXiv:2209.05433, table 1."""
    exponent, mantissa = (octets >> 3) & 15, (octets & 7) / 8
    values = np.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent.astype(int) - 7), mantissa * 2.0**-6)
    return np.where(octets & 128, -values, values)


def test_e4m3(rng):
    values = rng.uniform(-1, 1, 10_000).astype(np.float32)
    found = decoded(e4m3(values))
    assert (np.abs(found) <= np.abs(values) * (1 + 2**-11)).all(), "cut off, after rounding to float16"
    large = np.abs(values.astype(np.float16)) >= 2**-6
    assert (np.abs(found - values)[large] <= np.abs(values)[large] / 8).all()
    assert (found[~large] == 0).all()
    assert decoded(e4m3(np.array([1, -1, 0.5, 0.4375], np.float32))).tolist() == [1, -1, 0.5, 0.4375]


def test_problem():
    problem = GemmProblem(5, 7, 11, False, True, "fp16")
    assert problem.flops == 2 * 5 * 7 * 11
    assert problem.num_bytes == (110, 154, 70) and problem.transposes == (False, True)
    integers = GemmProblem(16, 32, 48, False, True, "int8")
    assert integers.transposes == (True, False), "the one layout of 8-bit operands"
    assert integers.dtypes == ("int8", "int8", "int32") and integers.num_bytes == (768, 1536, 2048)


def test_without_the_library(monkeypatch):
    real = builtins.__import__

    def no_pathfinder(name: str, *rest: Any) -> Any:
        if name == "cuda.pathfinder":
            raise ImportError("there is none")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_pathfinder)
    monkeypatch.delitem(sys.modules, "cuda.pathfinder", raising=False)
    with pytest.raises(GraphError, match="cuBLASLt cannot be found .there is none.: install the GPU packages"):
        GemmLibrary(gpu=None)  # type: ignore[arg-type]  # which is not reached


# --- on a GPU ---


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    gpu = Gpu()
    yield gpu
    gpu.free_all()


def stored(values: np.ndarray, precision: str) -> tuple[np.ndarray, np.ndarray]:
    """A matrix as stored in memory in a precision, and its values in float64."""
    if precision == "fp16":
        return values.astype(np.float16), values.astype(np.float16).astype(np.float64)
    if precision == "bf16":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if precision == "fp8":
        return e4m3(values), decoded(e4m3(values))
    if precision == "int8":
        integers = np.rint(127 * values).astype(np.int8)
        return integers, integers.astype(np.float64)
    return values, values.astype(np.float64)


def read(gpu: Gpu, address: int, count: int, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (gpu.download(address, (count,), np.uint16).astype(np.uint32) << 16).view(np.float32).astype(float)
    return gpu.download(address, (count,), dtype).astype(float)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", list(TOLERANCES))
@pytest.mark.parametrize("transposes", [(False, False), (True, False), (False, True)])
def test_product(gpu, precision, transposes, rng):
    if precision == "fp8" and gpu.capability < (8, 9):
        pytest.skip("this GPU has no FP8")
    m, n, k = (96, 48, 208) if precision in ("fp8", "int8") else (35, 57, 203)
    problem = GemmProblem(m, n, k, *transposes, precision)
    operands, values = zip(*(stored(rng.uniform(-1, 1, shape).astype(np.float32), precision)
                             for shape in ((m, k), (k, n))), strict=True)
    addresses = [gpu.allocate(size) for size in (*problem.num_bytes, WORKSPACE_BYTES)]
    for address, matrix, is_transposed in zip(addresses, operands, problem.transposes, strict=False):
        gpu.upload(address, matrix if is_transposed else matrix.T)  # column-major
    product = GemmLibrary(gpu).fastest(problem, *addresses)
    gpu.fill(addresses[2], 0xFF, problem.num_bytes[2])
    product.enqueue(*addresses)
    found = read(gpu, addresses[2], m * n, problem.dtypes[2]).reshape(n, m).T
    expected = values[0] @ values[1]
    assert np.abs(found - expected).max() <= TOLERANCES[precision] * np.abs(expected).max()
    for address in addresses:
        gpu.free(address)


@pytest.mark.gpu
def test_what_the_gpu_has_not(gpu):
    addresses = [gpu.allocate(1 << 20) for _ in range(3)] + [gpu.allocate(WORKSPACE_BYTES)]
    with pytest.raises(GraphError, match="has no int8 product of 7 x 9 x 11 on .*: INT8 needs a k that is "):
        GemmLibrary(gpu).fastest(GemmProblem(7, 9, 11, False, False, "int8"), *addresses)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["int8", "float8"])
def test_convolution_in_8_bits(gpu, dtype, rng, tmp_path):
    """A 1x1 convolution with bias and ReLU, which is a matrix product. No result is large enough to saturate."""
    from common.disk_cache import Cache
    from graph_passes.executors.cuda.arena import Arena
    from graph_passes.executors.cuda.convolution import ConvolutionLibrary, Problem

    if dtype == "float8" and gpu.capability < (8, 9):
        pytest.skip("this GPU has no FP8")
    problem = Problem("fprop_bias_relu", (2, 8, 8, 32), (64, 1, 1, 32), (2, 8, 8, 64), (0, 0), (1, 1), (1, 1), dtype)
    plan = ConvolutionLibrary(gpu, Cache("test", tmp_path), Arena(gpu)).plan(problem)
    bias = rng.integers(-8, 8, 64).astype(np.float32) / (1 if dtype == "int8" else 8)
    if dtype == "int8":
        x, w = (rng.integers(-1, 2, shape).astype(np.int8) for shape in (problem.x, problem.w))
        x_values, w_values = x.astype(float), w.astype(float)
    else:
        x, w = (e4m3(rng.uniform(-1, 1, shape).astype(np.float32)) for shape in (problem.x, problem.w))
        x_values, w_values = decoded(x), decoded(w)
    addresses = [gpu.allocate(array.nbytes) for array in (x, w, bias)] + [gpu.allocate(2 * 8 * 8 * 64)]
    for address, array in zip(addresses, (x, w, bias), strict=False):
        gpu.upload(address, array)
    plan.enqueue(*addresses, workspace=gpu.allocate(plan.workspace_bytes))
    found = gpu.download(addresses[-1], problem.y, np.uint8)
    expected = np.maximum(x_values.reshape(-1, 32) @ w_values.reshape(64, 32).T + bias, 0).reshape(problem.y)
    if dtype == "int8":
        assert (found.view(np.int8) == expected).all()
    else:
        assert np.abs(decoded(found) - expected).max() <= np.abs(expected).max() * 2**-4  # half a unit of 3 bits
