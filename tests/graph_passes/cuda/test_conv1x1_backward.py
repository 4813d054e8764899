"""The fused 1x1 convolutions against float64 NumPy: random values, odd numbers of rows, columns that do not
fill the last block, poisoned outputs."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded
from test_kernels import BatchNormCase

from graph_passes.executors.cuda.kernels import C_TYPES
from graph_passes.executors.cuda.lowering.conv1x1_backward import BLOCK, DgradReduce, NormBackward

pytestmark = pytest.mark.gpu

BLOCKS = 3  # along the rows: fewer than tiles, so that each block walks
# Norm of the error over the norm: rounding of what is stored, and fp32 sums of products in another order.
STORED = {dtype: PRECISION[dtype] + 2e-5 for dtype in ("float16", "bfloat16")}
# Per channel, of the sum of the absolute values of its terms. Terms that are made on the way are not rounded to the
# dtype, and those that are stored may be rounded to the other side.
SUMS = {"float16": 2e-4, "bfloat16": 2e-3}


def check_sums(got: np.ndarray, terms: np.ndarray, dtype: str) -> None:
    """`got` (channels,) against the sum of `terms` (rows, channels)."""
    assert np.max(np.abs(got - terms.sum(0)) / (np.abs(terms).sum(0) + 1e-6)) < SUMS[dtype]


@pytest.mark.parametrize("dtype, k, rows, columns, add, pair, drop", [
    ("float16", 64, 1, 128, True, False, False),
    ("float16", 64, 129, 136, False, True, False),
    ("bfloat16", 64, 1003, 256, True, True, False),
    ("float16", 128, 10003, 256, True, False, False),
    ("bfloat16", 128, 333, 320, True, True, False),
    ("float16", 128, 517, 128, False, False, False),
    ("bfloat16", 256, 517, 160, True, False, False),
    ("float16", 256, 259, 512, True, True, False),
    ("float16", 64, 1003, 256, True, False, True),
    ("bfloat16", 128, 333, 320, True, True, True),
    ("float16", 256, 259, 512, False, False, True),
    ("float16", 256, 517, 136, False, True, True)])
def test_dgrad_reduce(device: Device, dtype: str, k: int, rows: int, columns: int, add: bool, pair: bool,
                      drop: bool) -> None:
    norms = [BatchNormCase(device, rows, columns, dtype, seed=seed) for seed in (rows, columns)]
    random = np.random.default_rng(rows + columns)
    dy = rounded(random.normal(0, 1, (rows, k)), dtype)
    w = rounded(random.normal(0, k**-0.5, (k, columns)), dtype)
    addend = rounded(random.normal(0, 1, (rows, columns)), dtype)
    mask = random.integers(0, 2, (rows, columns)).astype(bool)
    dz, (dgamma, dgamma_2, dbeta, dbeta_2) = (device.poisoned((rows, columns), dtype),
                                              [device.poisoned((columns,)) for _ in range(4)])
    kernel = norms[0].kernel("dgrad_reduce", str(k), add, pair, drop)
    partials, tickets = device.poisoned((4 * BLOCKS * columns,)), device.zeros(4 * columns)
    for _ in range(2):  # twice: the tickets must be back at zero
        device.run("dgrad_reduce.cu", kernel, (-(-columns // DgradReduce.COLUMNS), BLOCKS, 1), BLOCK,
                   device.put(dy, dtype), device.put(w, dtype), *(device.put(norm.x, dtype) for norm in norms),
                   device.put(addend, dtype), device.put(np.packbits(mask, axis=1, bitorder="little"), "uint8"), dz,
                   *(norm.saved() for norm in norms), dgamma, dgamma_2, dbeta, dbeta_2, partials, tickets,
                   ctypes.c_uint32(rows), ctypes.c_int(columns), *norms[0].dropping(drop),
                   shared_bytes=DgradReduce(k).shared_bytes(add, pair))
    wanted = np.where(mask, dy @ w + (addend if add else 0), 0)
    assert relative_error(device.get(dz, (rows, columns), dtype), wanted) < STORED[dtype]
    own = wanted * (norms[0].factor if drop else 1)
    check_sums(device.get(dbeta, (columns,)), own, dtype)
    if rows > 1:  # of one row the variance is 0, and so is x - mean but for rounding
        check_sums(device.get(dgamma, (columns,)), own * norms[0].normal, dtype)
    if pair:
        check_sums(device.get(dbeta_2, (columns,)), wanted, dtype)
        assert drop or np.array_equal(device.get(dbeta_2, (columns,)), device.get(dbeta, (columns,)))
        check_sums(device.get(dgamma_2, (columns,)), wanted * norms[1].normal, dtype)


@pytest.mark.parametrize("dtype, k, rows, reduces, relu, drop", [
    ("float16", 256, 413, True, False, False), ("float16", 256, 413, False, False, False),
    ("bfloat16", 64, 1003, True, True, False), ("bfloat16", 128, 64, False, False, False),
    ("float16", 64, 517, False, True, False), ("float16", 256, 413, True, False, True),
    ("bfloat16", 128, 517, False, False, True)])
def test_norm_backward(device: Device, dtype: str, k: int, rows: int, reduces: bool, relu: bool, drop: bool) -> None:
    """Gradients of a BatchNorm's input (never stored), of the 1x1 convolution before it, and of its input."""
    columns = NormBackward.COLUMNS
    out, norm = (BatchNormCase(device, rows, channels, dtype, seed=channels + rows) for channels in (k, columns))
    random = np.random.default_rng(rows)
    given = rounded(random.normal(0, 1, (rows, k)), dtype)
    out_before_relu = out.normal * out.gamma + out.beta
    if relu:
        given[np.abs(out_before_relu) < 1e-3] = 0  # near zero either answer is right
    out_dz = np.where(out_before_relu > 0, given, 0) if relu else given * (out.factor if drop else 1)
    w = rounded(random.normal(0, k**-0.5, (k, columns)), dtype)
    out_dbeta, out_dgamma = out_dz.sum(0), (out_dz * out.normal).sum(0)
    dy = rounded(out.gamma * out.invstd * (out_dz - out_dbeta / rows - out.normal * out_dgamma / rows), dtype)
    before_relu = norm.normal * norm.gamma + norm.beta
    dx, dw_parts = device.poisoned((rows, columns), dtype), device.poisoned((BLOCKS, k, columns))
    dgamma, dbeta = device.poisoned((columns,)), device.poisoned((columns,))
    partials, tickets = device.poisoned((2 * BLOCKS * columns,)), device.zeros(4)
    kernel = out.kernel("norm_backward", str(k), relu, reduces, drop)
    for _ in range(2):  # twice: the tickets must be back at zero
        device.run("norm_backward.cu", kernel, (1, BLOCKS, 1), BLOCK, device.put(given, dtype),
                   device.put(out.x, dtype), out.saved(), device.put(out.gamma), device.put(out.beta),
                   device.put(out_dgamma), device.put(out_dbeta), device.put(w, dtype), device.put(norm.x, dtype), dx,
                   norm.saved(), device.put(norm.gamma), device.put(norm.beta), dgamma, dbeta, dw_parts, partials,
                   tickets, ctypes.c_uint32(rows), *out.dropping(drop), shared_bytes=NormBackward(k).shared_bytes)
    if reduces:
        x = rounded(np.maximum(before_relu, 0), dtype)
        wanted, clear = np.where(before_relu > 0, dy @ w, 0), np.abs(before_relu) > 1e-3
    else:
        x, wanted, clear = norm.x, dy @ w, np.ones((rows, columns), bool)
    got = device.get(dx, (rows, columns), dtype)
    assert relative_error(got[clear], wanted[clear]) < STORED[dtype]
    if reduces:
        check_sums(device.get(dbeta, (columns,)), np.where(clear, wanted, got), dtype)
        check_sums(device.get(dgamma, (columns,)), np.where(clear, wanted, got) * norm.normal, dtype)
    dw = device.poisoned((k, columns), dtype)
    vectors = k * columns // 8
    device.run("norm_backward.cu", f"sum_parts<{C_TYPES[dtype]}>", (-(-vectors // 16), 1, 1), (256, 1, 1), dw_parts,
               dw, ctypes.c_int(BLOCKS), ctypes.c_uint32(vectors))
    assert relative_error(device.get(dw, (k, columns), dtype), dy.T @ x) < STORED[dtype]
