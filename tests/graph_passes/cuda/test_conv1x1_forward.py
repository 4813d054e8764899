"""The forward pass of 1x1 convolutions with what follows it, against float64 NumPy: random values, odd numbers of rows,
channels that fill neither the last chunk nor the last block, poisoned outputs."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded
from test_norm_conv1x1 import EPS, MOMENTUM, Norm

from graph_passes.executors.cuda.builder import APPLY_BLOCK
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import instance
from graph_passes.executors.cuda.kernels.conv1x1_forward import (
    PLACE_BYTES,
    TEAMS,
    TILE_ROWS,
    WARP_ROWS,
    Conv1x1Forward,
    Tiles,
)
from graph_passes.executors.cuda.kernels.conv1x1_statistics import Conv1x1Statistics

BLOCKS = 3  # along the rows: fewer than tiles, so that each block walks
# Norm of the error over the norm: rounding of what is stored, and fp32 sums of products in another order.
STORED = {dtype: PRECISION[dtype] + 2e-5 for dtype in ("float16", "bfloat16")}
NEAR = 1e-5  # relative error of a variance from fp32 sums about a value near the mean, and of that mean in deviations


class Case:
    """Random operands, and what the kernel leaves on a GPU."""

    def __init__(self, device: Device, dtype: str, channels: int, filters: int, rows: int, add: bool = False,
                 relu: bool = False, sums: bool = False, mean: float = 0.0,
                 images: tuple[int, int, int] | None = None, channels_2: int = 0, blocks: int = BLOCKS) -> None:
        """`images` (N, H, W), in which every other pixel of every other row is read, in place of `rows`; `channels_2`:
        of a second convolution, with stride 1; `blocks`: along the rows, at most."""
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
        """y and its sums; more than once, for what a launch must leave as it was."""
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


SHAPES = [  # channels, filters, rows: ResNet-50's, and others that fill nothing
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
@pytest.mark.parametrize("channels, filters, rows", SHAPES)
@pytest.mark.parametrize("dtype, mean", [("float16", 0.0), ("bfloat16", 0.0), ("float16", 100.0), ("float16", 1000.0)])
def test_sums_of_the_output(device: Device, dtype: str, mean: float, channels: int, filters: int, rows: int) -> None:
    """Of what is stored, about the mean; equal bits every time."""
    case = Case(device, dtype, channels, filters, rows, sums=True, mean=mean)
    y, sums = case.run()
    assert relative_error(y, case.wanted) < STORED[dtype]
    assert np.all(sums[0] == 0)
    deviation = y.std(0)
    assert np.all(np.abs(sums[2] - y.mean(0)) <= NEAR * deviation + 2.0**-22 * np.abs(y.mean(0)))
    assert np.all(np.abs(sums[1] / rows - y.var(0)) <= NEAR * y.var(0))
    again = case.run(times=1)
    assert np.array_equal(again[0], y) and np.array_equal(again[1], sums)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 2, 33, 34, 66, 132, 201])
@pytest.mark.parametrize("channels, filters", [(64, 40), (64, 64), (64, 128), (200, 328), (64, 512)])
@pytest.mark.parametrize("dtype, mean", [("float16", 1000.0), ("bfloat16", 0.0)])
def test_sums_of_many_blocks(device: Device, dtype: str, mean: float, channels: int, filters: int, blocks: int) -> None:
    """The last block adds up those of as many as an H200 has multiprocessors, or of more; the last tile has one row."""
    rows = 128 * blocks - 63
    y, sums = Case(device, dtype, channels, filters, rows, sums=True, mean=mean, blocks=blocks).run()
    deviation = y.std(0)
    assert np.all(sums[0] == 0)
    assert np.all(np.abs(sums[2] - y.mean(0)) <= NEAR * deviation + 2.0**-22 * np.abs(y.mean(0)))
    assert np.all(np.abs(sums[1] / rows - y.var(0)) <= NEAR * y.var(0))
    assert np.all(np.abs(sums[1] / rows - y.var(0)) <= NEAR * y.var(0))


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
    """Without rounding in between; equal bits every time."""
    case = Case(device, dtype, channels, filters, rows, relu=True, images=images, channels_2=channels_2)
    y, _ = case.run()
    assert relative_error(y, case.wanted) < STORED[dtype]
    assert np.abs(y - case.wanted).max() < 8 * PRECISION[dtype] * np.abs(case.wanted).max()
    assert np.array_equal(case.run(times=1)[0], y)


@pytest.mark.gpu
def test_nan_and_infinity_stay(device: Device) -> None:
    """Those of x reach all outputs of their row and no others; ReLU keeps them, so that a broken network is noticed."""
    case = Case(device, "float16", 64, 64, 200, add=True, relu=True)
    case.data[70, 3] = np.nan
    case.addend[131, 5] = np.inf
    y, _ = case.run()
    assert np.isnan(y[70]).all() and y[131, 5] == np.inf
    assert np.isfinite(np.delete(y, 70, axis=0)).sum() == 199 * 64 - 1


class NormCase:
    """A BatchNorm + ReLU of random data, and the convolution that follows."""

    def __init__(self, device: Device, dtype: str, channels: int, filters: int, rows: int, about_mean: bool = True,
                 mean: float = 0.0, blocks: int = BLOCKS) -> None:
        self.device, self.dtype, self.rows, self.blocks = device, dtype, rows, blocks
        self.way = Conv1x1Statistics(channels, filters, normalises=True)
        random = np.random.default_rng([rows, channels, filters])
        self.norm = Norm(rows, channels, dtype, about_mean, mean, random)
        self.w = rounded(random.normal(0, channels**-0.5, (filters, channels)), dtype)

    def run(self, separate: bool = False, is_read: bool = True) -> dict[str, np.ndarray]:
        """By one launch, or `separate`, of the BatchNorm + ReLU alone."""
        device, dtype, way, norm, rows = self.device, self.dtype, self.way, self.norm, self.rows
        shapes = {"y": (rows, way.channels), "z": (rows, way.filters), "saved": (2, way.channels),
                  "running_mean": (way.channels,), "running_var": (way.channels,), "sums": (3, way.filters)}
        dtypes = {"y": dtype, "z": dtype}
        at = {name: device.put(getattr(norm, name)) if name.startswith("running") else
              device.poisoned(shape, dtypes.get(name, "float32")) for name, shape in shapes.items()}
        x, w = device.put(norm.x, dtype), device.put(self.w, dtype)
        given = device.put(norm.sums), ctypes.c_bool(norm.about_mean), device.put(norm.gamma), device.put(norm.beta)
        kept = at["saved"], at["running_mean"], at["running_var"], ctypes.c_float(EPS), ctypes.c_float(MOMENTUM)
        if separate:
            device.run("batch_norm.cu", instance("batch_norm_apply", dtype, False, True, False),
                       (way.chunks, BLOCKS, 1), APPLY_BLOCK, x, 0, *given, at["y"], 0, *kept, ctypes.c_uint32(rows),
                       ctypes.c_int(way.channels), 0, ctypes.c_uint32(0), ctypes.c_uint32(1))
        else:
            tiles = Tiles.of((1, 1, rows, way.channels), (1, 1, rows, way.filters), (1, 1))
            assert tiles
            grid = way.grid(-(-rows // TILE_ROWS), self.blocks * way.blocks)
            maps = [device.gpu.tensor_map(address, dtype, tiling) for address, tiling in (
                (x, tiles.data), (w, way.weights),
                (at["y"] if is_read else 0, Tiling.of_matrix(rows, way.channels, (WARP_ROWS, 64))),
                (at["z"], tiles.output))]
            device.run("conv1x1_statistics.cu", instance("norm_relu_conv1x1", dtype, way.columns, way.peers), grid,
                       way.BLOCK, *maps, ctypes.c_bool(is_read), *given, *kept, at["sums"],
                       device.poisoned((3 * way.filters * grid[1],)), device.zeros(4 * grid[0]), ctypes.c_uint32(rows),
                       tiles.walk, *map(ctypes.c_int, (way.filters, way.chunks, way.stages, way.results)),
                       shared_bytes=way.shared_bytes)
        found = {name: device.get(at[name], shape, dtypes.get(name, "float32")) for name, shape in shapes.items()}
        device.gpu.free_all()
        return found


NORM_SHAPES = [(64, 256, 1003), (128, 512, 1003), (256, 1024, 389), (64, 64, 65), (128, 40, 130), (192, 328, 259),
               (256, 136, 1111), (64, 128, 1), (256, 64, 517)]


@pytest.mark.gpu
@pytest.mark.parametrize("channels, filters, rows", NORM_SHAPES)
@pytest.mark.parametrize("dtype, about_mean, mean", [("float16", True, 0.0), ("bfloat16", False, 0.0),
                                                     ("float16", True, 100.0)])
def test_after_a_batch_norm(device: Device, dtype: str, about_mean: bool, mean: float, channels: int, filters: int,
                            rows: int) -> None:
    """What is normalised to the bit as by a launch of its own; all against float64; equal bits every time, with what
    lies between the two and without."""
    case = NormCase(device, dtype, channels, filters, rows, about_mean, mean)
    got, alone = case.run(), case.run(separate=True)
    for name in ("y", "saved", "running_mean", "running_var"):
        assert np.array_equal(got[name], alone[name]), name
    y, z, sums = got["y"], got["z"], got["sums"]
    if rows > 1:  # of one pixel the variance is 0
        assert relative_error(y, np.maximum(case.norm.y, 0)) < STORED[dtype]
    wanted = y @ case.w.T
    assert relative_error(z, wanted) < STORED[dtype]
    assert np.abs(z - wanted).max() < 8 * PRECISION[dtype] * np.abs(wanted).max()
    deviation = z.std(0)
    assert np.all(sums[0] == 0)
    assert np.all(np.abs(sums[2] - z.mean(0)) <= NEAR * deviation + 2.0**-22 * np.abs(z.mean(0)))
    assert np.all(np.abs(sums[1] / rows - z.var(0)) <= NEAR * z.var(0))
    again, unread = case.run(), case.run(is_read=False)
    assert np.isnan(unread["y"]).all()
    for name, array in got.items():
        assert np.array_equal(again[name], array), name
        assert name == "y" or np.array_equal(unread[name], array), name


@pytest.mark.gpu
@pytest.mark.parametrize("channels, filters", [(64, 256), (128, 512), (256, 1024)])
def test_many_tiles_after_a_batch_norm(device: Device, channels: int, filters: int) -> None:
    """All places are used again and again, by as many blocks as there are."""
    case = NormCase(device, "float16", channels, filters, 70_001, blocks=132 // -(-filters // 128))
    got, alone = case.run(), case.run(separate=True)
    assert np.array_equal(got["y"], alone["y"])
    assert relative_error(got["z"], got["y"] @ case.w.T) < STORED["float16"]
    assert np.all(np.abs(got["sums"][1] / case.rows - got["z"].var(0)) <= NEAR * got["z"].var(0))


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("channels, filters, _", SHAPES)
def test_division_of_shared_memory(channels: int, filters: int, _: int, adds: bool) -> None:
    """All that a block needs fits, with two tiles on their way for each team, and more where a tensor is read too."""
    way = Conv1x1Forward(channels, filters, adds)
    assert way.stages >= 2 and way.results == 2 + adds
    assert way.shared_bytes <= 227 << 10
    assert way.columns >= min(filters, 128)


@pytest.mark.parametrize("channels, filters, _", SHAPES)
def test_division_of_shared_memory_with_sums(channels: int, filters: int, _: int) -> None:
    """The same; what a block sums up at the end lies where the tiles were."""
    way = Conv1x1Statistics(channels, filters)
    assert way.stages >= 2 and way.results == 3 and way.shared_bytes <= 227 << 10
    assert min(filters, 128) <= way.columns <= 128
    parts = max(2 * TEAMS, 4 * TEAMS * 32 // way.columns)
    assert 12 * parts * way.columns <= way.stages * PLACE_BYTES


@pytest.mark.parametrize("channels, filters, _", NORM_SHAPES)
def test_division_of_shared_memory_after_a_batch_norm(channels: int, filters: int, _: int) -> None:
    way = Conv1x1Statistics(channels, filters, normalises=True)
    assert way.stages >= 2 and way.shared_bytes <= 227 << 10
    assert way.shared_bytes - way.stages * PLACE_BYTES > Conv1x1Statistics(channels, filters).stages


def test_what_does_not_fit() -> None:
    assert Conv1x1Forward(2048, 512).columns == 0
    assert Conv1x1Forward(512, 2048).columns == 128 and Conv1x1Forward(1024, 256).columns == 64


@pytest.mark.parametrize("channels, channels_2, filters, columns", [
    (64, 64, 256, 256), (256, 128, 512, 128), (512, 256, 1024, 64), (1024, 512, 2048, 0), (72, 8, 40, 64)])
def test_shared_memory_of_two_convolutions(channels: int, channels_2: int, filters: int, columns: int) -> None:
    """Those of ResNet-50's projection shortcuts: of stage 4 there are more weights than a block can keep."""
    way = Conv1x1Forward(channels, filters, False, channels_2)
    assert way.columns == columns
    assert not columns or (way.stages >= 2 and way.shared_bytes <= 227 << 10)
