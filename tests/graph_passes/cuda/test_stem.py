"""The stem's convolution and its weight gradient against float64 NumPy: odd sizes, poisoned outputs."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded
from test_batch_norm import EPS

from graph_passes.executors.cuda.kernel_library import C_TYPES
from graph_passes.executors.cuda.kernels.batch_norm_relu_max_pool import Image
from graph_passes.executors.cuda.kernels.stem import STEM_BLOCK, stem_work
from graph_passes.operators.batch_norm_halves import statistics_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stem_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("height, width", [(14, 38), (33, 64)])
def test_stem(device: Device, stem_dtype: str, height: int, width: int) -> None:
    """The first convolution, its sums, and the gradient of its weights through BatchNorm, ReLU and pooling."""
    n, filters, random = 3, 64, np.random.default_rng(height)
    image = (height + 1) // 2, (width + 1) // 2
    pooled = (image[0] + 1) // 2, (image[1] + 1) // 2
    sizes, pool = Image(height, width, *image), Image(*image, *pooled)
    items, tiles, image_bytes, gradient_bytes = stem_work((n, *image, filters))
    blocks, rows = 3, n * image[0] * image[1]
    data = rounded(random.normal(0, 1, (n, height, width, 4)), stem_dtype)
    w = rounded(random.normal(0, 0.1, (filters, 7, 7, 4)), stem_dtype)
    padded = np.pad(data, ((0, 0), (3, 3), (3, 3), (0, 0)))
    # (N, rows, columns, 7, 7, 4): the inputs of each output pixel
    windows = np.lib.stride_tricks.sliding_window_view(padded, (7, 7), (1, 2))[:, ::2, ::2].transpose(0, 1, 2, 4, 5, 3)
    wanted = np.einsum("nyxrsc,frsc->nyxf", windows, w, optimize=True)
    y, sums, tickets = device.poisoned(wanted.shape, stem_dtype), device.poisoned((3, filters)), device.zeros(4)
    partials = device.poisoned((blocks, filters, 7, 32))
    counts = ctypes.c_uint32(items), ctypes.c_int(tiles)
    data_address = device.put(data, stem_dtype)
    for _ in range(2):  # twice: the tickets must be back at zero
        device.run("stem.cu", f"stem_fprop<{C_TYPES[stem_dtype]}>", (blocks, 1, 1), STEM_BLOCK, data_address,
                   device.put(w, stem_dtype), y, sums, partials, tickets, sizes, *counts, shared_bytes=2 * image_bytes)
    got = device.get(y, wanted.shape, stem_dtype)
    assert relative_error(got, wanted) < PRECISION[stem_dtype]
    mean, var = statistics_of(device.get(sums, (3, filters)), got)
    assert relative_error(mean, got.mean((0, 1, 2))) < 1e-5 and relative_error(var, got.var((0, 1, 2))) < 1e-5

    saved = np.stack([got.mean((0, 1, 2)), 1 / np.sqrt(got.var((0, 1, 2)) + EPS)])
    gamma, dgamma, dbeta = (random.normal(0, 1, filters).astype(np.float32) for _ in range(3))
    dz = rounded(random.normal(0, 1, (n, *pooled, filters)), stem_dtype)
    winner = random.integers(0, 9, dz.shape).astype(np.uint8)
    winner[random.random(dz.shape) < 0.1] = 255  # no winner: ReLU lets nothing through
    dy = np.zeros((n, image[0] + 2, image[1] + 2, filters))  # including the padding, which no winner is in
    for at in np.ndindex(*dz.shape):
        place = int(winner[at])
        row, column = 2 * at[1] + place // 3, 2 * at[2] + place % 3
        if place < 9 and 0 < row <= image[0] and 0 < column <= image[1]:
            dy[at[0], row, column, at[3]] += dz[at]
    normal = (got - saved[0]) * saved[1]
    dy = gamma * saved[1] * (dy[:, 1:-1, 1:-1] - dbeta / rows - normal * dgamma / rows)
    dw = device.poisoned(w.shape, stem_dtype)
    device.run("stem.cu", f"stem_wgrad<{C_TYPES[stem_dtype]}>", (blocks, 1, 1), STEM_BLOCK, data_address, y,
               device.put(dz, stem_dtype), device.put(winner, "uint8"), device.put(saved), device.put(gamma),
               device.put(dgamma), device.put(dbeta), partials, sizes, pool, ctypes.c_uint32(rows), *counts,
               shared_bytes=image_bytes + gradient_bytes)
    device.run("stem.cu", f"stem_wgrad_sum<{C_TYPES[stem_dtype]}>", (filters * 7, 1, 1), (32, 8, 1), partials, dw,
               ctypes.c_int(blocks))
    wanted = np.einsum("nyxrsc,nyxf->frsc", windows, dy, optimize=True)
    # dy is rounded once before it is multiplied, and the result once.
    assert relative_error(device.get(dw, w.shape, stem_dtype), wanted) < 2 * PRECISION[stem_dtype]
