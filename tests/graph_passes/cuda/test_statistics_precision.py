"""BatchNorm's statistics with a mean far above the deviation: the arithmetic of our kernels in NumPy, in fp32 and their
order; and on a GPU every path that computes statistics, with a table of the errors (pytest -s).

The reference is float64 on the values stored by the GPU: in float16, with a mean of 1,000 deviations, these have only a
digit or two left.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded
from test_batch_norm import NOTHING_DROPPED

from common.disk_cache import Cache
from graph_passes import GraphError
from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.builder import APPLY_BLOCK, REDUCE_BLOCK
from graph_passes.executors.cuda.convolution import ConvolutionLibrary, Problem
from graph_passes.executors.cuda.kernel_library import C_TYPES, threads
from graph_passes.executors.cuda.kernels.batch_norm_relu_max_pool import STRIP, Image
from graph_passes.executors.cuda.kernels.stem import STEM_BLOCK, stem_work

RATIOS = [1, 100, 1000]  # mean over deviation
# Bound for the relative error of a variance from sums about a value near the mean: fp32 sums of some hundred thousand
# terms.
NEAR = 1e-5
EPS, MOMENTUM = 1e-5, 0.9


def plain_bound(ratio: float) -> float:
    """Bound for a variance from the sums of x and x * x in fp32: they may be off by 2^-17 of the mean square, 128 times
    the cost of rounding one number. cuDNN 9.19 on an H200: up to 2^-17.9."""
    return 2.0**-17 * (1 + ratio**2)


def of_unrounded(ratio: float, rows: int, dtype: str) -> float:
    """How far the variance of unrounded values may be from the variance of the stored ones: rounding moves a value by
    up to half of PRECISION, at random; five deviations of the mean of `rows` such products."""
    deviation = PRECISION[dtype] / np.sqrt(12) * np.sqrt(1 + ratio**2)
    return 5 * 2 * deviation / np.sqrt(rows)


def variance(sums: np.ndarray, rows: int) -> np.ndarray:
    """The variance as computed by `Forward` of batch_norm.cuh, in fp32."""
    from_near = sums[0] / np.float32(rows)
    return np.maximum(sums[1] / np.float32(rows) - from_near * from_near, np.float32(0))


# --- the arithmetic, in NumPy ---


def sums_in_order(x: np.ndarray, near: np.ndarray, blocks: int) -> np.ndarray:
    """Sums in fp32, in the order of `batch_norm_statistics` and `reduce_over_rows`. Each thread sums every (96 *
    blocks)-th row. Sums are then added over the 4 rows of a warp, over the 24 warps, over the blocks in each of 24
    parts, and over the parts."""
    rows_at_once = REDUCE_BLOCK[1] * blocks
    padded = np.zeros((-(-len(x) // rows_at_once) * rows_at_once, x.shape[1]), np.float32)
    padded[: len(x)] = x - near
    sums = []
    for values in (padded, padded * padded):
        of_thread = np.zeros((rows_at_once, x.shape[1]), np.float32)
        for step in values.reshape(-1, *of_thread.shape):
            of_thread += step
        lanes = of_thread.reshape(blocks, -1, 4, x.shape[1])
        of_warp = (lanes[:, :, 0] + lanes[:, :, 1]) + (lanes[:, :, 2] + lanes[:, :, 3])
        of_block = in_turn(of_warp.transpose(1, 0, 2))
        sums.append(in_turn([in_turn(of_block[part::24]) for part in range(24)]))
    return np.stack(sums)


def in_turn(terms: np.ndarray | list[np.ndarray]) -> np.ndarray:
    """Their sum, added one after the other."""
    total = np.zeros_like(terms[0])
    for term in terms:
        total += term
    return total


def far_from_zero(ratio: float, shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Values with a deviation of 1 and a mean of +-`ratio`, rounded to the dtype."""
    random = np.random.default_rng(seed)
    sign = random.choice([-1.0, 1.0], shape[-1])
    return rounded(random.normal(sign * ratio, 1.0, shape), dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_sums_about_the_first_value(dtype: str, ratio: int) -> None:
    x = far_from_zero(ratio, (200_000, 8), dtype, seed=ratio)
    single = x.astype(np.float32)
    about = variance(sums_in_order(single, single[0], blocks=132), len(x))
    assert np.max(np.abs(about / x.var(0) - 1)) < NEAR
    plain = variance(sums_in_order(single, np.zeros_like(single[0]), blocks=132), len(x))
    error = np.max(np.abs(plain / x.var(0) - 1))
    assert error < plain_bound(ratio)
    if ratio == 1000:
        assert error > 100 * NEAR, "what the sums of x and x * x are not good for"


def about(near: np.ndarray, count: int, total: np.ndarray, squares: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """`Moments::about` of stem.cu, in fp32."""
    from_near = total / np.float32(max(count, 1))
    return count, near + from_near, squares - total * from_near


def together(parts: list[tuple[int, np.ndarray, np.ndarray]]) -> tuple[int, np.ndarray, np.ndarray]:
    """`together` of stem.cu, in fp32."""
    near = parts[0][1]
    count, total, squares = 0, np.zeros_like(near), np.zeros_like(near)
    for number, mean, of_part in parts:
        count += number
        total = total + np.float32(number) * (mean - near)
        squares = squares + (of_part + np.float32(number) * (mean - near) * (mean - near))
    return about(near, count, total, squares)


@pytest.mark.parametrize("ratio", RATIOS)
def test_moments_of_warps_and_blocks_together(ratio: int) -> None:
    """Each of 132 blocks has four warps, the last of which have fewer pixels or none; each warp sums about its first
    value."""
    x = far_from_zero(ratio, (132, 4, 500, 8), "float16", seed=ratio)
    counts = [[500, 500, 500, 0 if block == 7 else 311] for block in range(132)]
    blocks = []
    for of_block, block_counts in zip(x.astype(np.float32), counts, strict=True):
        warps = []
        for values, number in zip(of_block, block_counts, strict=True):
            near = values[0] if number else np.zeros_like(values[0])
            from_near = values[:number] - near
            warps.append(about(near, number, in_turn(from_near) if number else near,
                               in_turn(from_near * from_near) if number else near))
        blocks.append(together(warps))
    count, mean, squares = together([together(blocks[part::4]) for part in range(4)])
    every = np.concatenate([values[:number] for of_block, block_counts in zip(x, counts, strict=True)
                            for values, number in zip(of_block, block_counts, strict=True)])
    assert count == len(every)
    assert np.max(np.abs(squares / count / every.var(0) - 1)) < NEAR
    assert np.max(np.abs(mean - every.mean(0))) < 2.0**-23 * (1 + ratio)


# --- on a GPU ---


Report = Callable[[str, str, float, np.ndarray, np.ndarray, float], None]


@pytest.fixture(scope="module")
def errors() -> Iterator[list[str]]:
    lines = [f"{'path':<34}{'dtype':<10}{'mean / deviation':>17}{'variance off by':>17}{'bound':>10}"]
    yield lines
    print("\n" + "\n".join(lines))


@pytest.fixture
def check(errors: list[str]) -> Report:
    def check_one(path: str, dtype: str, ratio: float, var: np.ndarray, wanted: np.ndarray, bound: float) -> None:
        error = float(np.max(np.abs(var / wanted - 1)))
        errors.append(f"{path:<34}{dtype:<10}{ratio:>17,}{error:>17.1e}{bound:>10.1e}")
        assert error < bound, errors[-1]

    return check_one


def variance_from(saved: np.ndarray) -> np.ndarray:
    """The variance from `saved` (2, C), whose second row is 1 / sqrt(var + eps)."""
    return saved[1] ** -2.0 - EPS


def statistics_of_kernel(device: Device, x: np.ndarray, dtype: str) -> tuple[int, int]:
    """Addresses of x (rows, C), and of its sums from `batch_norm_statistics`."""
    rows, channels = x.shape
    tiles, blocks = -(-channels // 64), 132
    address, sums = device.put(x, dtype), device.poisoned((3, channels))
    device.run("batch_norm.cu", f"batch_norm_statistics<{C_TYPES[dtype]}>", (tiles, blocks, 1), REDUCE_BLOCK, address,
               sums, device.poisoned((2 * blocks * channels,)), device.zeros(4 * tiles), ctypes.c_uint32(rows),
               ctypes.c_int(channels))
    return address, sums


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_statistics_and_what_reads_them(device: Device, check: Report, dtype: str, ratio: int) -> None:
    """batch_norm_statistics; then BatchNorm alone, in a pair, and with max pooling."""
    images, height, width, channels = 5, 202, 198, 64
    rows = images * height * width
    x = far_from_zero(ratio, (rows, channels), dtype, seed=ratio)
    normal = (x - x.mean(0)) / np.sqrt(x.var(0) + EPS)
    address, sums = statistics_of_kernel(device, x, dtype)
    gamma, beta = device.put(np.ones(channels)), device.put(np.zeros(channels))
    options = ctypes.c_float(EPS), ctypes.c_float(MOMENTUM)
    # An output is x * scale + shift; both are rounded, and `ratio` times as large as the output.
    exact = PRECISION[dtype] + 4 * 2.0**-24 * ratio + NEAR

    def outputs(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """y, the saved tensor, and the running statistics, which begin as 0."""
        return (device.poisoned(shape, dtype), device.poisoned((2, channels)), device.zeros(4 * channels),
                device.zeros(4 * channels))

    y, saved, mean, var = outputs(x.shape)
    device.run("batch_norm.cu", f"batch_norm_apply<{C_TYPES[dtype]}, false, false, false>", (1, 132, 1), APPLY_BLOCK,
               address, 0, sums, ctypes.c_bool(True), gamma, beta, y, 0, saved, mean, var, *options,
               ctypes.c_uint32(rows), ctypes.c_int(channels), *NOTHING_DROPPED)
    check("batch_norm_statistics", dtype, ratio, variance_from(device.get(saved, (2, channels))), x.var(0), NEAR)
    check("  running variance", dtype, ratio, device.get(var, (channels,)) / (1 - MOMENTUM), x.var(0), NEAR)
    assert relative_error(device.get(y, x.shape, dtype), normal) < exact

    y, saved, mean, var = outputs(x.shape)
    _, saved_2, mean_2, var_2 = outputs((1,))
    mask = device.poisoned((rows, channels // 8), "uint8")
    device.run("batch_norm_pair.cu", f"batch_norm_pair_apply<{C_TYPES[dtype]}, false>", (1, 132, 1), APPLY_BLOCK,
               address, address, sums, sums, ctypes.c_bool(True), ctypes.c_bool(True), gamma, gamma, beta, beta, y,
               mask, saved, saved_2, mean, mean_2, var, var_2, *options, ctypes.c_uint32(rows), ctypes.c_int(channels),
               *NOTHING_DROPPED)
    for kept in (saved, saved_2):
        check("  of a pair", dtype, ratio, variance_from(device.get(kept, (2, channels))), x.var(0), NEAR)
    assert relative_error(device.get(y, x.shape, dtype), np.maximum(2 * normal, 0)) < 2 * exact

    out = (images, (height + 1) // 2, (width + 1) // 2, channels)
    y, saved, mean, var = outputs(out)
    device.run("batch_norm_relu_max_pool.cu", f"batch_norm_relu_max_pool<{C_TYPES[dtype]}>", (1, 132, 1),
               APPLY_BLOCK, address, sums, ctypes.c_bool(True), gamma, beta, y, device.poisoned(out, "uint8"),
               device.poisoned(out, dtype), saved, mean, var, *options, Image(height, width, *out[1:3]),
               ctypes.c_uint32(rows),
               ctypes.c_uint32(images * -(-out[1] // STRIP) * out[2]), ctypes.c_int(channels))
    check("  with max pooling", dtype, ratio, variance_from(device.get(saved, (2, channels))), x.var(0), NEAR)


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", RATIOS)
def test_running_statistics_of_inference(device: Device, check: Report, ratio: int) -> None:
    channels, rows = 64, 3_000_000
    random = np.random.default_rng(ratio)
    mean, var = (np.float32(value).astype(np.float64)
                 for value in (ratio * random.choice([-1.0, 1.0], channels), random.uniform(0.5, 2, channels)))
    sums = device.poisoned((3, channels))
    device.run("batch_norm.cu", "sums_from_running", *threads(channels), device.put(mean), device.put(var), sums,
               ctypes.c_uint32(rows), ctypes.c_int(channels))
    got = device.get(sums, (3, channels)).astype(np.float32)
    check("sums_from_running", "float32", ratio, variance(got, rows), var, 1e-6)
    assert np.array_equal(got[2], mean) and not got[0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", RATIOS)
def test_statistics_of_the_stem(device: Device, check: Report, ratio: int) -> None:
    """The images' fourth channel is 1, and its weight at the centre, which is never in the padding, is the mean."""
    n, height, width, filters = 16, 224, 224, 64
    image = height // 2, width // 2
    random = np.random.default_rng(ratio)
    data = rounded(random.normal(0, 1, (n, height, width, 4)), "float16")
    data[..., 3] = 1
    w = rounded(random.normal(0, 1 / np.sqrt(147), (filters, 7, 7, 4)), "float16")
    w[..., 3] = 0
    w[:, 3, 3, 3] = ratio * random.choice([-1, 1], filters)
    items, tiles, image_bytes, _ = stem_work((n, *image, filters))
    y, sums = device.poisoned((n, *image, filters), "float16"), device.poisoned((3, filters))
    device.run("stem.cu", "stem_fprop<half>", (132, 1, 1), STEM_BLOCK, device.put(data, "float16"),
               device.put(w, "float16"), y, sums, device.poisoned((132 * 3 * filters,)), device.zeros(4),
               Image(height, width, *image), ctypes.c_uint32(items), ctypes.c_int(tiles), shared_bytes=2 * image_bytes)
    stored = device.get(y, (n, *image, filters), "float16").reshape(-1, filters)
    got = device.get(sums, (3, filters)).astype(np.float32)
    check("stem_fprop", "float16", ratio, variance(got, len(stored)), stored.var(0), NEAR)
    assert np.max(np.abs(got[2] - stored.mean(0))) < 2.0**-22 * (1 + ratio)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_statistics_of_cudnn(device: Device, check: Report, tmp_path: Path, dtype: str, ratio: int) -> None:
    """cuDNN sums y and y * y, so the variance loses ratio^2 of fp32's digits, as docs/cuda_executor.md says.

    The first channel of the data is 1, and its weight at the centre is the mean.
    """
    library = ConvolutionLibrary(device.gpu, Cache("tests", tmp_path), Arena(device.gpu), tf32=False)
    random = np.random.default_rng(ratio)
    for size, x_shape in itertools.product((1, 3), [(32, 56, 56, 64), (32, 14, 14, 256)]):
        channels, filters = x_shape[3], 64
        y_shape = (*x_shape[:3], filters)
        problem = Problem("fprop_stats", x_shape, (filters, size, size, channels), y_shape, (size // 2,) * 2, (1, 1),
                          (1, 1), dtype)
        try:
            plan = library.plan(problem)
        except GraphError:  # the sums are then those of our own kernel
            continue
        data = rounded(random.normal(0, 1, x_shape), dtype)
        data[..., 0] = 1
        w = rounded(random.normal(0, (size * size * channels) ** -0.5, problem.w), dtype)
        w[..., 0] = 0
        w[:, size // 2, size // 2, 0] = ratio * random.choice([-1, 1], filters)
        y, sums = device.poisoned(y_shape, dtype), device.poisoned((2, filters))
        plan.enqueue(device.put(data, dtype), device.put(w, dtype), y, sums, sums + 4 * filters,
                     workspace=device.zeros(max(1, plan.workspace_bytes)))
        stored = device.get(y, y_shape, dtype).reshape(-1, filters)
        var = variance(device.get(sums, (2, filters)).astype(np.float32), len(stored))
        check(f"fprop_stats, {size}x{size} of {channels}", dtype, ratio, var, stored.var(0),
              plain_bound(ratio) + of_unrounded(ratio, len(stored), dtype))
