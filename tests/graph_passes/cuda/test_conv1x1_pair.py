"""Two 1x1 convolutions in one launch, against float64 NumPy: random values, odd numbers of rows, channels that fill
neither the last chunk nor the block, poisoned outputs."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded

from graph_passes.executors.cuda.kernel_library import instance
from graph_passes.executors.cuda.kernels.conv1x1_forward import Tiles
from graph_passes.executors.cuda.kernels.conv1x1_pair import BLOCK, Conv1x1Pair

BLOCKS = 3  # fewer than tiles, so that each block walks
# Bound for the norm of the error relative to the norm: rounding of stored values, and fp32 sums in another order.
STORED = {dtype: PRECISION[dtype] + 2e-5 for dtype in ("float16", "bfloat16")}


class Case:
    """Random operands, and the kernel's results on a GPU."""

    def __init__(self, device: Device, dtype: str, channels: int, filters: int, filters_2: int, rows: int,
                 mean: float = 0.0, results: int = 3) -> None:
        self.device, self.dtype, self.rows = device, dtype, rows
        self.way = Conv1x1Pair(channels, filters, filters_2, results)
        random = np.random.default_rng(rows + channels + filters + filters_2)
        self.x = rounded(random.normal(0, 1, (rows, channels)), dtype)
        self.w = rounded(random.normal(0, channels**-0.5, (filters, channels)), dtype)
        if mean:  # the first channel is 1 in all rows
            self.x[:, 0], self.w[:, 0] = 1, rounded(np.full(filters, mean), dtype)
        self.w_2 = rounded(random.normal(0, filters**-0.5, (filters_2, filters)), dtype)
        self.bias = random.normal(0, 1, filters).astype(np.float32)
        self.bias_2 = random.normal(0, 1, filters_2).astype(np.float32)
        self.addend = rounded(random.normal(0, 1, (rows, filters)), dtype)

    def run(self, in_place: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """y and z after two launches, so that a launch that leaves wrong tickets is noticed. `in_place`: one launch, y
        over the addend."""
        device, way, dtype = self.device, self.way, self.dtype
        of_y, of_z = ((self.rows, filters) for filters in (way.filters, way.filters_2))
        addend = device.put(self.addend, dtype)
        y, z = addend if in_place else device.poisoned(of_y, dtype), device.poisoned(of_z, dtype)
        tiles, tiles_2 = (Tiles.of((1, 1, self.rows, channels), (1, 1, *shape), (1, 1))
                          for channels, shape in ((way.channels, of_y), (way.filters, of_z)))
        assert tiles and tiles_2
        maps = [device.gpu.tensor_map(address, dtype, tiling) for address, tiling in (
            (device.put(self.x, dtype), tiles.data), (device.put(self.w, dtype), way.weights[0]),
            (addend, tiles.output), (y, tiles.output), (device.put(self.w_2, dtype), way.weights[1]),
            (z, tiles_2.output))]
        bias, bias_2 = device.put(self.bias), device.put(self.bias_2)
        for _ in range(1 if in_place else 2):
            device.run("conv1x1_pair.cu", instance("conv1x1_pair", dtype, way.second),
                       way.grid(-(-self.rows // tiles.walk.rows), BLOCKS), BLOCK, *maps, bias, bias_2,
                       ctypes.c_uint32(self.rows), tiles.walk,
                       *map(ctypes.c_int, (way.filters, way.filters_2, way.chunks, way.stages, way.results)),
                       shared_bytes=way.shared_bytes)
        return device.get(y, of_y, dtype), device.get(z, of_z, dtype)

    @property
    def wanted_y(self) -> np.ndarray:
        return np.maximum(self.x @ self.w.T + self.bias + self.addend, 0)

    def wanted_z(self, y: np.ndarray) -> np.ndarray:
        """The expected z. `y`: the stored y."""
        return np.maximum(y @ self.w_2.T + self.bias_2, 0)

    def check(self, y: np.ndarray, z: np.ndarray) -> None:
        for got, wanted in ((y, self.wanted_y), (z, self.wanted_z(y))):
            assert relative_error(got, wanted) < STORED[self.dtype]
            assert np.abs(got - wanted).max() < 8 * PRECISION[self.dtype] * np.abs(wanted).max()


# channels, filters, filters_2, rows: those of ResNet-50, and others that leave chunks and blocks partly empty
SHAPES = [
    (64, 256, 64, 1003), (64, 256, 128, 1003), (64, 256, 64, 1), (64, 256, 128, 1), (64, 256, 64, 131),
    (64, 256, 128, 5000), (64, 256, 64, 1024), (128, 256, 64, 517), (8, 8, 8, 65), (72, 40, 16, 130),
    (24, 200, 72, 259), (48, 136, 104, 777)]


@pytest.mark.gpu
@pytest.mark.parametrize("channels, filters, filters_2, rows", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_pair(device: Device, dtype: str, mean: float, channels: int, filters: int, filters_2: int, rows: int) -> None:
    case = Case(device, dtype, channels, filters, filters_2, rows, mean)
    y, z = case.run()
    case.check(y, z)
    again = case.run()
    assert np.array_equal(again[0], y) and np.array_equal(again[1], z)


@pytest.mark.gpu
@pytest.mark.parametrize("filters_2", [64, 128])
def test_in_place(device: Device, filters_2: int) -> None:
    """y may overwrite the addend."""
    case = Case(device, "float16", 64, 256, filters_2, 1003)
    case.check(*case.run(in_place=True))


@pytest.mark.gpu
@pytest.mark.parametrize("results", [2, 4])
def test_other_numbers_of_results(device: Device, results: int) -> None:
    case = Case(device, "float16", 64, 256, 64, 1003, results=results)
    case.check(*case.run())


@pytest.mark.gpu
def test_nan_and_infinity_stay(device: Device) -> None:
    """NaN and infinity stay in their rows, so that a broken network is noticed."""
    case = Case(device, "float16", 64, 256, 64, 200)
    case.x[70, 3] = np.nan
    case.addend[131, 5] = np.inf
    y, z = case.run()
    assert np.isnan(y[70]).all() and np.isnan(z[70]).all() and y[131, 5] == np.inf
    assert np.isinf(z[131]).any() and set(z[131]) <= {0.0, np.inf}
    assert np.isfinite(np.delete(z, [70, 131], axis=0)).all() and np.isfinite(np.delete(y, [70, 131], axis=0)).all()


@pytest.mark.parametrize("channels, filters, filters_2, _", SHAPES)
def test_division_of_shared_memory(channels: int, filters: int, filters_2: int, _: int) -> None:
    """Everything fits, with two tiles in flight for each team."""
    way = Conv1x1Pair(channels, filters, filters_2)
    assert way.stages >= 2 and way.shared_bytes <= 227 << 10
    assert way.second >= filters_2


def test_what_does_not_fit() -> None:
    assert Conv1x1Pair(128, 256, 128).stages < 2
