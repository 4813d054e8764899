"""The end of a residual block and the next block's first 1x1 convolution in one launch. BatchNorm's part has the bits
of a separate launch; everything is checked against float64 NumPy. Random values, odd numbers of rows, large means,
poisoned outputs.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded

from graph_passes.executors.cuda.builder import APPLY_BLOCK
from graph_passes.executors.cuda.kernel_library import instance
from graph_passes.executors.cuda.kernels.norm_conv1x1 import NormConv1x1

BLOCKS = 3  # fewer than tiles, so that each block walks
EPS, MOMENTUM = 1e-5, 0.9
# Bound for the norm of the error relative to the norm: rounding of stored values, and fp32 sums in another order.
STORED = {dtype: PRECISION[dtype] + 2e-5 for dtype in ("float16", "bfloat16")}
# Bound for fp32 sums about a value near the mean: of the variance (relative), and of the mean (in standard deviations).
NEAR = 1e-5
Arrays = dict[str, np.ndarray]


class Norm:
    """A BatchNorm of random data: its sums (about the mean, or plain), its parameters and running statistics."""

    def __init__(self, rows: int, channels: int, dtype: str, about_mean: bool, mean: float,
                 random: np.random.Generator) -> None:
        self.x = rounded(random.normal(random.normal(mean, 1, channels), 1, (rows, channels)), dtype)
        self.about_mean = about_mean
        self.mean, self.var = self.x.mean(0), self.x.var(0)
        sums = [0 * self.mean, self.var * rows, self.mean] if about_mean else [self.x.sum(0), (self.x**2).sum(0)]
        self.sums = np.stack(sums).astype(np.float32)
        self.gamma = random.uniform(0.5, 1.5, channels).astype(np.float32)
        self.beta = random.normal(0, 1, channels).astype(np.float32)
        self.running_mean = random.normal(0, 1, channels).astype(np.float32)
        self.running_var = random.uniform(0.5, 1.5, channels).astype(np.float32)

    @property
    def invstd(self) -> np.ndarray:
        return 1 / np.sqrt(self.var + EPS)

    @property
    def y(self) -> np.ndarray:
        return (self.x - self.mean) * self.invstd * self.gamma + self.beta


class Case:
    """Random operands, and the results of one launch on a GPU, or of the BatchNorm alone. `filter_mean`: approximate
    mean of the convolution's output; `blocks`: maximum along the rows."""

    def __init__(self, device: Device, dtype: str, channels: int, filters: int, rows: int, pair: bool,
                 mean: float = 0.0, filter_mean: float = 0.0, blocks: int = BLOCKS) -> None:
        self.device, self.dtype, self.rows, self.pair, self.blocks = device, dtype, rows, pair, blocks
        self.way = NormConv1x1(channels, filters)
        random = np.random.default_rng([rows, channels, filters, pair])
        self.norms = [Norm(rows, channels, dtype, about_mean=True, mean=mean, random=random)]
        if pair:
            self.norms.append(Norm(rows, channels, dtype, about_mean=False, mean=0.0, random=random))
        self.addend = self.norms[1].x if pair else rounded(random.normal(0, 1, (rows, channels)), dtype)
        w = random.normal(0, channels**-0.5, (filters, channels)) + filter_mean / channels
        self.w = rounded(w, dtype)
        self.tickets = device.zeros(4)

    def run(self, separate: bool = False, in_place: bool = False) -> Arrays:
        """One launch with the convolution; with `separate`, only the BatchNorm; `in_place`: y over x."""
        device, dtype, rows, way = self.device, self.dtype, self.rows, self.way
        shapes = {"y": (rows, way.channels), "mask": (rows, way.channels // 8), "z": (rows, way.others),
                  "sums": (3, way.others)}
        dtypes = {"y": dtype, "mask": "uint8", "z": dtype}
        at = {name: device.poisoned(shape, dtypes.get(name, "float32")) for name, shape in shapes.items()}
        x, addend = device.put(self.norms[0].x, dtype), device.put(self.addend, dtype)
        at["y"] = x if in_place else at["y"]
        for number, norm in enumerate(self.norms):
            for name in ("running_mean", "running_var"):
                shapes[f"{name}{number}"] = (way.channels,)
                at[f"{name}{number}"] = device.put(getattr(norm, name))
            shapes[f"saved{number}"] = (2, way.channels)
            at[f"saved{number}"] = device.poisoned((2, way.channels))
        self._launch(separate, x, addend, at)
        names = [name for name in shapes if not separate or name not in ("z", "sums")]
        return {name: device.get(at[name], shapes[name], dtypes.get(name, "float32")) for name in names}

    def _launch(self, separate: bool, x: int, addend: int, at: dict[str, int]) -> None:
        device, dtype, rows, way, pair = self.device, self.dtype, self.rows, self.way, self.pair
        numbers = (0, 1) if pair or not separate else (0,)

        def put(name: str) -> list[int]:
            given = [device.put(getattr(norm, name)) for norm in self.norms]
            return [*given, 0][:len(numbers)]

        def left(name: str) -> list[int]:
            return [at.get(f"{name}{number}", 0) for number in numbers]

        norms = [*put("sums"), *(ctypes.c_bool(number < len(self.norms) and self.norms[number].about_mean)
                                 for number in numbers), *put("gamma"), *put("beta")]
        kept = [*left("saved"), *left("running_mean"), *left("running_var"), ctypes.c_float(EPS),
                ctypes.c_float(MOMENTUM)]
        counts = ctypes.c_uint32(rows), ctypes.c_int(way.channels)
        if separate:
            kernel = instance("batch_norm_pair_apply", dtype, False) if pair else instance(
                "batch_norm_apply", dtype, True, True, False)
            device.run("batch_norm_pair.cu" if pair else "batch_norm.cu", kernel, (way.chunks, BLOCKS, 1), APPLY_BLOCK,
                       x, addend, *norms, at["y"], at["mask"], *kept, *counts, 0, ctypes.c_uint32(0),
                       ctypes.c_uint32(1))
            return
        grid = way.grid(rows, self.blocks)
        read = way.read(rows, way.channels)
        maps = [device.gpu.tensor_map(address, dtype, tiling) for address, tiling in (
            (x, read), (addend, read), (device.put(self.w, dtype), way.weights),
            (at["y"], way.written(rows, way.channels)), (at["z"], way.written(rows, way.others)))]
        device.run("norm_conv1x1.cu", instance("norm_conv1x1", dtype, way.columns, pair), grid,
                   way.block, *maps, *norms, at["mask"], *kept, at["sums"],
                   device.poisoned((3 * way.others * grid[1],)), self.tickets,
                   ctypes.c_uint32(rows), *map(ctypes.c_int, (way.others, way.chunks, way.stages)),
                   shared_bytes=way.shared_bytes)

    @property
    def wanted_y(self) -> np.ndarray:
        return np.maximum(self.norms[0].y + (self.norms[1].y if self.pair else self.addend), 0)

    def check(self, got: Arrays) -> None:
        y, z = got["y"], got["z"]
        for array, wanted in ((y, self.wanted_y), (z, y @ self.w.T)):
            assert relative_error(array, wanted) < STORED[self.dtype]
            assert np.abs(array - wanted).max() < 8 * PRECISION[self.dtype] * np.abs(wanted).max()
        bits = np.unpackbits(got["mask"], axis=1, bitorder="little")
        assert np.array_equal(bits[y > 0], np.ones((y > 0).sum())) and bits[y == 0].mean() < 1e-2, "fp16 may round to 0"
        for number, norm in enumerate(self.norms):
            for array, wanted in zip(got[f"saved{number}"], (norm.mean, norm.invstd), strict=True):
                assert np.abs(array - wanted).max() < 1e-5 * max(1, np.abs(wanted).max())
        self.check_sums(got)

    def check_sums(self, got: Arrays) -> None:
        z, sums = got["z"], got["sums"]
        deviation = z.std(0)
        assert np.all(sums[0] == 0)
        assert np.all(np.abs(sums[2] - z.mean(0)) <= NEAR * deviation + 2.0**-22 * np.abs(z.mean(0)))
        assert np.all(np.abs(sums[1] / self.rows - z.var(0)) <= NEAR * z.var(0))


SHAPES = [  # channels, filters, rows: those of ResNet-50, and others that leave chunks and blocks partly empty
    (256, 64, 1003), (256, 128, 1003), (512, 128, 1003), (256, 64, 1), (512, 128, 1), (128, 64, 65), (64, 64, 131),
    (256, 64, 5000), (256, 128, 1024), (512, 128, 777), (192, 72, 130), (64, 8, 517), (320, 40, 259), (448, 104, 193),
    (1024, 256, 1003), (512, 256, 517), (1024, 256, 1), (1024, 256, 5000), (64, 136, 65), (320, 200, 193)]


@pytest.mark.gpu
@pytest.mark.parametrize("channels, filters, rows", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("pair", [False, True])
def test_norm_conv1x1(device: Device, pair: bool, dtype: str, channels: int, filters: int, rows: int) -> None:
    """The bits equal those of the BatchNorm's own launch, every time."""
    case = Case(device, dtype, channels, filters, rows, pair)
    got, again, alone = case.run(), case.run(), case.run(separate=True)
    case.check(got)
    for name, array in got.items():
        assert np.array_equal(again[name], array), name
        if name in alone:
            assert np.array_equal(alone[name], array), name


@pytest.mark.gpu
@pytest.mark.parametrize("channels, filters, rows", [(256, 64, 5000), (512, 128, 1003), (192, 72, 130),
                                                      (1024, 256, 1003)])
@pytest.mark.parametrize("dtype, mean, filter_mean", [
    ("float16", 100.0, 0.0), ("float16", 0.0, 100.0), ("float16", 0.0, 1000.0), ("bfloat16", 10.0, 100.0)])
def test_large_means(device: Device, dtype: str, mean: float, filter_mean: float, channels: int, filters: int,
                     rows: int) -> None:
    """Large means of the BatchNorm's input and of the convolution's output."""
    case = Case(device, dtype, channels, filters, rows, False, mean, filter_mean)
    case.check(case.run())


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 2, 33, 34, 66, 132, 201])
@pytest.mark.parametrize("channels, filters", [(64, 40), (64, 64), (64, 128), (256, 72), (64, 256)])
@pytest.mark.parametrize("dtype, filter_mean", [("float16", 1000.0), ("bfloat16", 0.0)])
def test_sums_of_many_blocks(device: Device, dtype: str, filter_mean: float, channels: int, filters: int, blocks: int
                             ) -> None:
    """The last block adds the sums of as many blocks as an H200 has multiprocessors, or more. The last tile has one
    row."""
    rows = 128 * blocks - 63
    case = Case(device, dtype, channels, filters, rows, False, filter_mean=filter_mean, blocks=blocks)
    assert case.way.grid(rows, blocks)[1] == blocks
    got = case.run()
    case.check(got)
    assert np.array_equal(case.run()["sums"], got["sums"])


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [64, 128, 256])
def test_in_place(device: Device, filters: int) -> None:
    """y may overwrite x."""
    case = Case(device, "float16", 256, filters, 1003, False)
    case.check(case.run(in_place=True))


