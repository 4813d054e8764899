"""The stem's BatchNorm, ReLU and max pooling against float64 NumPy: random values, odd sizes,
poisoned outputs, all dtypes."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error
from test_batch_norm import EPS, MOMENTUM, BatchNormCase
from test_pooling import pool_reference

from graph_passes.executors.cuda.builder import APPLY_BLOCK
from graph_passes.executors.cuda.kernels.batch_norm_relu_max_pool import STRIP, Image
from graph_passes.executors.cuda.kernels.pooling import Window

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("height, width, channels", [(1, 1, 8), (2, 5, 24), (15, 33, 64), (17, 8, 72), (36, 6, 128)])
def test_batch_norm_relu_max_pool(device: Device, dtype: str, height: int, width: int, channels: int) -> None:
    """Whole and partial strips, odd and even sizes, scales of both signs, equal values."""
    images, blocks = 3, 2
    out = images, (height + 1) // 2, (width + 1) // 2, channels
    case = BatchNormCase(device, images * height * width, channels, dtype, seed=height)
    x = np.round(case.x * 4) / 4
    case.x, case.gamma = x, case.gamma * np.where(np.arange(channels) % 3, 1, -1)
    mean, invstd = x.mean(0), 1 / np.sqrt(x.var(0) + EPS)
    y, x_winner = (device.poisoned(out, dtype) for _ in range(2))
    winner, saved = device.poisoned(out, "uint8"), device.poisoned((2, channels))
    running_mean, running_var = (device.put(np.ones(channels)) for _ in range(2))
    device.run("batch_norm_relu_max_pool.cu", case.kernel("batch_norm_relu_max_pool"), (case.tiles, blocks, 1),
               APPLY_BLOCK, device.put(x, dtype), *case.sums(about_mean=True), device.put(case.gamma),
               device.put(case.beta), y, winner, x_winner, saved, running_mean, running_var, ctypes.c_float(EPS),
               ctypes.c_float(MOMENTUM),
               Image(height, width, *out[1:3]), ctypes.c_uint32(case.rows),
               ctypes.c_uint32(images * -(-out[1] // STRIP) * out[2]), ctypes.c_int(channels))
    sign = np.sign(case.gamma)
    largest, place = pool_reference(x.reshape(images, height, width, channels) * sign,
                                    Window(height, width, *out[1:3], 3, 3, 2, 2, 1, 1))
    value = largest * sign
    wanted = (value - mean) * invstd * case.gamma + case.beta
    clear = np.abs(wanted) > 1e-3  # near zero either sign is right
    assert np.array_equal(device.get(x_winner, out, dtype)[clear], value[clear])
    assert np.array_equal(device.get(winner, out, "uint8")[clear], np.where(wanted > 0, place, 255)[clear])
    if case.rows > 4:
        assert relative_error(device.get(y, out, dtype), np.maximum(wanted, 0)) < PRECISION[dtype] + 2e-5
        assert relative_error(device.get(saved, (2, channels)), np.stack([mean, invstd])) < 1e-4
        assert relative_error(device.get(running_mean, (channels,)), MOMENTUM + (1 - MOMENTUM) * mean) < 1e-5
