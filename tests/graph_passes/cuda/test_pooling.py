"""Max and average pooling against float64 NumPy: random values, odd sizes, poisoned outputs, all dtypes."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded

from graph_passes import Node
from graph_passes.executors.cuda.kernel_library import C_TYPES
from graph_passes.executors.cuda.kernels.pooling import Window
from graph_passes.operators import pooling

pytestmark = pytest.mark.gpu


def pool_reference(x: np.ndarray, window: Window) -> tuple[np.ndarray, np.ndarray]:
    """Maximum over each window, and the position of the first maximum in it."""
    n, height, width, channels = x.shape
    y = np.full((n, window.out_height, window.out_width, channels), -np.inf)
    winner = np.zeros(y.shape, np.uint8)
    for i in range(window.kernel_h):
        for j in range(window.kernel_w):
            for row in range(window.out_height):
                for column in range(window.out_width):
                    h, w = row * window.stride_h - window.pad_h + i, column * window.stride_w - window.pad_w + j
                    if 0 <= h < height and 0 <= w < width:
                        better = x[:, h, w] > y[:, row, column]
                        y[:, row, column][better] = x[:, h, w][better]
                        winner[:, row, column][better] = i * window.kernel_w + j
    return y, winner


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("size, kernel, stride, pad", [((11, 9), 3, 2, 1), ((8, 8), 2, 2, 0), ((7, 5), 3, 1, 1)])
def test_max_pool(device: Device, dtype: str, size: tuple[int, int], kernel: int, stride: int, pad: int,
                  two: bool) -> None:
    n, channels = 3, 24
    random = np.random.default_rng(kernel)
    x = rounded(random.integers(-4, 4, (n, *size, channels)).astype(np.float64), dtype)  # many ties
    out = tuple((s + 2 * pad - kernel) // stride + 1 for s in size)
    window = Window(*size, *out, kernel, kernel, stride, stride, pad, pad)
    wanted, wanted_winner = pool_reference(x, window)
    shape = (n, *out, channels)
    y, winner = device.poisoned(shape, dtype), device.poisoned(shape, "uint8")
    vectors, pitch = n * out[0] * out[1] * channels // 8, ctypes.c_int(channels // 8)
    device.run("pooling.cu", f"max_pool<{C_TYPES[dtype]}>", (-(-vectors // 256), 1, 1), (256, 1, 1),
               device.put(x, dtype), y, winner, window, ctypes.c_uint32(vectors), pitch)
    assert np.array_equal(device.get(y, shape, dtype), wanted)
    assert np.array_equal(device.get(winner, shape, "uint8"), wanted_winner)

    dy, dy2 = (rounded(random.normal(0, 1, shape), dtype) for _ in range(2))
    dx = device.poisoned(x.shape, dtype)
    vectors = x.size // 8
    device.run("pooling.cu", f"max_pool_backward<{C_TYPES[dtype]}, {str(two).lower()}>", (-(-vectors // 256), 1, 1),
               (256, 1, 1), device.put(dy, dtype), device.put(dy2, dtype), winner, dx, window, ctypes.c_uint32(vectors),
               pitch)
    wanted_dx = np.zeros(x.shape)
    total = dy + dy2 if two else dy
    for image, row, column, channel in np.ndindex(shape):
        place = int(wanted_winner[image, row, column, channel])
        h, w = row * stride - pad + place // kernel, column * stride - pad + place % kernel
        wanted_dx[image, h, w, channel] += total[image, row, column, channel]
    assert relative_error(device.get(dx, x.shape, dtype), wanted_dx) < PRECISION[dtype]


@pytest.mark.parametrize("size", [(8, 8), (7, 5)])
@pytest.mark.parametrize("kernel, stride, pad, convention", [(2, 2, 0, "full"), (3, 2, 1, "valid"), (3, 1, 1, "full")])
@pytest.mark.parametrize("padding", [False, True])
def test_average_pool(device: Device, dtype: str, size: tuple[int, int], kernel: int, stride: int, pad: int,
                      convention: str, padding: bool) -> None:
    """Windows may end beyond the image; pixels there do not count."""
    node = Node("Pooling", "pool", (), {"kernel": (kernel,) * 2, "stride": (stride,) * 2, "pad": (pad,) * 2,
                                        "pool_type": "avg", "layout": "NHWC", "pooling_convention": convention,
                                        "count_include_pad": padding})
    random = np.random.default_rng(size[0] + kernel)
    x = rounded(random.normal(0, 1, (3, *size, 24)), dtype)
    wanted = pooling.avg_pooling(node, x)
    dy = rounded(random.normal(0, 1, wanted.shape), dtype)
    window = Window(*size, *wanted.shape[1:3], kernel, kernel, stride, stride, pad, pad)
    flag = f"<{C_TYPES[dtype]}, {str(padding).lower()}>"
    for name, source, shape, result in (
            ("average_pool", x, wanted.shape, wanted),
            ("average_pool_backward", dy, x.shape, pooling.avg_pooling_backward(node, dy, x.shape))):
        target, vectors = device.poisoned(shape, dtype), int(np.prod(shape)) // 8
        device.run("pooling.cu", name + flag, (-(-vectors // 256), 1, 1), (256, 1, 1), device.put(source, dtype),
                   target, window, ctypes.c_uint32(vectors), ctypes.c_int(3))
        assert relative_error(device.get(target, shape, dtype), result) < PRECISION[dtype] + 1e-6


@pytest.mark.parametrize("pixels", [1, 3, 20, 49])
def test_global_average_pool(device: Device, dtype: str, pixels: int) -> None:
    n, channels = 5, 40
    random = np.random.default_rng(0)
    x = rounded(random.normal(0, 1, (n, pixels, channels)), dtype)
    dy = rounded(random.normal(0, 1, (n, channels)), dtype)
    y, dx = device.poisoned((n, channels), dtype), device.poisoned(x.shape, dtype)
    size, c_type = (ctypes.c_int(pixels), ctypes.c_int(channels // 8)), C_TYPES[dtype]
    device.run("pooling.cu", f"global_average_pool<{c_type}>", (1, 1, 1), (256, 1, 1), device.put(x, dtype), y,
               ctypes.c_uint32(n * channels // 8), *size)
    assert relative_error(device.get(y, (n, channels), dtype), x.mean(1)) < PRECISION[dtype]
    device.run("pooling.cu", f"global_average_pool_backward<{c_type}>", (5, 1, 1), (256, 1, 1), device.put(dy, dtype),
               dx, ctypes.c_uint32(x.size // 8), *size)
    wanted = np.broadcast_to(dy[:, None] / pixels, x.shape)
    assert relative_error(device.get(dx, x.shape, dtype), wanted) < PRECISION[dtype]