@pytest.mark.gpu
def test_nan_and_infinity_stay(device: Device) -> None:
    """NaN and infinity stay in their rows, so that a broken network is noticed."""
    case = Case(device, "float16", 256, 64, 200, False)
    case.norms[0].x[70, 3], case.addend[131, 5] = np.nan, np.inf  # not in the sums, which are given
    got = case.run()
    y, z = got["y"], got["z"]
    assert np.isnan(y[70, 3]) and np.isnan(z[70]).all() and y[131, 5] == np.inf
    assert not np.isfinite(z[131]).any()
    assert np.isfinite(np.delete(z, [70, 131], axis=0)).all() and np.isfinite(y).sum() == y.size - 2


@pytest.mark.parametrize("channels, filters, _", SHAPES)
def test_division_of_shared_memory(channels: int, filters: int, _: int) -> None:
    """Everything fits, with two tiles in flight for each team, and the sums of its warps in the memory of the tiles."""
    way = NormConv1x1(channels, filters)
    assert way.stages >= 2 and way.shared_bytes <= 227 << 10
    assert way.columns >= filters and way.chunks * 64 == channels
    shares = 8 * 32 // way.columns
    assert 12 * way.columns * (8 + shares) <= way.stages * (32 << 10)


def test_places_for_resnet() -> None:
    """As many slots as the weights leave room for; the weights of 256 filters are streamed."""
    assert [NormConv1x1(*sizes).stages for sizes in ((256, 64), (256, 128), (512, 128))] == [5, 4, 2]
    assert [NormConv1x1(*sizes).stages for sizes in ((512, 256), (1024, 256))] == [4, 4]
    assert NormConv1x1(1024, 128).stages < 2
