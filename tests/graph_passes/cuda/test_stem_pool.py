"""The stem in inference, with bias, ReLU and max pooling, against float64 NumPy: odd heights, widths that do not fill a
row of the kernel, strips of every kind, poisoned outputs."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded

from graph_passes import Node
from graph_passes.executors.cuda.kernel_library import instance
from graph_passes.executors.cuda.kernels.stem_pool import PooledImage, StemPool
from graph_passes.executors.reference import evaluate

NODE = Node("StemPool", "stem", (), {"kernel": (7, 7), "stride": (2, 2), "pad": (3, 3), "num_filter": 64,
                                     "layout": "NHWC"})
SHAPES = [(1, 224, 224), (2, 37, 64), (5, 64, 50), (2, 9, 8), (1, 1, 2), (3, 30, 222), (7, 14, 16)]


@pytest.mark.gpu
@pytest.mark.parametrize("num_multiprocessors", [1, 3, 132])  # divides the images differently into strips
@pytest.mark.parametrize("images, height, width", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stem_pool(device: Device, dtype: str, images: int, height: int, width: int, num_multiprocessors: int) -> None:
    random = np.random.default_rng(height + width)
    x = rounded(random.normal(0, 1, (images, height, width, 4)), dtype)
    w = rounded(random.normal(0, 14**-1.0, (64, 7, 7, 4)), dtype)
    bias = random.normal(0, 1, 64).astype(np.float32)
    (wanted,) = evaluate(NODE, [x, w, bias.astype(np.float64)])
    y = device.poisoned(wanted.shape, dtype)
    way = StemPool(wanted.shape, num_multiprocessors)
    for _ in range(2):
        device.run("stem_pool.cu", instance("stem_pool", dtype), way.grid, way.BLOCK, device.put(x, dtype),
                   device.put(w, dtype), device.put(bias),
                   device.gpu.tensor_map(y, dtype, way.tiling),
                   PooledImage.of(x.shape, wanted.shape), ctypes.c_int(images), ctypes.c_int(way.strip),
                   shared_bytes=way.SHARED_BYTES)
    got = device.get(y, wanted.shape, dtype)
    # Rounding of stored values, and fp32 sums of products in another order.
    assert relative_error(got, wanted) < PRECISION[dtype] + 2e-5
    assert np.abs(got - wanted).max() < 2 * PRECISION[dtype] * np.abs(wanted).max()


@pytest.mark.parametrize("images", [1, 8, 32, 256, 1000])
def test_strips(images: int) -> None:
    """Every row of the output is in exactly one strip, and most teams are busy to the end."""
    way = StemPool((images, 56, 56, 64), 132)
    strips = -(-56 // way.strip)
    teams = 132 * way.TEAMS
    assert way.grid[0] <= 132 and way.grid[0] * way.TEAMS >= min(images * strips, teams)
    if images >= 256:
        rounds = -(-images * strips // teams)
        assert rounds * (2 * way.strip + 1) < 1.1 * images * 112 / teams
