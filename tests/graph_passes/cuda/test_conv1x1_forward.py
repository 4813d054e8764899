"""The forward pass of 1x1 convolutions with their epilogue, against float64 NumPy: random values, odd numbers of rows,
channels that fill neither the last chunk nor the last block, poisoned outputs."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded

from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import instance
from graph_passes.executors.cuda.kernels.conv1x1_forward import (
    Conv1x1Forward,
    Tiles,
)
from graph_passes.executors.cuda.kernels.conv1x1_statistics import Conv1x1Statistics

BLOCKS = 3  # blocks along the rows: fewer than tiles, so that each block walks
# Bound for the norm of the error relative to the norm: rounding of stored values, and fp32 sums in another order.
STORED = {dtype: PRECISION[dtype] + 2e-5 for dtype in ("float16", "bfloat16")}
# Bound for fp32 sums about a value near the mean: of the variance (relative), and of the mean (in standard deviations).
NEAR = 1e-5


class Case:
    """Random operands, and the kernel's results on a GPU."""

    def __init__(self, device: Device, dtype: str, channels: int, filters: int, rows: int, add: bool = False,
                 relu: bool = False, sums: bool = False, mean: float = 0.0,
                 images: tuple[int, int, int] | None = None, channels_2: int = 0, blocks: int = BLOCKS) -> None:
        """`images` (N, H, W) replaces `rows`: every other pixel of every other row is read. `channels_2`: input
        channels of a second convolution, with stride 1. `blocks`: maximum along the rows."""
        image_shape = images or (1, 1, rows)
        data_rows, stride = math.prod(image_shape), 2 if images else 1
        out_shape = (image_shape[0], *(-(-size // stride) for size in image_shape[1:]), filters)
        rows = math.prod(out_shape[:3])
        tiles = Tiles.of((*image_shape, channels), out_shape, (stride, stride))
        assert tiles
        self.tiles, self.device, self.dtype, self.shape = tiles, device, dtype, (rows, filters)
        random = np.random.default_rng(rows + channels + filters)
        self.data = rounded(random.normal(0, 1, (data_rows, channels)), dtype)
        self.w = rounded(random.normal(0, channels**-0.5, (filters, channels)), dtype)
        if mean:  # the first channel is 1 in all rows
            self.data[:, 0], self.w[:, 0] = 1, rounded(mean * random.choice([-1, 1], filters), dtype)
        self.bias = None if sums else random.normal(0, 1, filters).astype(np.float32)
        self.addend = rounded(random.normal(0, 1, self.shape), dtype) if add else None
        self.x = self.data.reshape(*image_shape, channels)[:, ::stride, ::stride].reshape(rows, channels)
        self.relu, self.add, self.sums, self.two = relu, add, sums, channels_2 > 0
        self.x_2 = rounded(random.normal(0, 1, (rows, channels_2)), dtype) if self.two else None
        self.w_2 = rounded(random.normal(0, channels_2**-0.5, (filters, channels_2)), dtype) if self.two else None
        self.bias_2 = random.normal(0, 1, filters).astype(np.float32) if self.two else None
        self.way: Conv1x1Forward = (Conv1x1Statistics(channels, filters) if sums else
                                    Conv1x1Forward(channels, filters, add, channels_2))
        self.blocks = blocks

    def run(self, times: int = 2) -> tuple[np.ndarray, np.ndarray]:
        """y and its sums, after several launches, so that a launch that leaves wrong tickets is noticed."""
        device, way, (rows, filters) = self.device, self.way, self.shape
        y, sums = device.poisoned(self.shape, self.dtype), device.poisoned((3, filters))
        blocks = way.grid(-(-rows // self.tiles.walk.rows), self.blocks * -(-filters // way.columns))
        partials, tickets = device.poisoned((3 * filters * blocks[1],)), device.zeros(4 * blocks[0])

        def tiled(array: np.ndarray | int | None, tiling: Tiling) -> object:
            address = device.put(array, self.dtype) if isinstance(array, np.ndarray) else array or 0
            return device.gpu.tensor_map(address, self.dtype, tiling)

        x, w, addend, to = (tiled(self.data, self.tiles.data), tiled(self.w, way.weights),
                            tiled(self.addend, self.tiles.output), tiled(y, self.tiles.output))
        maps_2 = tiled(self.x_2, self.tiles.beside(way.channels_2)), tiled(self.w_2, way.weights_2)
        bias, bias_2 = (0 if each is None else device.put(each) for each in (self.bias, self.bias_2))
        sizes = (ctypes.c_uint32(rows), self.tiles.walk,
                 *map(ctypes.c_int, (filters, way.chunks, way.stages, way.results)))
        for _ in range(times):
            if isinstance(way, Conv1x1Statistics):
                kernel = instance("conv1x1_statistics", self.dtype, way.columns, way.peers)
                device.run("conv1x1_statistics.cu", kernel, blocks, way.BLOCK, x, w, to, sums, partials, tickets,
                           *sizes, shared_bytes=way.shared_bytes)
            else:
                kernel = instance("conv1x1_forward", self.dtype, way.columns, self.add, self.relu, self.two)
                device.run("conv1x1_forward.cu", kernel, blocks, way.BLOCK, x, w, addend, to, bias, *sizes, *maps_2,
                           bias_2, ctypes.c_int(way.chunks_2), shared_bytes=way.shared_bytes)
        return device.get(y, self.shape, self.dtype), device.get(sums, (3, filters))

    @property
    def wanted(self) -> np.ndarray:
        y = self.x @ self.w.T
        beside = None if self.x_2 is None or self.w_2 is None else self.x_2 @ self.w_2.T
        for more in (self.bias, self.addend, beside, self.bias_2):
            y = y if more is None else y + more
        return np.maximum(y, 0) if self.relu else y


SHAPES = [  # channels, filters, rows: those of ResNet-50, and others that leave chunks and blocks partly empty
    (64, 64, 1003), (64, 256, 1003), (256, 64, 517), (128, 512, 1003), (512, 128, 777), (256, 1024, 389),
    (512, 2048, 131), (256, 128, 64), (512, 256, 1), (8, 8, 65), (72, 40, 130), (200, 328, 259), (448, 136, 1111)]


@pytest.mark.gpu
@pytest.mark.parametrize("channels, filters, rows", SHAPES)
@pytest.mark.parametrize("dtype, add, relu", [
    ("float16", True, True), ("float16", False, True), ("bfloat16", False, False), ("bfloat16", True, True)])
def test_epilogues_of_inference(device: Device, dtype: str, add: bool, relu: bool, channels: int, filters: int,
                                rows: int) -> None:
    case = Case(device, dtype, channels, filters, rows, add, relu)
    y, _ = case.run()
    assert relative_error(y, case.wanted) < STORED[dtype]
    assert np.abs(y - case.wanted).max() < 8 * PRECISION[dtype] * np.abs(case.wanted).max()


@pytest.mark.gpu
@pytest.mark.parametrize("channels, filters, images", [
    (256, 512, (3, 56, 56)), (512, 1024, (5, 14, 14)), (64, 128, (7, 14, 14)), (72, 200, (1, 2, 1)),
    (128, 40, (3, 6, 127)), (64, 64, (2, 34, 19))])
@pytest.mark.parametrize("dtype, sums", [("float16", False), ("bfloat16", True)])
def test_stride_2(device: Device, dtype: str, sums: bool, channels: int, filters: int,
                  images: tuple[int, int, int]) -> None:
    case = Case(device, dtype, channels, filters, 0, add=not sums, relu=not sums, sums=sums, images=images)
    y, of_y = case.run()
    assert relative_error(y, case.wanted) < STORED[dtype]
    if sums:
        assert np.all(np.abs(of_y[1] / len(y) - y.var(0)) <= NEAR * y.var(0))


@pytest.mark.gpu
@pytest.mark.parametrize("channels, channels_2, filters, rows, images", [
    (64, 64, 256, 1003, None), (64, 64, 256, 1, None), (64, 64, 256, 5000, None), (72, 8, 40, 131, None),
    (8, 200, 328, 259, None), (256, 128, 512, 0, (3, 56, 56)), (512, 256, 1024, 0, (5, 14, 14)),
    (64, 72, 128, 0, (7, 14, 14)), (72, 136, 200, 0, (1, 2, 1)), (128, 64, 40, 0, (3, 6, 127)),
    (64, 24, 64, 0, (2, 34, 19))])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sum_of_two_convolutions(device: Device, dtype: str, channels: int, channels_2: int, filters: int, rows: int,
                                 images: tuple[int, int, int] | None) -> None:
    """Neither product is rounded before the sum, and the bits are equal every time."""
    case = Case(device, dtype, channels, filters, rows, relu=True, images=images, channels_2=channels_2)
    y, _ = case.run()
    assert relative_error(y, case.wanted) < STORED[dtype]
    assert np.abs(y - case.wanted).max() < 8 * PRECISION[dtype] * np.abs(case.wanted).max()
    assert np.array_equal(case.run(times=1)[0], y)


@pytest.mark.gpu
def test_nan_and_infinity_stay(device: Device) -> None:
    """NaN and infinity in x reach all outputs of their row and no others. ReLU keeps them, so that a broken network is
    noticed."""
    case = Case(device, "float16", 64, 64, 200, add=True, relu=True)
    case.data[70, 3] = np.nan
    case.addend[131, 5] = np.inf
    y, _ = case.run()
    assert np.isnan(y[70]).all() and y[131, 5] == np.inf
    assert np.isfinite(np.delete(y, 70, axis=0)).sum() == 199 * 64 - 1


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("channels, filters, _", SHAPES)
def test_division_of_shared_memory(channels: int, filters: int, _: int, adds: bool) -> None:
    """Everything fits, with at least two tiles in flight for each team, and more if another tensor is read too."""
    way = Conv1x1Forward(channels, filters, adds)
    assert way.stages >= 2 and way.results == 2 + adds
    assert way.shared_bytes <= 227 << 10
    assert way.columns >= min(filters, 128)


def test_what_does_not_fit() -> None:
    assert Conv1x1Forward(2048, 512).columns == 0
    assert Conv1x1Forward(512, 2048).columns == 128 and Conv1x1Forward(1024, 256).columns == 64


@pytest.mark.parametrize("channels, channels_2, filters, columns", [
    (64, 64, 256, 256), (256, 128, 512, 128), (512, 256, 1024, 64), (1024, 512, 2048, 0), (72, 8, 40, 64)])
def test_shared_memory_of_two_convolutions(channels: int, channels_2: int, filters: int, columns: int) -> None:
    """The projection shortcuts of ResNet-50: those of stage 4 have more weights than a block can keep."""
    way = Conv1x1Forward(channels, filters, False, channels_2)
    assert way.columns == columns
    assert not columns or (way.stages >= 2 and way.shared_bytes <= 227 << 10)
