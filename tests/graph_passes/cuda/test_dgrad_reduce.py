"""`dgrad_reduce` and `dgrad_stream`, which compute the same, against float64 NumPy: random values, odd numbers of rows,
columns that do not fill the last block, poisoned outputs."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded
from test_batch_norm import COMPACT, BatchNormCase, SecondGrad

from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernels.batch_norm import FastDivisor, Grid
from graph_passes.executors.cuda.kernels.conv1x1_forward import Tiles
from graph_passes.executors.cuda.kernels.dgrad_reduce import BLOCK, OUT_CHANNELS, DgradReduce
from graph_passes.executors.cuda.kernels.dgrad_stream import STREAM_BLOCK, DgradStream

BLOCKS = 3  # blocks along the rows: fewer than tiles, so that each block walks
# Bound for the norm of the error relative to the norm: rounding of stored values, and fp32 sums in another order.
STORED = {dtype: PRECISION[dtype] + 2e-5 for dtype in ("float16", "bfloat16")}
# Bounds per channel, relative to the sum of the terms' absolute values. Intermediate terms are not rounded to the
# dtype, and stored ones may be rounded to the other side.
SUMS = {"float16": 2e-4, "bfloat16": 2e-3}


def check_sums(got: np.ndarray, terms: np.ndarray, dtype: str) -> None:
    """Compare `got` (channels,) with the sum of `terms` (rows, channels)."""
    assert np.max(np.abs(got - terms.sum(0)) / (np.abs(terms).sum(0) + 1e-6)) < SUMS[dtype]


class DgradCase:
    """Random operands of `dgrad_reduce` and `dgrad_stream`, and their results on a GPU. `mean` is added to the
    BatchNorms' inputs. Only `dgrad_reduce` supports a `pair` of BatchNorms. `blocks` share the rows. `second`, if
    given, is the addend."""

    def __init__(self, device: Device, dtype: str, k: int, rows: int, columns: int, add: bool, pair: bool, drop: bool,
                 mean: float = 0.0, blocks: int = BLOCKS, second: SecondGrad | None = None) -> None:
        self.device, self.dtype, self.k, self.shape, self.blocks = device, dtype, k, (rows, columns), blocks
        self.flags = pair, drop
        self.norms = [BatchNormCase(device, rows, columns, dtype, seed=seed, mean=mean) for seed in (rows, columns)]
        random = np.random.default_rng(rows + columns)
        self.dy = rounded(random.normal(0, 1, (rows, k)), dtype)
        self.w = rounded(random.normal(0, k**-0.5, (k, columns)), dtype)
        self.second = second or SecondGrad.random(rows, columns, dtype, "WHOLE" if add else "NONE")
        self.mask = random.integers(0, 2, self.shape).astype(bool)

    def run(self, stream: bool) -> tuple[np.ndarray, ...]:
        """dz, dbeta, dgamma, dbeta_2 and dgamma_2, from the second of two launches: the tickets must be back at
        zero."""
        device, dtype, (rows, columns) = self.device, self.dtype, self.shape
        dz = device.poisoned(self.shape, dtype)
        dgamma, dgamma_2, dbeta, dbeta_2 = sums = [device.poisoned((columns,)) for _ in range(4)]
        (pair, drop), kind = self.flags, self.second.kind
        kernel = (self.norms[0].kernel("dgrad_stream", kind, drop) if stream
                  else self.norms[0].kernel("dgrad_reduce", str(self.k), kind, *self.flags))
        scratch = device.poisoned((4 * self.blocks * columns,)), device.zeros(4 * columns), ctypes.c_uint32(rows)
        grid = (-(-columns // DgradReduce.COLUMNS), self.blocks, 1)
        saved, saved_2 = (norm.saved() for norm in self.norms)
        dy, w, x, x_2, addend = (device.put(array, dtype) for array in (
            self.dy, self.w, *(norm.x for norm in self.norms), self.second.given))
        mask = device.put(np.packbits(self.mask, axis=1, bitorder="little"), "uint8")
        ends, adds = (*self.norms[0].dropping(drop), self.second.grid), kind != "NONE"
        for _ in range(2):
            if stream:
                way = DgradStream(self.k, 1 + adds)
                tiles = Tiles.of((1, 1, rows, self.k), (1, 1, rows, columns), (1, 1))
                assert tiles
                tilings: list[Tiling] = [tiles.data, way.weights(columns), *[tiles.output] * 3]
                maps = [device.gpu.tensor_map(address, dtype, tiling)
                        for address, tiling in zip((dy, w, x, 0 if kind == "COMPACT" else addend, dz), tilings,
                                                    strict=True)]
                device.run("dgrad_stream.cu", kernel, grid, STREAM_BLOCK, *maps, addend, mask, saved, dgamma, dbeta,
                           *scratch, tiles.walk, *map(ctypes.c_int, (columns, way.chunks, way.stages, way.ahead)),
                           *ends, shared_bytes=way.shared_bytes)
            else:
                device.run("dgrad_reduce.cu", kernel, grid, BLOCK, dy, w, x, x_2, addend, mask, dz, saved, saved_2,
                           *sums, *scratch, ctypes.c_int(columns), *ends,
                           shared_bytes=DgradReduce(self.k).shared_bytes(adds, pair))
        return (device.get(dz, self.shape, dtype),
                *(device.get(each, (columns,)) for each in (dbeta, dgamma, dbeta_2, dgamma_2)))

    def check(self, stream: bool) -> None:
        pair, drop = self.flags
        dz, dbeta, dgamma, dbeta_2, dgamma_2 = self.run(stream)
        wanted = np.where(self.mask, self.dy @ self.w + self.second.values, 0)
        assert relative_error(dz, wanted) < STORED[self.dtype]
        own = wanted * (self.norms[0].factor if drop else 1)
        check_sums(dbeta, own, self.dtype)
        if len(wanted) > 1:  # with one row the variance is 0, and so is x - mean except for rounding
            check_sums(dgamma, own * self.norms[0].normal, self.dtype)
        if pair:
            check_sums(dbeta_2, wanted, self.dtype)
            assert drop or np.array_equal(dbeta_2, dbeta)
            check_sums(dgamma_2, wanted * self.norms[1].normal, self.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, k, rows, columns, add, pair, drop", [
    ("float16", 64, 1, 128, True, False, False),
    ("float16", 64, 129, 136, False, True, False),
    ("bfloat16", 64, 1003, 256, True, True, False),
    ("float16", 128, 10003, 256, True, False, False),
    ("bfloat16", 128, 333, 320, True, True, False),
    ("float16", 128, 517, 128, False, False, False),
    ("bfloat16", 256, 517, 160, True, False, False),
    ("float16", 256, 259, 512, True, True, False),
    ("float16", 64, 1003, 256, True, False, True),
    ("bfloat16", 128, 333, 320, True, True, True),
    ("float16", 256, 259, 512, False, False, True),
    ("float16", 256, 517, 136, False, True, True),
    ("float16", 256, 3011, 1024, True, False, False),
    ("float16", 512, 777, 256, True, False, False),
    ("bfloat16", 512, 64, 2048, False, False, False),
    ("float16", 72, 130, 200, True, False, False),
    ("bfloat16", 8, 65, 128, True, False, True),
    ("float16", 456, 1, 136, False, False, False)])
@pytest.mark.parametrize("stream", [False, True])
def test_dgrad_reduce(device: Device, dtype: str, k: int, rows: int, columns: int, add: bool, pair: bool, drop: bool,
                      stream: bool) -> None:
    if pair if stream else k not in OUT_CHANNELS:
        pytest.skip("this kernel is for no pairs" if stream else "this kernel is for other numbers of channels")
    DgradCase(device, dtype, k, rows, columns, add, pair, drop).check(stream)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, k, images, columns, pair, drop", [
    ("float16", 128, 1, 256, False, False), ("float16", 64, 7, 136, True, False),
    ("bfloat16", 256, 31, 128, False, True), ("float16", 256, 5, 320, True, True),
    ("float16", 512, 19, 256, False, False), ("float16", 72, 3, 200, False, False)])
@pytest.mark.parametrize("size, stride", [*COMPACT, ((28, 28), (2, 2))])
@pytest.mark.parametrize("stream", [False, True])
def test_dgrad_reduce_adds_a_compact_gradient(device: Device, dtype: str, k: int, images: int, columns: int, pair: bool,
                                              drop: bool, size: tuple[int, int], stride: tuple[int, int],
                                              stream: bool) -> None:
    """A compact gradient gives the bits of the same gradient with its zeros written out."""
    if pair if stream else k not in OUT_CHANNELS:
        pytest.skip("this kernel is for no pairs" if stream else "this kernel is for other numbers of channels")
    rows = images * size[0] * size[1]
    second = SecondGrad.random(rows, columns, dtype, "COMPACT", size, stride)
    case = DgradCase(device, dtype, k, rows, columns, True, pair, drop, second=second)
    case.check(stream)
    got = case.run(stream)
    case.second = second.whole
    written = 5 if pair else 3
    assert all(np.array_equal(*each) for each in zip(got[:written], case.run(stream)[:written], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mean", [100.0, 1000.0])
def test_dgrad_reduce_far_from_zero(device: Device, mean: float, stream: bool) -> None:
    """With a mean far above the deviation, the sums are as accurate."""
    DgradCase(device, "float16", 128, 4001, 256, True, not stream, False, mean).check(stream)


@pytest.mark.gpu
@pytest.mark.parametrize("stream, blocks, rows, columns", [
    (False, 72, 20_003, 256), (False, 73, 20_003, 256), (False, 132, 130, 136), (True, 45, 20_003, 256),
    (True, 46, 20_003, 136)])
def test_dgrad_reduce_by_many_blocks(device: Device, stream: bool, blocks: int, rows: int, columns: int) -> None:
    """As many blocks as the last block reads at once, one block more, and some blocks without rows."""
    DgradCase(device, "float16", 64, rows, columns, True, False, False, blocks=blocks).check(stream)


@pytest.mark.gpu
@pytest.mark.parametrize("stream", [False, True])
def test_dgrad_reduce_gives_equal_bits(device: Device, stream: bool) -> None:
    case = DgradCase(device, "float16", 256, 5003, 384, True, not stream, True)
    first, second = case.run(stream), case.run(stream)
    written = 3 if stream else 5
    assert all(np.array_equal(one, other) for one, other in zip(first[:written], second[:written], strict=True))


@pytest.mark.parametrize("size, stride", COMPACT)
def test_rows_of_a_compact_gradient(size: tuple[int, int], stride: tuple[int, int]) -> None:
    """`Grid` maps each row to its stored pixel: these are numbered consecutively through all images."""
    grid, images = Grid.of((1, *size, 8), stride), 5
    row = np.arange(images * size[0] * size[1])
    line, x = divided(row, grid.width)
    image, y = divided(line, grid.height)
    (out_y, beside), (out_x, below) = divided(y, grid.down), divided(x, grid.right)
    there = (beside == 0) & (below == 0)
    wanted = np.zeros((images, *size), bool)
    wanted[:, ::stride[0], ::stride[1]] = True
    assert np.array_equal(there, wanted.ravel())
    got = (image * grid.out_height + out_y) * grid.out_width + out_x
    assert np.array_equal(got[there], np.arange(there.sum()))


def divided(numbers: np.ndarray, by: FastDivisor) -> tuple[np.ndarray, np.ndarray]:
    """Quotients and remainders."""
    quotients = numbers * 2 * by.factor >> 32 + by.shift
    return quotients, numbers - quotients * by.value


def test_fast_division() -> None:
    for value in (*range(1, 300), 2**16 - 1, 2**16, 2**16 + 1, 2**30 + 1):
        numbers = np.array([0, 1, value - 1, value, 2 * value - 1, 2**31 - 1, (2**31 - 1) // value * value - 1], object)
        divisor = FastDivisor.by(value)
        assert divisor.factor == 2 ** (31 + divisor.shift) // value + 1, "it fits"
        for number, *both in zip(numbers, *divided(numbers, divisor), strict=True):
            assert tuple(both) == divmod(number, value)
