"""Two BatchNorms whose outputs are added, against float64 NumPy: random values, odd sizes, poisoned outputs, all
dtypes."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded
from test_batch_norm import EPS, MOMENTUM, SHAPES, BatchNormCase, SecondGrad

from graph_passes.executors.cuda.builder import APPLY_BLOCK, REDUCE_BLOCK

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows, channels", SHAPES[1:])
@pytest.mark.parametrize("about_mean", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("drop", [False, True])
def test_batch_norm_pair_forward(device: Device, dtype: str, rows: int, channels: int, about_mean: tuple[bool, bool],
                                 drop: bool) -> None:
    cases = [BatchNormCase(device, rows, channels, dtype, seed) for seed in (rows, channels)]
    sums, flags = zip(*(case.sums(about) for case, about in zip(cases, about_mean, strict=True)), strict=True)
    y, mask = device.poisoned((rows, channels), dtype), device.poisoned((rows, channels // 8), "uint8")
    saved = [device.poisoned((2, channels)) for _ in cases]
    running = [device.put(np.full(channels, value)) for value in (0.25, 0.5, 2.0, 3.0)]
    device.run("batch_norm_pair.cu", cases[0].kernel("batch_norm_pair_apply", drop), (cases[0].tiles, 3, 1),
               APPLY_BLOCK, *(device.put(case.x, dtype) for case in cases),
               *sums, *flags, *(device.put(case.gamma) for case in cases), *(device.put(case.beta) for case in cases),
               y, mask, *saved, *running, ctypes.c_float(EPS), ctypes.c_float(MOMENTUM), *cases[0].size,
               *cases[0].dropping(drop))
    norms = [case.normal * case.gamma + case.beta for case in cases]
    before_relu = norms[0] * (cases[0].factor if drop else 1) + norms[1]
    got = device.get(y, (rows, channels), dtype)
    assert relative_error(got, np.maximum(before_relu, 0)) < PRECISION[dtype] + 2e-5  # as in test_batch_norm_forward
    bits = np.unpackbits(device.get(mask, (rows, channels // 8), "uint8"), axis=1, bitorder="little")
    clear = np.abs(before_relu) > 1e-3
    assert np.array_equal(bits[clear], (before_relu > 0)[clear])
    for number, case in enumerate(cases):
        kept = device.get(saved[number], (2, channels))
        assert relative_error(kept, np.stack([case.mean, case.invstd])) < 1e-4
        for address, old, value in ((running[number], (0.25, 0.5)[number], case.mean),
                                    (running[2 + number], (2.0, 3.0)[number], case.var)):
            wanted = MOMENTUM * old + (1 - MOMENTUM) * value
            assert relative_error(device.get(address, (channels,)), wanted) < 1e-5


@pytest.mark.parametrize("rows, channels", SHAPES[1:])
@pytest.mark.parametrize("two, drop", [(False, False), (True, False), (False, True), (True, True)])
def test_batch_norm_pair_backward(device: Device, dtype: str, rows: int, channels: int, two: bool, drop: bool) -> None:
    cases = [BatchNormCase(device, rows, channels, dtype, seed) for seed in (rows, channels)]
    random = np.random.default_rng(rows + channels)
    dy, dy2 = rounded(random.normal(0.1, 1, (rows, channels)), dtype), SecondGrad.random(
        rows, channels, dtype, "WHOLE" if two else "NONE")
    let_through = random.normal(0, 1, (rows, channels)) > 0
    dz = (dy + dy2.values) * let_through
    x, saved = [device.put(case.x, dtype) for case in cases], [case.saved() for case in cases]
    dgamma, dbeta = ([device.poisoned((channels,)) for _ in cases] for _ in range(2))
    dz_address = device.poisoned((rows, channels), dtype)
    partials = device.poisoned(((3 + drop) * 5 * channels,))
    mask = device.put(np.packbits(let_through, axis=1, bitorder="little"), "uint8")
    for _ in range(2):  # twice: the tickets must be back at zero
        device.run("batch_norm_pair.cu", cases[0].kernel("batch_norm_pair_backward_reduce", dy2.kind, drop),
                   (cases[0].tiles, 5, 1), REDUCE_BLOCK, *x, device.put(dy, dtype), device.put(dy2.given, dtype), mask,
                   dz_address, *saved, *dgamma, *dbeta, partials, cases[0].tickets, *cases[0].size,
                   *cases[0].dropping(drop), dy2.grid)
    sums = [[device.get(address, (channels,)) for address in pair] for pair in (dgamma, dbeta)]
    dx = [device.poisoned((rows, channels), dtype) for _ in cases]
    device.run("batch_norm_pair.cu", cases[0].kernel("batch_norm_pair_backward_apply", drop), (cases[0].tiles, 3, 1),
               APPLY_BLOCK, *x, dz_address, *dx, *saved, *(device.put(case.gamma) for case in cases), *dgamma, dbeta[0],
               *cases[0].size, dbeta[1] if drop else 0, *cases[0].dropping(drop))
    assert relative_error(device.get(dz_address, (rows, channels), dtype), rounded(dz, dtype)) < PRECISION[dtype]
    factors = cases[0].factor if drop else 1, 1
    for case, factor, address, got_dgamma, got_dbeta in zip(cases, factors, dx, *sums, strict=True):
        assert relative_error(got_dbeta, (dz * factor).sum(0)) < 1e-4
        assert relative_error(got_dgamma, (dz * factor * case.normal).sum(0)) < 1e-4
        of_norm = rounded(dz, dtype) * factor
        wanted = case.gamma * case.invstd * (of_norm - got_dbeta / rows - case.normal * got_dgamma / rows)
        assert relative_error(device.get(address, (rows, channels), dtype), wanted) < PRECISION[dtype] + 1e-4
