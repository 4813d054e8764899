"""The stem in training on Hopper, with the sums of its output, against float64 NumPy: odd heights, widths that do not
fill a row of the kernel, strips of every kind, poisoned outputs."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded

from graph_passes import Node
from graph_passes.executors.cuda.kernel_library import instance
from graph_passes.executors.cuda.kernels.batch_norm_relu_max_pool import Image
from graph_passes.executors.cuda.kernels.stem_rows import StemRows
from graph_passes.executors.reference import evaluate

NODE = Node("StemForward", "stem", (), {"kernel": (7, 7), "stride": (2, 2), "pad": (3, 3), "num_filter": 64,
                                            "layout": "NHWC", "no_bias": True})
SHAPES = [(1, 224, 224), (2, 37, 64), (5, 64, 50), (2, 9, 8), (1, 1, 2), (3, 30, 222), (7, 14, 16)]


@pytest.mark.gpu
@pytest.mark.parametrize("images, height, width", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stem_forward(device: Device, dtype: str, images: int, height: int, width: int) -> None:
    random = np.random.default_rng(height + width)
    x = rounded(random.normal(0, 1, (images, height, width, 4)), dtype)
    x[..., 3] = 1
    w = rounded(random.normal(0, 12**-1.0, (64, 7, 7, 4)), dtype)
    w[:, 3, 3, 3] = 10 * random.choice([-1, 1], 64)  # a mean of 10 deviations
    wanted = evaluate(NODE, [x, w])[0]
    x_address, w_address, tickets = device.put(x, dtype), device.put(w, dtype), device.zeros(4)
    y, sums = device.poisoned(wanted.shape, dtype), device.poisoned((3, 64))
    results = []
    for num_multiprocessors in (1, 3, 132, 132):
        way = StemRows(wanted.shape, num_multiprocessors)
        device.run("stem_forward.cu", instance("stem_forward", dtype), way.grid, way.BLOCK, x_address, w_address,
                   device.gpu.tensor_map(y, dtype, way.tiling), sums, device.poisoned((way.grid[0], 64, 3)), tickets,
                   Image(height, width, *wanted.shape[1:3]), ctypes.c_int(images), ctypes.c_int(way.strip),
                   shared_bytes=way.SHARED_BYTES)
        got, got_sums = device.get(y, wanted.shape, dtype), device.get(sums, (3, 64))
        results.append(got_sums)
        # Rounding of stored values, and fp32 sums of products in another order.
        assert relative_error(got, wanted) < PRECISION[dtype] + 2e-5, f"{way.grid[0]} blocks"
        assert not got_sums[0].any()
        assert relative_error(got_sums[2], got.mean((0, 1, 2))) < 1e-6
        squares = ((got - got.mean((0, 1, 2))) ** 2).sum((0, 1, 2))
        assert np.abs(got_sums[1] - squares).max() < 1e-5 * squares.max() + 1e-8
    assert np.array_equal(results[-2], results[-1]), "the order of sums is fixed"
    device.gpu.free_all()


@pytest.mark.parametrize("images", [1, 8, 32, 64, 256, 1000])
def test_strips(images: int) -> None:
    """Every row of the output is in exactly one strip, and most teams are busy to the end."""
    way = StemRows((images, 112, 112, 64), 132)
    strips = -(-112 // way.strip)
    teams = 132 * way.TEAMS
    assert way.grid[0] <= 132 and way.grid[0] * way.TEAMS >= min(images * strips, teams)
    if images >= 64:
        rounds = -(-images * strips // teams)
        assert rounds * way.strip < 1.1 * images * 112 / teams
