"""Elementwise kernels against float64 NumPy: random values, odd sizes, poisoned outputs, all dtypes."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded

from graph_passes.executors.cuda.kernel_library import C_TYPES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("images", [2, 5])
def test_mix_images(device: Device, dtype: str, images: int) -> None:
    x, mixup = rounded(np.random.default_rng(images).normal(0, 1, (images, 37, 29, 4)), dtype), 0.7
    mixed, size = device.put(x, dtype), x[0].size
    blocks = -(-size // 1024) * -(-images // 2)
    device.run("elementwise.cu", f"mix_images<{C_TYPES[dtype]}>", (blocks, 1, 1), (256, 1, 1), mixed,
               ctypes.c_int64(size), ctypes.c_int(images), ctypes.c_float(mixup))
    got = device.get(mixed, x.shape, dtype)
    assert relative_error(got, mixup * x + (1 - mixup) * x[::-1]) < PRECISION[dtype]


@pytest.mark.parametrize("images, channels", [(2, 4), (5, 4), (4, 3)])
def test_exchange_boxes(device: Device, dtype: str, images: int, channels: int) -> None:
    x = rounded(np.random.default_rng(images).normal(0, 1, (images, 37, 29, channels)), dtype)
    for top, left, bottom, right in ((0, 0, 37, 29), (3, 1, 36, 29), (36, 28, 37, 29)):
        mixed = device.put(x, dtype)
        blocks = -(-(bottom - top) * (right - left) // 256) * -(-images // 2)
        device.run("elementwise.cu", f"exchange_boxes<{C_TYPES[dtype]}, {channels}>", (blocks, 1, 1), (256, 1, 1),
                   mixed, *map(ctypes.c_int, (images, 37, 29, top, left, bottom, right)))
        wanted = x.copy()
        wanted[:, top:bottom, left:right] = x[::-1, top:bottom, left:right]
        assert np.array_equal(device.get(mixed, x.shape, dtype), wanted)


def test_elementwise(device: Device, dtype: str) -> None:
    random = np.random.default_rng(0)
    x, y = (rounded(random.normal(0, 1, (37, 8)), dtype) for _ in range(2))
    total = device.poisoned(x.shape, dtype)
    device.run("elementwise.cu", f"add<{C_TYPES[dtype]}>", (1, 1, 1), (256, 1, 1), device.put(x, dtype),
               device.put(y, dtype), total, ctypes.c_uint32(37))
    assert relative_error(device.get(total, x.shape, dtype), x + y) < PRECISION[dtype]
    image = random.normal(0, 1, (301, 3)).astype(np.float32)
    converted = device.poisoned((301, 4), dtype)
    device.run("elementwise.cu", f"convert_input<float, {C_TYPES[dtype]}>", (2, 1, 1), (256, 1, 1),
               device.put(image), converted, ctypes.c_int64(301), ctypes.c_int(3), ctypes.c_int(4))
    got = device.get(converted, (301, 4), dtype)
    assert np.array_equal(got[:, :3], rounded(image, dtype)) and not got[:, 3].any()
    wide = device.poisoned(x.shape)
    device.run("elementwise.cu", f"widen<{C_TYPES[dtype]}>", (1, 1, 1), (256, 1, 1), device.put(x, dtype), wide,
               ctypes.c_uint32(37))
    assert np.array_equal(device.get(wide, x.shape), x)
