"""The gradient of the weights of 3x3 convolutions on Hopper against float64 NumPy: rows of any width, blocks with one
row and with many, of one image and of several, poisoned outputs; and the rule that takes the kernel."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded
from step_networks import preferring

from graph_passes import Graph, Node, Ref, pipeline
from graph_passes.choice import fewest, plain
from graph_passes.executors.cuda.kernel_library import count, instance
from graph_passes.executors.cuda.kernels.conv1x1_forward import SHARED_BYTES
from graph_passes.executors.cuda.kernels.conv3x3_weights import Conv3x3Weights
from graph_passes.executors.reference import evaluate

ATTRIBUTES = {"kernel": (3, 3), "stride": (1, 1), "pad": (1, 1), "num_filter": 64, "layout": "NHWC", "no_bias": True}
SHAPES = [  # images, height, width, channels, filters
    (2, 56, 56, 64, 64), (1, 1, 1, 64, 64), (5, 1, 1, 64, 64), (3, 7, 9, 64, 64), (2, 12, 40, 64, 64),
    (9, 2, 3, 64, 64), (2, 4, 15, 64, 64), (2, 4, 16, 64, 64), (1, 6, 17, 64, 64), (4, 33, 31, 64, 64),
    (999, 3, 5, 64, 64), (1, 9, 112, 64, 64), (1, 5, 128, 64, 64), (3, 28, 28, 128, 128), (5, 14, 14, 256, 256),
    (2, 7, 7, 64, 192), (4, 6, 5, 192, 64), (3, 7, 7, 512, 512)]


def evaluated(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    node = Node("Conv3x3Weights", "dw", (), {**ATTRIBUTES, "num_filter": dy.shape[3]})
    wanted: np.ndarray = evaluate(node, [dy, x])[0]
    return wanted


def run(device: Device, dtype: str, x: np.ndarray, dy: np.ndarray, blocks: int) -> np.ndarray:
    """Run with this many parts of the sums, if there are enough rows."""
    channels, filters = x.shape[3], dy.shape[3]
    way, shape = Conv3x3Weights(x.shape, filters, 132), (filters, 3, 3, channels)
    assert way.fits
    blocks = min(blocks, way.padded_rows)
    parts, dw = device.poisoned((blocks, *shape)), device.poisoned(shape, dtype)
    maps = [device.gpu.tensor_map(device.put(each, dtype), dtype, way.tiling(each.shape[3])) for each in (x, dy)]
    device.run("conv3x3_weights.cu", instance("conv3x3_weights", dtype), (blocks, way.grid[1], 1), way.BLOCK,
               *maps, parts, *map(ctypes.c_int, (x.shape[1], channels, way.padded_rows)), way.ring,
               shared_bytes=way.shared_bytes)
    vectors = int(np.prod(shape)) // 8
    device.run("norm_backward.cu", instance("sum_parts", dtype), (vectors // 16, 1, 1), (256, 1, 1), parts, dw,
               ctypes.c_int(blocks), count(vectors))
    return device.get(dw, shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("images, height, width, channels, filters", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conv3x3_weights(device: Device, dtype: str, images: int, height: int, width: int, channels: int,
                         filters: int) -> None:
    random = np.random.default_rng(height + width)
    x, dy = (rounded(random.normal(0, 1, (images, height, width, each)), dtype) for each in (channels, filters))
    wanted = evaluated(x, dy)
    results = [run(device, dtype, x, dy, blocks) for blocks in (1, 5, 44, 44)]
    for result in results:
        assert relative_error(result, wanted) < PRECISION[dtype]
        # Checked for every filter and tap, so that an error in a small part is noticed.
        errors = np.abs(result - wanted).max(axis=3) / (np.abs(wanted).max(axis=3) + 1e-6 * np.abs(wanted).max())
        assert errors.max() < 2 * PRECISION[dtype]
    assert np.array_equal(results[-2], results[-1]), "the order of sums is fixed"
    device.gpu.free_all()


@pytest.mark.gpu
def test_what_is_no_number_stays_in_its_filter(device: Device) -> None:
    """A NaN in the gradient reaches one filter only. None stays in shared memory, where the next launch would find
    it."""
    random = np.random.default_rng(0)
    x, dy = (rounded(random.normal(0, 1, (40, 14, 14, 64)), "float16") for _ in range(2))
    clean = run(device, "float16", x, dy, 132)
    spoiled = dy.copy()
    spoiled[7, 13, 13, 5] = np.nan
    result = run(device, "float16", x, spoiled, 132)
    assert np.isnan(result[5]).all()
    others = np.arange(64) != 5
    assert np.array_equal(result[others], clean[others])
    run(device, "float16", np.full_like(x, np.nan), np.full_like(dy, np.nan), 132)
    assert np.array_equal(run(device, "float16", x, dy, 132), clean)
    device.gpu.free_all()


@pytest.mark.parametrize("width, rows", [(56, 14), (112, 7), (128, 6), (1, 32), (32, 26)])
def test_rows_in_shared_memory(width: int, rows: int) -> None:
    way = Conv3x3Weights((256, width, width, 64), 64, 132)
    assert way.fits and way.ring.rows == rows and way.shared_bytes <= SHARED_BYTES
    assert way.padded_rows == 256 * (width + 1) - 1
    assert way.ring.repeated * way.ring.pitch > way.STEP


def test_too_wide_for_shared_memory() -> None:
    assert not Conv3x3Weights((1, 160, 160, 64), 64, 132).fits


@pytest.mark.parametrize("channels, filters, blocks", [(64, 64, (132, 1)), (128, 128, (33, 4)), (256, 256, (8, 16)),
                                                       (64, 192, (44, 3)), (1024, 1024, (1, 256))])
def test_blocks(channels: int, filters: int, blocks: tuple[int, int]) -> None:
    """Each 64 channels and 64 filters get their share of the multiprocessors as blocks, or fewer if there is little
    work."""
    assert Conv3x3Weights((512, 14, 14, channels), filters, 132).grid == (*blocks, 1)
    assert Conv3x3Weights((2, 14, 14, channels), filters, 132).grid == (1, blocks[1], 1)


@pytest.mark.parametrize("changed, channels, taken", [
    ({}, 64, True), ({"num_filter": 192}, 128, True), ({}, 32, False), ({"num_filter": 96}, 64, False),
    ({"stride": (2, 2)}, 64, False),
    ({"pad": (0, 0)}, 64, False), ({"kernel": (5, 5)}, 64, False), ({"num_group": 2}, 64, False),
    ({"dilate": (2, 2)}, 64, False), ({"dtype": "float32"}, 64, False)])
def test_pass(changed: dict[str, object], channels: int, taken: bool) -> None:
    """The rule takes the kernel only for plain 3x3 convolutions in 16 bits with multiples of 64 channels and filters.
    The result is the same."""
    wgrad = Node("ConvolutionWgrad", "dw", (Ref("dy"), Ref("x")), {**ATTRIBUTES, "dtype": "float16", **changed})
    graph = Graph([Node("null", "dy"), Node("null", "x"), wgrad], [Ref("dw")])
    shapes = {"x": (2, 12, 12, channels)}
    sizes = graph.infer_shapes(shapes)
    own = pipeline.cover(graph, preferring(fewest, "Conv3x3Weights"), sizes)
    assert own.operators() == {"Conv3x3Weights" if taken else "ConvolutionWgrad": 1}
    assert pipeline.cover(graph, plain, sizes) == graph
    if taken:
        random = np.random.default_rng(0)
        dy, x = (random.normal(0, 1, (2, 12, 12, each)) for each in (wgrad["num_filter"], channels))
        assert np.array_equal(evaluate(own["dw"], [dy, x])[0], evaluate(wgrad, [dy, x])[0])
