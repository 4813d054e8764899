"""The gradient of the stem's weights on Hopper against float64 NumPy: odd heights and widths of the gradient, rows that
are no multiple of a product's, blocks with many items and with one, poisoned outputs."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded

from graph_passes import Node
from graph_passes.executors.cuda.kernel_library import count, instance
from graph_passes.executors.cuda.kernels.batch_norm_relu_max_pool import Image
from graph_passes.executors.cuda.kernels.stem import SHARE
from graph_passes.executors.cuda.kernels.stem_weights import StemWeights
from graph_passes.executors.reference import evaluate

NODE = Node("StemWeights", "dw", (), {"kernel": (7, 7), "stride": (2, 2), "pad": (3, 3), "num_filter": 64,
                                    "layout": "NHWC", "no_bias": True, "axis": 3, "fix_gamma": False})
SHAPES = [(1, 224, 224), (3, 37, 64), (2, 64, 50), (2, 9, 8), (1, 1, 2), (3, 30, 222), (7, 14, 16), (1, 256, 256),
          (2, 23, 340)]


@pytest.mark.gpu
@pytest.mark.parametrize("images, height, width", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stem_weights(device: Device, dtype: str, images: int, height: int, width: int) -> None:
    random = np.random.default_rng(height + width)
    out = images, -(-height // 2), -(-width // 2), 64
    pooled = images, -(-out[1] // 2), -(-out[2] // 2), 64
    image, x, dz = (rounded(random.normal(0, 1, shape), dtype) for shape in ((images, height, width, 4), out, pooled))
    winner = _winners(random, out, pooled)
    gamma, dgamma, dbeta = (random.normal(0, 1, 64).astype(np.float32) for _ in range(3))
    saved = np.stack([random.normal(0, 0.1, 64), random.uniform(0.5, 2, 64)]).astype(np.float32)
    rows = x[..., 0].size
    dgamma, dbeta = dgamma * np.sqrt(rows), dbeta * np.sqrt(rows)  # the size of a sum of this many terms
    of_channels = (each.astype(np.float64) for each in (gamma, saved, dgamma, dbeta))
    (wanted,) = evaluate(NODE, [dz, winner, x, *of_channels, image])

    given = [device.put(image, dtype), device.put(dz, dtype), device.put(winner, "uint8"),
             *map(device.put, (saved, gamma, dgamma, dbeta))]
    sizes = Image(height, width, *out[1:3]), Image(*out[1:3], *pooled[1:3]), count(rows)
    x_address, dw = device.put(x, dtype), device.poisoned((64, 7, 7, 4), dtype)
    results = []
    for num_multiprocessors in (1, 5, 132, 132):
        way = StemWeights(out, num_multiprocessors)
        blocks = way.grid[0]
        shares = device.poisoned((blocks * SHARE,))
        device.run("stem_weights.cu", instance("stem_weights", dtype), way.grid, way.BLOCK,
                   device.gpu.tensor_map(x_address, dtype, way.tiling), *given, shares, *sizes, ctypes.c_int(way.items),
                   way.layout, shared_bytes=way.shared_bytes)
        device.run("stem.cu", instance("stem_wgrad_sum", dtype), (64 * 7, 1, 1), (32, 8, 1), shares, dw,
                   ctypes.c_int(blocks))
        results.append(device.get(dw, (64, 7, 7, 4), dtype))
        # The gradient is rounded once before it is multiplied, and the result once.
        assert relative_error(results[-1], wanted) < 2 * PRECISION[dtype], f"{blocks} blocks"
    assert np.array_equal(results[-2], results[-1]), "the order of sums is fixed"
    device.gpu.free_all()


def _winners(random: np.random.Generator, out: tuple[int, ...], pooled: tuple[int, ...]) -> np.ndarray:
    """One winner per window, or none."""
    places = random.integers(0, 9, pooled)
    row, column = (2 * np.arange(pooled[axis]).reshape([-1 if axis == i else 1 for i in range(4)]) - 1 + place
                   for axis, place in ((1, places // 3), (2, places % 3)))
    inside = (row >= 0) & (row < out[1]) & (column >= 0) & (column < out[2])
    return np.where(inside & (random.random(pooled) < 0.9), places, 255).astype(np.uint8)


@pytest.mark.parametrize("width, stages", [(224, 3), (256, 3), (96, 7), (340, 2), (500, 1)])
def test_stages(width: int, stages: int) -> None:
    """As many stages as fit into shared memory; with a single stage no item could be loaded ahead."""
    way = StemWeights((256, width // 2, width // 2, 64), 132)
    assert way.layout.stages == stages and way.fits == (stages > 1)
    assert way.grid == (132, 1, 1) and way.items == 256 * -(-(width // 2) // 2)
