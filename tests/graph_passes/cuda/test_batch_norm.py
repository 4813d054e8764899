"""The halves of BatchNorms against float64 NumPy: random values, odd sizes, poisoned outputs, all dtypes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded

from graph_passes.executors.cuda.builder import APPLY_BLOCK, REDUCE_BLOCK
from graph_passes.executors.cuda.kernel_library import C_TYPES
from graph_passes.executors.cuda.kernels.batch_norm import Grid
from graph_passes.operators.base import channel_sums, sums_about_mean

pytestmark = pytest.mark.gpu

EPS, MOMENTUM = 1e-5, 0.9
NOTHING_DROPPED = 0, ctypes.c_uint32(0), ctypes.c_uint32(1)
SHAPES = [(1, 8), (7, 24), (1000, 64), (333, 72), (4099, 256), (49, 2048)]  # rows, channels


class BatchNormCase:
    """A random BatchNorm, its reference and its device arrays. `mean` is added to its input."""

    def __init__(self, device: Device, rows: int, channels: int, dtype: str, seed: int, mean: float = 0.0) -> None:
        random = np.random.default_rng(seed)
        self.device, self.dtype, self.rows, self.channels = device, dtype, rows, channels
        self.x = rounded(random.normal(mean + random.normal(0, 1, channels), 1.5, (rows, channels)), dtype)
        self.addend = rounded(random.normal(0, 1, (rows, channels)), dtype)
        self.gamma = rounded(random.uniform(0.5, 1.5, channels), "float32")
        self.beta = rounded(random.normal(0, 0.5, channels), "float32")
        self.mean, self.var = self.x.mean(0), self.x.var(0)
        self.invstd = 1 / np.sqrt(self.var + EPS)
        self.normal = (self.x - self.mean) * self.invstd
        self.tiles = -(-channels // 64)
        self.partials = device.poisoned((2 * 5 * channels,))
        self.tickets = device.zeros(4 * self.tiles)
        self.size = (ctypes.c_uint32(rows), ctypes.c_int(channels))
        # Five images, the last of which may have fewer rows. The kernels get the second of three sets of factors.
        self.pixels = -(-rows // 5)
        images = -(-rows // self.pixels)
        factors = rounded(random.choice([0, 1 / 0.7], (3, images)), "float32")
        self.factor = factors[1].repeat(self.pixels)[:rows, None]
        self.factors = (device.put(factors), ctypes.c_uint32(images), ctypes.c_uint32(self.pixels))

    def kernel(self, name: str, *arguments: str | bool) -> str:
        return f"{name}<{', '.join([C_TYPES[self.dtype], *(str(argument) for argument in arguments)])}>".replace(
            "True", "true").replace("False", "false")

    def dropping(self, drop: bool) -> tuple[Any, ...]:
        """The kernels' last arguments, which describe stochastic depth: the factor of each image, or none."""
        return self.factors if drop else NOTHING_DROPPED

    def saved(self) -> int:
        return self.device.put(np.stack([self.mean, self.invstd]))

    def sums(self, about_mean: bool) -> tuple[int, ctypes.c_bool]:
        """Sums of x, or of x less its mean, as kernels take them."""
        sums = (sums_about_mean if about_mean else channel_sums)(self.x, 1)
        return self.device.put(sums), ctypes.c_bool(about_mean)


@dataclass(frozen=True)
class SecondGrad:
    """A second gradient of a tensor (rows, channels) for kernels: `given` is their argument, `values` has all rows."""

    kind: str
    values: np.ndarray
    given: np.ndarray
    grid: Grid

    @classmethod
    def random(cls, rows: int, channels: int, dtype: str, kind: str, size: tuple[int, int] = (1, 1),
               stride: tuple[int, int] = (1, 1)) -> SecondGrad:
        """`size` of the images, and `stride` if the gradient is compact."""
        values = np.zeros((rows, channels))
        there = values.reshape(-1, *size, channels)[:, ::stride[0], ::stride[1]]
        if kind != "NONE":
            there[...] = rounded(np.random.default_rng(rows + 1).normal(0.1, 1, there.shape), dtype)
        return cls(kind, values, there.reshape(-1, channels), Grid.of((1, *size, channels), stride))

    @property
    def whole(self) -> SecondGrad:
        """The gradient with its zeros."""
        return SecondGrad("WHOLE", self.values, self.values, self.grid)


