"""Convolutions of few images with what follows them, against float64 NumPy: random values, odd sizes, channels and
filters that fill neither the last chunk nor the last tile, all divisions among a cluster's blocks, poisoned outputs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded

from graph_passes.executors.cuda.kernels import instance
from graph_passes.executors.cuda.lowering.conv_small import BLOCK, SPLITS, ConvSmall, Sizes
from graph_passes.executors.reference import evaluate
from graph_passes.graph import Node
from graph_passes.operators import Shape, Window, infer_node_shapes, window
from graph_passes.passes.conv_small import TILES

# Norm of the error over the norm: rounding of what is stored, and fp32 sums of products in another order.
STORED = {dtype: PRECISION[dtype] + 2e-5 for dtype in ("float16", "bfloat16")}
MULTIPROCESSORS, SHARED_BYTES = 132, 227 << 10  # of an H200; bytes that a block may have

# (N, H, W, C), filters, kernel, stride, pad, dilation.
SHAPES: dict[str, tuple[Shape, int, Shape, Shape, Shape, Shape]] = {
    # ResNet-50's, of its four stages
    "3x3 of 7x7": ((1, 7, 7, 512), 512, (3, 3), (1, 1), (1, 1), (1, 1)),
    "1x1 of 7x7": ((1, 7, 7, 512), 2048, (1, 1), (1, 1), (0, 0), (1, 1)),
    "1x1 from 2048": ((1, 7, 7, 2048), 512, (1, 1), (1, 1), (0, 0), (1, 1)),
    "3x3 of 14x14": ((1, 14, 14, 256), 256, (3, 3), (1, 1), (1, 1), (1, 1)),
    "3x3 to 14x14": ((1, 28, 28, 256), 256, (3, 3), (2, 2), (1, 1), (1, 1)),
    "1x1 to 7x7": ((1, 14, 14, 1024), 2048, (1, 1), (2, 2), (0, 0), (1, 1)),
    "3x3 of 28x28": ((1, 28, 28, 128), 128, (3, 3), (1, 1), (1, 1), (1, 1)),
    "3x3 of 56x56": ((1, 56, 56, 64), 64, (3, 3), (1, 1), (1, 1), (1, 1)),
    "1x1 of 56x56": ((1, 56, 56, 64), 256, (1, 1), (1, 1), (0, 0), (1, 1)),
    # others
    "a pixel": ((1, 1, 1, 8), 8, (1, 1), (1, 1), (0, 0), (1, 1)),
    "tiles across images": ((9, 7, 7, 40), 72, (3, 3), (1, 1), (1, 1), (1, 1)),
    "stride 2 of odd sizes": ((5, 13, 9, 136), 200, (3, 3), (2, 2), (1, 1), (1, 1)),
    "1x1 with stride 2": ((3, 9, 14, 72), 40, (1, 1), (2, 2), (0, 0), (1, 1)),
    "1x1 with padding": ((2, 5, 7, 64), 24, (1, 1), (1, 1), (1, 1), (1, 1)),
    "5x3": ((2, 11, 6, 24), 104, (5, 3), (1, 2), (2, 0), (1, 1)),
    "dilation": ((1, 12, 17, 96), 64, (3, 3), (1, 1), (2, 1), (2, 1)),
    "6x6": ((2, 16, 15, 8), 64, (6, 6), (2, 2), (3, 3), (1, 1)),
}


class Case:
    """Random operands of a convolution, fresh ones for each seed, and what the kernel leaves on a GPU."""

    def __init__(self, shape: str, tile: str, dtype: str, add: bool, relu: bool, seed: int | None = None) -> None:
        data, filters, kernel, stride, pad, dilate = SHAPES[shape]
        attrs = {"kernel": kernel, "stride": stride, "pad": pad, "dilate": dilate, "num_filter": filters,
                 "layout": "NHWC", "no_bias": False, "num_group": 1}
        self.node = Node("Convolution", "conv", (), attrs)
        (_, weight, _), (self.shape,) = infer_node_shapes(self.node, [data, None, None])
        random = np.random.default_rng(seed)
        self.dtype, self.relu = dtype, relu
        self.x = rounded(random.normal(0, 1, data), dtype)
        self.w = rounded(random.normal(0, math.prod(weight[1:])**-0.5, weight), dtype)
        self.bias = random.normal(0, 1, filters).astype(np.float32)
        self.addend = rounded(random.normal(0, 1, self.shape), dtype) if add else None
        self.tile = TILES[tile]
        self.way = ConvSmall(Sizes.of(data, self.shape, window(self.node), self.tile[0], relu), *self.tile)

    @property
    def splits(self) -> list[int]:
        """That there is room for."""
        return [split for split in SPLITS
                if split <= self.way.sizes.chunks and self.way.shared_bytes(split) <= SHARED_BYTES]

    def run(self, device: Device, split: int, in_place: bool = False) -> np.ndarray:
        """`in_place`: the sum takes the place of what is added."""
        addend = 0 if self.addend is None else device.put(self.addend, self.dtype)
        y = addend if in_place else device.poisoned(self.shape, self.dtype)
        across, down = self.way.tiles
        device.run("conv_small.cu", instance("conv_small", self.dtype, *self.tile, split), (split * across, down, 1),
                   BLOCK, device.put(self.x, self.dtype), device.put(self.w, self.dtype), device.put(self.bias), addend,
                   y, self.way.sizes, shared_bytes=self.way.shared_bytes(split))
        return device.get(y, self.shape, self.dtype)

    @property
    def wanted(self) -> np.ndarray:
        (y,) = evaluate(self.node, [self.x, self.w, self.bias.astype(np.float64)])
        y = y if self.addend is None else y + self.addend
        return np.maximum(y, 0) if self.relu else y


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, add, relu", [
    ("float16", True, True), ("float16", False, True), ("bfloat16", False, False), ("bfloat16", True, True)])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(device: Device, shape: str, tile: str, dtype: str, add: bool, relu: bool) -> None:
    """By every number of blocks for a tile; equal bits every time, also where a sum takes its addend's place."""
    case = Case(shape, tile, dtype, add, relu)
    wanted = case.wanted
    for split in case.splits:
        y = case.run(device, split)
        assert relative_error(y, wanted) < STORED[dtype], f"{split} blocks"
        assert np.abs(y - wanted).max() < 8 * PRECISION[dtype] * np.abs(wanted).max()
        assert np.array_equal(case.run(device, split), y)
        assert not add or np.array_equal(case.run(device, split, in_place=True), y)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["3x3 of 7x7", "tiles across images", "stride 2 of odd sizes"])
