"""From one BatchNorm through a 1x1 convolution's data to the sums of the preceding BatchNorm, in one launch, against
float64 NumPy. Random values, odd numbers of rows, large means, poisoned outputs."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded
from test_batch_norm import BatchNormCase
from test_dgrad_reduce import STORED, check_sums

from graph_passes.executors.cuda.kernels.norm_dgrad import NormDgrad
from graph_passes.executors.cuda.kernels.norm_stream import STREAMED_BLOCK

BLOCKS = 4  # fewer than tiles, so that each block walks
KINK = 1e-3  # so near to zero either sign is right for ReLU
Arrays = dict[str, np.ndarray]


class Case:
    """Random operands, and the results of one launch on a GPU. `mean` is added to the inputs of both BatchNorms;
    `blocks`: maximum along the rows."""

    def __init__(self, device: Device, dtype: str, channels: int, data_channels: int, rows: int,
                 mean: float = 0.0, blocks: int = BLOCKS) -> None:
        self.device, self.dtype, self.rows, self.blocks = device, dtype, rows, blocks
        self.way = NormDgrad(channels, data_channels)
        self.after, self.before = (BatchNormCase(device, rows, number, dtype, seed=number + rows + place, mean=mean)
                                   for place, number in enumerate((channels, data_channels)))
        random = np.random.default_rng([rows, channels, data_channels])
        self.dz = rounded(random.normal(0.1, 1, (rows, channels)), dtype)
        self.w = rounded(random.normal(0, channels**-0.5, (channels, data_channels)), dtype)
        # Half of the sums: with all of them, dx of one row would be only rounding errors.
        self.dbeta, self.dgamma = self.dz.sum(0) / 2, (self.dz * self.after.normal).sum(0) / 2

    def run(self, in_place: bool = False) -> Arrays:
        """`in_place`: dx over x. Tickets must be back at zero."""
        device, dtype, rows, way = self.device, self.dtype, self.rows, self.way
        wide, narrow = (rows, way.channels), (rows, way.others)
        dz, x, w, behind = (device.put(array, dtype) for array in (self.dz, self.after.x, self.w, self.before.x))
        dx, dz_behind = x if in_place else device.poisoned(wide, dtype), device.poisoned(narrow, dtype)
        sums = [device.poisoned(narrow[1:]) for _ in range(2)]
        grid, tickets = way.grid(rows, self.blocks), device.zeros(4)
        maps = [device.gpu.tensor_map(address, dtype, tiling) for address, tiling in (
            (dz, way.read(rows, way.channels)), (x, way.read(rows, way.channels)), (w, way.weights),
            (behind, way.read(rows, way.others)), (dx, way.written(rows, way.channels)),
            (dz_behind, way.written(rows, way.others)))]
        parameters = [device.put(array) for array in (
            np.stack([self.after.mean, self.after.invstd]), self.after.gamma, self.dgamma, self.dbeta,
            np.stack([self.before.mean, self.before.invstd]), self.before.gamma, self.before.beta)]
        kernel = self.after.kernel("norm_dgrad", str(way.columns))
        device.run("norm_dgrad.cu", kernel, grid, STREAMED_BLOCK, *maps, *parameters, *sums,
                   device.poisoned((2 * way.others * grid[1],)), tickets,
                   ctypes.c_uint32(rows), *map(ctypes.c_int, (way.others, way.chunks, way.stages)),
                   shared_bytes=way.shared_bytes)
        assert device.get(tickets, (1,), "int32")[0] == 0
        return {"dx": device.get(dx, wide, dtype), "dz_behind": device.get(dz_behind, narrow, dtype),
                "dgamma": device.get(sums[0], narrow[1:]), "dbeta": device.get(sums[1], narrow[1:])}

    def check(self, got: Arrays) -> None:
        after, before, rows = self.after, self.before, self.rows
        dx = after.gamma * after.invstd * (self.dz - self.dbeta / rows - after.normal * self.dgamma / rows)
        assert relative_error(got["dx"], dx) < STORED[self.dtype]
        before_relu = before.normal * before.gamma + before.beta
        wanted, clear = np.where(before_relu > 0, got["dx"] @ self.w, 0), np.abs(before_relu) > KINK
        assert relative_error(got["dz_behind"][clear], wanted[clear]) < STORED[self.dtype]
        wanted = np.where(clear, wanted, got["dz_behind"])
        if rows > 1:
            check_sums(got["dbeta"], wanted, self.dtype)
            check_sums(got["dgamma"], wanted * before.normal, self.dtype)
        else:  # with one row x - mean is 0 except for rounding, and a product of 1,024 terms may be 0, too
            assert relative_error(got["dbeta"], got["dz_behind"][0]) < PRECISION[self.dtype]


SHAPES = [  # channels, channels of data, rows: those of ResNet-50, and others that leave chunks and blocks partly empty
    (1024, 256, 1003), (512, 128, 1003), (256, 64, 1003), (1024, 256, 1), (512, 128, 63), (256, 64, 65),
    (2048, 256, 517), (1024, 256, 5000), (64, 128, 131), (64, 256, 129), (128, 72, 130), (320, 200, 193),
    (448, 136, 259), (192, 8, 64), (256, 192, 1024), (1024, 128, 777)]


@pytest.mark.gpu
@pytest.mark.parametrize("channels, data_channels, rows", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_norm_dgrad(device: Device, dtype: str, channels: int, data_channels: int, rows: int) -> None:
    """The bits are equal every time, also if dx overwrites x."""
    case = Case(device, dtype, channels, data_channels, rows)
    got = case.run()
    case.check(got)
    for again in (case.run(), case.run(in_place=True)):
        for name, array in got.items():
            assert np.array_equal(again[name], array), name


@pytest.mark.gpu
@pytest.mark.parametrize("channels, data_channels", [(1024, 256), (512, 128)])
@pytest.mark.parametrize("dtype, mean", [("float16", 100.0), ("float16", 1000.0), ("bfloat16", 10.0)])
def test_far_from_zero(device: Device, dtype: str, mean: float, channels: int, data_channels: int) -> None:
    """With a mean far above the deviation, the sums are as accurate."""
    case = Case(device, dtype, channels, data_channels, 1003, mean=mean)
    case.check(case.run())


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 2, 44, 45, 132, 201])
@pytest.mark.parametrize("channels, data_channels", [(64, 256), (128, 72)])
def test_sums_of_many_blocks(device: Device, channels: int, data_channels: int, blocks: int) -> None:
    """The last block adds the sums of as many blocks as an H200 has multiprocessors, or more. The last tile has one
    row."""
    rows = 128 * blocks - 63
    case = Case(device, "float16", channels, data_channels, rows, blocks=blocks)
    assert case.way.grid(rows, blocks)[1] == blocks
    case.check(case.run())


@pytest.mark.gpu
def test_nan_and_infinity_stay(device: Device) -> None:
    """NaN and infinity stay in their rows, so that a broken network is noticed."""
    case = Case(device, "float16", 256, 128, 200)
    case.dz[70, 3], case.dz[131, 5] = np.nan, np.inf  # not in the sums, which are given
    got = case.run()
    assert np.isnan(got["dx"][70, 3]) and np.isinf(got["dx"][131, 5])
    assert np.isfinite(got["dx"]).sum() == got["dx"].size - 2
    assert not np.isfinite(got["dz_behind"][[70, 131]]).all(axis=1).any()
    assert np.isfinite(np.delete(got["dz_behind"], [70, 131], axis=0)).all()


@pytest.mark.parametrize("channels, data_channels, _", SHAPES)
def test_division_of_shared_memory(channels: int, data_channels: int, _: int) -> None:
    """Everything fits, with two stages in flight for each team, and the sums of its warps in the memory of the
    tiles."""
    way = NormDgrad(channels, data_channels)
    assert way.stages >= 2 and way.shared_bytes <= 227 << 10
    assert way.columns >= data_channels and way.chunks * 64 == channels
    assert 8 * 2 * way.columns * 4 <= way.stages * (32 << 10)


def test_places_for_resnet() -> None:
    assert [NormDgrad(*sizes).stages for sizes in ((512, 128), (1024, 256))] == [5, 4]
