"""1x1 convolutions with the sums of their output, also fused with the preceding BatchNorm + ReLU, against float64
NumPy, like test_conv1x1_forward.py."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded
from test_conv1x1_forward import BLOCKS, NEAR, SHAPES, STORED, Case
from test_norm_conv1x1 import EPS, MOMENTUM, Norm

from graph_passes.executors.cuda.builder import APPLY_BLOCK
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import instance
from graph_passes.executors.cuda.kernels.conv1x1_forward import (
    PLACE_BYTES,
    TEAMS,
    TILE_ROWS,
    WARP_ROWS,
    Tiles,
)
from graph_passes.executors.cuda.kernels.conv1x1_statistics import Conv1x1Statistics


@pytest.mark.gpu
@pytest.mark.parametrize("channels, filters, rows", SHAPES)
@pytest.mark.parametrize("dtype, mean", [("float16", 0.0), ("bfloat16", 0.0), ("float16", 100.0), ("float16", 1000.0)])
def test_sums_of_the_output(device: Device, dtype: str, mean: float, channels: int, filters: int, rows: int) -> None:
    """The sums are of the stored values, about the mean; the bits are equal every time."""
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
    """The last block adds the sums of as many blocks as an H200 has multiprocessors, or more. The last tile has one
    row."""
    rows = 128 * blocks - 63
    y, sums = Case(device, dtype, channels, filters, rows, sums=True, mean=mean, blocks=blocks).run()
    deviation = y.std(0)
    assert np.all(sums[0] == 0)
    assert np.all(np.abs(sums[2] - y.mean(0)) <= NEAR * deviation + 2.0**-22 * np.abs(y.mean(0)))
    assert np.all(np.abs(sums[1] / rows - y.var(0)) <= NEAR * y.var(0))
    assert np.all(np.abs(sums[1] / rows - y.var(0)) <= NEAR * y.var(0))


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
        """One launch; with `separate`, only the BatchNorm + ReLU."""
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
    """The normalised tensor has the bits of a separate launch. Everything is checked against float64, and the bits are
    equal every time, with and without the tensor in between being written."""
    case = NormCase(device, dtype, channels, filters, rows, about_mean, mean)
    got, alone = case.run(), case.run(separate=True)
    for name in ("y", "saved", "running_mean", "running_var"):
        assert np.array_equal(got[name], alone[name]), name
    y, z, sums = got["y"], got["z"], got["sums"]
    if rows > 1:  # with one pixel the variance is 0
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
    """All slots are reused many times, by as many blocks as there are."""
    case = NormCase(device, "float16", channels, filters, 70_001, blocks=132 // -(-filters // 128))
    got, alone = case.run(), case.run(separate=True)
    assert np.array_equal(got["y"], alone["y"])
    assert relative_error(got["z"], got["y"] @ case.w.T) < STORED["float16"]
    assert np.all(np.abs(got["sums"][1] / case.rows - got["z"].var(0)) <= NEAR * got["z"].var(0))


@pytest.mark.parametrize("channels, filters, _", SHAPES)
def test_division_of_shared_memory_with_sums(channels: int, filters: int, _: int) -> None:
    """Shared memory suffices for two stages or more: the final sums of a block reuse the memory of the tiles."""
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