# Sizes of images and strides of compact gradients: odd and even sizes, one pixel, and an end that is not on the stride.
COMPACT = [((7, 7), (2, 2)), ((8, 6), (2, 2)), ((5, 9), (2, 1)), ((6, 5), (1, 2)), ((10, 11), (3, 3)),
           ((1, 1), (2, 2)), ((2, 13), (3, 2))]


@pytest.mark.parametrize("rows, channels", SHAPES)
def test_statistics(device: Device, dtype: str, rows: int, channels: int) -> None:
    case = BatchNormCase(device, rows, channels, dtype, seed=rows)
    sums = device.poisoned((3, channels))
    for _ in range(2):  # twice: the tickets must be back at zero
        device.run("batch_norm.cu", case.kernel("batch_norm_statistics"), (case.tiles, 5, 1), REDUCE_BLOCK,
                   device.put(case.x, dtype), sums, case.partials, case.tickets, *case.size)
    zero, squares, mean = device.get(sums, (3, channels))
    assert not zero.any()
    deviation = np.sqrt(case.var + (case.mean - case.x[0]) ** 2)  # fp32 sums of up to 4099 terms about the first value
    assert (np.abs(mean - case.mean) <= 1e-5 * deviation + 2.0**-23 * np.abs(case.mean)).all()
    assert (np.abs(squares / rows - case.var) <= 1e-5 * deviation**2).all()


@pytest.mark.parametrize("blocks", [1, 24, 25, 216, 217, 300])
def test_sums_by_many_blocks(device: Device, blocks: int) -> None:
    """As many blocks as the last block reads at once, one block more, and some blocks without rows. The bits are equal
    every time.
    """
    rows, channels = 1003, 72
    case = BatchNormCase(device, rows, channels, "float16", seed=blocks)
    dy = rounded(np.random.default_rng(blocks).normal(0.1, 1, (rows, channels)), "float16")
    x, dy_address, partials = device.put(case.x, "float16"), device.put(dy, "float16"), (2 * blocks * channels,)
    results = []
    for _ in range(2):  # twice: the tickets must be back at zero
        sums, dgamma, dbeta = (device.poisoned((each, channels)) for each in (3, 1, 1))
        device.run("batch_norm.cu", case.kernel("batch_norm_statistics"), (case.tiles, blocks, 1), REDUCE_BLOCK,
                   x, sums, device.poisoned(partials), case.tickets, *case.size)
        device.run("batch_norm.cu", case.kernel("batch_norm_backward_reduce", "NO_RELU", "NONE", False, False),
                   (case.tiles, blocks, 1), REDUCE_BLOCK, x, dy_address, 0, 0, 0, case.saved(),
                   device.put(case.gamma), 0, dgamma, dbeta, device.poisoned(partials), case.tickets, *case.size,
                   *NOTHING_DROPPED, Grid())
        written = (sums, 3), (dgamma, 1), (dbeta, 1)
        results.append([device.get(address, (each, channels)) for address, each in written])
    (sums_of_x, got_dgamma, got_dbeta), again = results
    assert all(np.array_equal(*each) for each in zip(results[0], again, strict=True))
    assert relative_error(sums_of_x[1] / rows, case.var) < 1e-5 and relative_error(sums_of_x[2], case.mean) < 1e-5
    assert relative_error(got_dbeta[0], dy.sum(0)) < 1e-4
    assert relative_error(got_dgamma[0], (dy * case.normal).sum(0)) < 1e-4


@pytest.mark.parametrize("rows, channels", SHAPES)
@pytest.mark.parametrize("add, relu, drop", [(False, False, False), (False, True, False), (True, True, False),
                                             (True, True, True)])