def test_nan_and_infinity_stay(device: Device, shape: str) -> None:
    """Those of x reach all outputs whose windows have them and no others; ReLU keeps them, so that a broken network is
    noticed."""
    case = Case(shape, "conv_small 64x32", "float16", add=True, relu=True)
    assert case.addend is not None
    case.x[0, 2, 3, 5] = np.nan
    case.addend[-1, -1, -1, 5] = np.inf
    wanted = case.wanted
    for split in case.splits:
        y = case.run(device, split)
        assert np.array_equal(np.isnan(y), np.isnan(wanted)) and np.array_equal(np.isinf(y), np.isinf(wanted))


def tiles_in_numpy(case: Case, split: int) -> np.ndarray:
    """The convolution from the numbers that the kernel is given, in its order: padded images behind each other, of
    which a tile reads places, and shares of the channels that are added one after the other."""
    sizes, rows = case.way.sizes, case.way.rows
    y = np.full((sizes.rows, sizes.filters), np.nan)
    x, w = case.x.reshape(-1, 8), case.w.reshape(sizes.filters, sizes.taps, -1)
    for first in range(0, sizes.rows, rows):
        row = np.arange(first, min(first + rows, sizes.rows))
        place = sizes.place(row)
        step = [i // sizes.kernel_w * sizes.step_h + i % sizes.kernel_w * sizes.step_w for i in range(sizes.taps)]
        read = np.arange(place[0], place[-1] + step[-1] + 1)
        assert len(read) <= sizes.places
        line, column = np.divmod(read, sizes.width)
        image, line = np.divmod(line, sizes.height)
        line, column = line - sizes.pad_h, column - sizes.pad_w
        inside = (line >= 0) & (line < sizes.inside_h) & (column >= 0) & (column < sizes.inside_w)
        at = np.where(inside, image * sizes.image + line * sizes.line + column * sizes.pixel, 0)
        pixels = np.where(inside[:, None], x[at[:, None] + np.arange(sizes.vectors)].reshape(len(read), -1), 0)
        total = np.zeros((len(row), sizes.filters))
        for block in range(split):
            share = slice(*(sizes.chunks * each // split * 32 for each in (block, block + 1)))
            total += sum(pixels[place - place[0] + step[tap], share] @ w[:, tap, share].T for tap in range(sizes.taps))
        y[row] = total + case.bias
    y = y.reshape(case.shape) + (0 if case.addend is None else case.addend)
    return np.maximum(y, 0) if case.relu else y


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", SHAPES)
def test_places_and_shares(shape: str, tile: str) -> None:
    """What is told to the kernel names the right pixels and weights."""
    case = Case(shape, tile, "float16", add=True, relu=True, seed=0)
    assert np.allclose(tiles_in_numpy(case, case.splits[-1]), case.wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if "x3 of" in shape or "1x1 of" in shape])
def test_an_image_is_for_most_multiprocessors(shape: str, tile: str) -> None:
    """Of ResNet-50, in one round, at two blocks for each at most."""
    way = Case(shape, tile, "float16", add=False, relu=True, seed=0).way
    split = way.split(MULTIPROCESSORS, SHARED_BYTES)
    assert way.shared_bytes(split) <= SHARED_BYTES // 2
    assert MULTIPROCESSORS // 2 - 2 <= split * math.prod(way.tiles) <= 3 * MULTIPROCESSORS


def test_more_blocks_where_shares_are_too_large() -> None:
    sizes = Sizes.of((8, 7, 7, 512), (8, 7, 7, 512), Window((3, 3), (1, 1), (1, 1), (1, 1)), 64, True)
    way = ConvSmall(sizes, 64, 64)
    assert way.tiles == (8, 7) and way.split(MULTIPROCESSORS, SHARED_BYTES) == 4, "2 have no room"
    assert way.shared_bytes(4) <= SHARED_BYTES < way.shared_bytes(2)
    assert way.split(MULTIPROCESSORS, 1 << 10) == 0
