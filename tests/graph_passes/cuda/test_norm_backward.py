"""From one BatchNorm through a 1x1 convolution to the sums of the preceding BatchNorm, against float64 NumPy: random
values, odd numbers of rows, poisoned outputs."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded
from test_batch_norm import BatchNormCase
from test_dgrad_reduce import BLOCKS, STORED, check_sums

from graph_passes.executors.cuda.kernel_library import C_TYPES
from graph_passes.executors.cuda.kernels.dgrad_reduce import BLOCK
from graph_passes.executors.cuda.kernels.norm_backward import NormBackward


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, k, rows, reduces, relu, drop, blocks", [
    ("float16", 256, 413, True, False, False, 3), ("float16", 256, 413, False, False, False, 3),
    ("bfloat16", 64, 1003, True, True, False, 3), ("bfloat16", 128, 64, False, False, False, 3),
    ("float16", 64, 517, False, True, False, 3), ("float16", 256, 413, True, False, True, 3),
    ("bfloat16", 128, 517, False, False, True, 3), ("float16", 64, 10_003, True, False, False, 144),
    ("float16", 128, 10_003, True, False, False, 145), ("float16", 256, 1, True, False, False, 1),
    ("float16", 256, 63, True, True, False, 1), ("bfloat16", 256, 65, True, False, False, 3),
    ("float16", 256, 20_003, True, False, False, 37), ("bfloat16", 256, 20_003, False, True, True, 35),
    ("float16", 64, 20_003, False, False, False, 37)])
def test_norm_backward(device: Device, dtype: str, k: int, rows: int, reduces: bool, relu: bool, drop: bool,
                       blocks: int) -> None:
    """One tile, fewer tiles than blocks, and so many tiles that all slots are reused many times."""
    check_norm_backward(device, 64, dtype, k, rows, reduces, relu, drop, blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, k, rows, reduces, relu, drop, blocks", [
    ("float16", 512, 65, True, False, False, 1), ("float16", 512, 1, False, False, False, 3),
    ("float16", 512, 1, True, False, False, 1), ("float16", 512, 63, True, False, False, 1),
    ("bfloat16", 512, 1003, True, False, False, 3),
    ("float16", 512, 1003, False, True, False, 2), ("bfloat16", 512, 413, True, True, True, 3),
    ("float16", 256, 413, True, False, True, 3), ("bfloat16", 256, 517, False, False, False, 3),
    ("float16", 256, 1003, True, True, False, 2), ("float16", 128, 1003, True, False, False, 3),
    ("bfloat16", 128, 130, False, True, False, 3), ("float16", 512, 10_003, True, False, False, 66),
    ("float16", 512, 20_003, True, False, False, 35), ("float16", 512, 130, True, False, False, 5),
    ("float16", 256, 20_003, True, False, False, 37)])
def test_norm_backward_by_clusters(device: Device, dtype: str, k: int, rows: int, reduces: bool, relu: bool, drop: bool,
                                   blocks: int) -> None:
    check_norm_backward(device, 128, dtype, k, rows, reduces, relu, drop, blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("columns, k", [(64, 256), (128, 512)])
@pytest.mark.parametrize("mean", [100.0, 1000.0])
def test_norm_backward_far_from_zero(device: Device, columns: int, k: int, mean: float) -> None:
    """If the mean of the earlier BatchNorm's input is far above its deviation, its sums are as accurate."""
    check_norm_backward(device, columns, "float16", k, 4001, True, False, False, BLOCKS, mean)


def check_norm_backward(device: Device, columns: int, dtype: str, k: int, rows: int, reduces: bool, relu: bool,
                        drop: bool, blocks: int, mean: float = 0.0) -> None:
    """Checks the gradients of a BatchNorm's input (never stored), of the preceding 1x1 convolution, and of that
    convolution's input. `mean` is added to the earlier BatchNorm's input."""
    way = NormBackward(k, columns)
    out = BatchNormCase(device, rows, k, dtype, seed=k + rows)
    norm = BatchNormCase(device, rows, columns, dtype, seed=columns + rows, mean=mean)
    random = np.random.default_rng(rows)
    given = rounded(random.normal(0, 1, (rows, k)), dtype)
    out_before_relu = out.normal * out.gamma + out.beta
    if relu:
        given[np.abs(out_before_relu) < 1e-3] = 0  # near zero either sign is right
    out_dz = np.where(out_before_relu > 0, given, 0) if relu else given
    out_dz = out_dz * (out.factor if drop else 1)
    w = rounded(random.normal(0, k**-0.5, (k, columns)), dtype)
    # random sums: with the real ones, the gradient of a single row would be 0
    out_dbeta, out_dgamma = random.normal(0, rows**0.5, (2, k))
    dy = rounded(out.gamma * out.invstd * (out_dz - out_dbeta / rows - out.normal * out_dgamma / rows), dtype)
    before_relu = norm.normal * norm.gamma + norm.beta
    dx, dw_parts = device.poisoned((rows, columns), dtype), device.poisoned((blocks, k, columns))
    dgamma, dbeta = device.poisoned((columns,)), device.poisoned((columns,))
    partials, tickets = device.poisoned((2 * blocks * columns,)), device.zeros(8)
    kernel = out.kernel("norm_backward", str(k), str(columns), relu, reduces, drop)
    dz_x_and_behind = [device.put(array, dtype) for array in (given, out.x, norm.x)]
    tensors = [device.gpu.tensor_map(address, dtype, way.tiling(rows, channels))
               for address, channels in zip(dz_x_and_behind, (k, k, columns), strict=True)]
    for _ in range(2):  # twice: the tickets must be back at zero
        device.run("norm_backward.cu", kernel, (way.blocks, blocks, 1), BLOCK, *tensors,
                   out.saved(), device.put(out.gamma), device.put(out.beta), device.put(out_dgamma),
                   device.put(out_dbeta), device.put(w, dtype), dz_x_and_behind[2], dx, norm.saved(),
                   device.put(norm.gamma), device.put(norm.beta), dgamma, dbeta, dw_parts, partials, tickets,
                   ctypes.c_uint32(rows), *out.dropping(drop), shared_bytes=way.shared_bytes)
    if reduces:
        x = rounded(np.maximum(before_relu, 0), dtype)
        wanted, clear = np.where(before_relu > 0, dy @ w, 0), np.abs(before_relu) > 1e-3
    else:
        x, wanted, clear = norm.x, dy @ w, np.ones((rows, columns), bool)
    got = device.get(dx, (rows, columns), dtype)
    assert relative_error(got[clear], wanted[clear]) < STORED[dtype]
    if reduces and rows > 1:
        check_sums(device.get(dbeta, (columns,)), np.where(clear, wanted, got), dtype)
        check_sums(device.get(dgamma, (columns,)), np.where(clear, wanted, got) * norm.normal, dtype)
    elif reduces:  # with one row, nothing averages the rounding of its products
        assert relative_error(device.get(dbeta, (columns,)), got[0]) < PRECISION[dtype]
    dw = device.poisoned((k, columns), dtype)
    vectors = k * columns // 8
    device.run("norm_backward.cu", f"sum_parts<{C_TYPES[dtype]}>", (-(-vectors // 16), 1, 1), (256, 1, 1), dw_parts,
               dw, ctypes.c_int(blocks), ctypes.c_uint32(vectors))
    assert relative_error(device.get(dw, (k, columns), dtype), dy.T @ x) < STORED[dtype]