@pytest.mark.parametrize("about_mean", [False, True])
def test_batch_norm_forward(device: Device, dtype: str, rows: int, channels: int, add: bool, relu: bool,
                            drop: bool, about_mean: bool) -> None:
    case = BatchNormCase(device, rows, channels, dtype, seed=channels)
    y, mask = device.poisoned((rows, channels), dtype), device.poisoned((rows, channels // 8), "uint8")
    saved = device.poisoned((2, channels))
    running = [np.full(channels, 0.25), np.full(channels, 2.0)]
    running_mean, running_var = (device.put(value) for value in running)
    device.run("batch_norm.cu", case.kernel("batch_norm_apply", add, relu, drop),
               (case.tiles, 3, 1), APPLY_BLOCK, device.put(case.x, dtype), device.put(case.addend, dtype),
               *case.sums(about_mean), device.put(case.gamma), device.put(case.beta), y, mask, saved, running_mean,
               running_var, ctypes.c_float(EPS), ctypes.c_float(MOMENTUM), *case.size, *case.dropping(drop))
    norm = (case.normal * case.gamma + case.beta) * (case.factor if drop else 1)
    before_relu = norm + (case.addend if add else 0)
    wanted = np.maximum(before_relu, 0) if relu else before_relu
    got = device.get(y, (rows, channels), dtype)
    if rows > 1:  # with one row the variance is 0, and its rounding errors in fp32 differ
        assert relative_error(got, wanted) < PRECISION[dtype] + 2e-5  # rounding of y; fp32 variance from sums
        # Statistics for the backward pass and inference.
        assert relative_error(device.get(saved, (2, channels)), np.stack([case.mean, case.invstd])) < 1e-4
        new = zip((running_mean, running_var), running, (case.mean, case.var), strict=True)
        for address, old, value in new:
            wanted = MOMENTUM * old + (1 - MOMENTUM) * value
            assert relative_error(device.get(address, (channels,)), wanted) < 1e-5
    if relu:
        bits = np.unpackbits(device.get(mask, (rows, channels // 8), "uint8"), axis=1, bitorder="little")
        clear = np.abs(before_relu) > 1e-3  # near zero either sign is right
        assert np.array_equal(bits[clear], (before_relu > 0)[clear])


@pytest.mark.parametrize("rows, channels", SHAPES[1:])
@pytest.mark.parametrize("relu", ["NO_RELU", "RECOMPUTED", "BITS"])
@pytest.mark.parametrize("two, write, drop", [(False, False, False), (False, True, False), (True, True, False),
                                              (False, True, True), (True, True, True)])
def test_batch_norm_backward(device: Device, dtype: str, rows: int, channels: int, relu: str, two: bool,
                             write: bool, drop: bool) -> None:
    case = BatchNormCase(device, rows, channels, dtype, seed=rows + channels)
    random = np.random.default_rng(rows)
    dy, second = rounded(random.normal(0.1, 1, (rows, channels)), dtype), "WHOLE" if two else "NONE"
    dy2 = SecondGrad.random(rows, channels, dtype, second)
    sign = case.normal * case.gamma + case.beta if relu == "RECOMPUTED" else random.normal(0, 1, (rows, channels))
    mask = np.packbits(sign > 0, axis=1, bitorder="little")
    dz = (dy + dy2.values) * (1 if relu == "NO_RELU" else sign > 0)

    x, gamma, beta, saved = device.put(case.x, dtype), device.put(case.gamma), device.put(case.beta), case.saved()
    dy_address = device.put(dy, dtype)
    dz_address = device.poisoned((rows, channels), dtype) if write else 0
    dgamma, dbeta = device.poisoned((channels,)), device.poisoned((channels,))
    device.run("batch_norm.cu", case.kernel("batch_norm_backward_reduce", relu, second, write, drop),
               (case.tiles, 5, 1), REDUCE_BLOCK, x, dy_address, device.put(dy2.given, dtype),
               device.put(mask, "uint8"), dz_address, saved, gamma, beta, dgamma, dbeta, case.partials, case.tickets,
               *case.size, *case.dropping(drop), dy2.grid)
    got_dgamma, got_dbeta = device.get(dgamma, (channels,)), device.get(dbeta, (channels,))
    factor = case.factor if drop else 1
    assert relative_error(got_dbeta, (dz * factor).sum(0)) < 1e-4
    assert relative_error(got_dgamma, (dz * factor * case.normal).sum(0)) < 1e-4
    if write:
        dz = rounded(dz, dtype)
        assert relative_error(device.get(dz_address, (rows, channels), dtype), dz) < PRECISION[dtype]

    masked = "NO_RELU" if write or relu == "BITS" else relu
    source = dz_address if write else device.put(dz, dtype) if relu == "BITS" else dy_address
    wanted = case.gamma * case.invstd * (dz * factor - got_dbeta / rows - case.normal * got_dgamma / rows)
    for add in (False, True):
        dx, addend = device.poisoned((rows, channels), dtype), device.put(case.addend, dtype) if add else 0
        device.run("batch_norm.cu", case.kernel("batch_norm_backward_apply", masked, add, drop),
                   (case.tiles, 3, 1), APPLY_BLOCK, x, source, addend, dx, saved, gamma, beta, dgamma, dbeta,
                   *case.size, *case.dropping(drop))
        got = device.get(dx, (rows, channels), dtype)
        assert relative_error(got, wanted + case.addend if add else wanted) < PRECISION[dtype] + 1e-4


@pytest.mark.parametrize("size, stride", COMPACT)
@pytest.mark.parametrize("kind, drop", [("NO_RELU", False), ("BITS", True), ("pair", False), ("pair", True)])
def test_a_compact_gradient(device: Device, dtype: str, size: tuple[int, int], stride: tuple[int, int], kind: str,
                            drop: bool) -> None:
    """A compact gradient added by a BatchNorm's sums: against float64, and bit for bit like the same gradient with its
    zeros."""
    rows, channels = 13 * size[0] * size[1], 72
    cases = [BatchNormCase(device, rows, channels, dtype, seed) for seed in (rows, channels)]
    case, random = cases[0], np.random.default_rng(rows)
    dy = rounded(random.normal(0.1, 1, (rows, channels)), dtype)
    compact = SecondGrad.random(rows, channels, dtype, "COMPACT", size, stride)
    let_through = (random.normal(0, 1, (rows, channels)) > 0) | (kind == "NO_RELU")
    mask = device.put(np.packbits(let_through, axis=1, bitorder="little"), "uint8")
    x, saved = [device.put(each.x, dtype) for each in cases], [each.saved() for each in cases]
    results = []
    for dy2 in (compact, compact.whole):
        dz = device.poisoned((rows, channels), dtype)
        sums = [device.poisoned((channels,)) for _ in range(4)]
        ends = (device.poisoned((4 * 5 * channels,)), case.tickets, *case.size, *case.dropping(drop), dy2.grid)
        given = device.put(dy, dtype), device.put(dy2.given, dtype), mask, dz
        if kind == "pair":
            device.run("batch_norm_pair.cu", case.kernel("batch_norm_pair_backward_reduce", dy2.kind, drop),
                       (case.tiles, 5, 1), REDUCE_BLOCK, *x, *given, *saved, *sums, *ends)
        else:
            device.run("batch_norm.cu", case.kernel("batch_norm_backward_reduce", kind, dy2.kind, True, drop),
                       (case.tiles, 5, 1), REDUCE_BLOCK, x[0], *given, saved[0], device.put(case.gamma),
                       device.put(case.beta), sums[0], sums[2], *ends)
        results.append([device.get(dz, (rows, channels), dtype),
                        *(device.get(each, (channels,)) for each in (sums if kind == "pair" else sums[::2]))])
    assert all(np.array_equal(*each) for each in zip(*results, strict=True))
    wanted = (dy + compact.values) * let_through
    own = wanted * (case.factor if drop else 1)
    assert relative_error(results[0][0], rounded(wanted, dtype)) < PRECISION[dtype]
    dgamma, dbeta = results[0][1], results[0][3 if kind == "pair" else 2]
    assert relative_error(dbeta, own.sum(0)) < 1e-4 and relative_error(dgamma, (own * case.normal).sum(0)) < 1e-4
    if kind == "pair":
        assert relative_error(results[0][4], wanted.sum(0)) < 1e-4
        assert relative_error(results[0][2], (wanted * cases[1].normal).sum(0)) < 1e-4
