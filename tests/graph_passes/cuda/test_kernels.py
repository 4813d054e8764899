"""Our kernels against float64 NumPy: random values, odd sizes, poisoned outputs, all dtypes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gpu_arrays import DTYPES, PRECISION, Device, relative_error, rounded

from graph_passes import Node
from graph_passes.executors.cuda.builder import APPLY_BLOCK, REDUCE_BLOCK
from graph_passes.executors.cuda.kernel_library import C_TYPES
from graph_passes.executors.cuda.kernels.batch_norm import Grid
from graph_passes.executors.cuda.kernels.batch_norm_relu_max_pool import STRIP, Image
from graph_passes.executors.cuda.kernels.pooling import Window
from graph_passes.executors.cuda.kernels.stem import STEM_BLOCK, stem_work
from graph_passes.executors.cuda.network import MetricsLayout
from graph_passes.operators import pooling
from graph_passes.operators.base import channel_sums, sums_about_mean
from graph_passes.operators.batch_norm_halves import statistics_of

pytestmark = pytest.mark.gpu

EPS, MOMENTUM = 1e-5, 0.9
NOTHING_DROPPED = 0, ctypes.c_uint32(0), ctypes.c_uint32(1)
SHAPES = [(1, 8), (7, 24), (1000, 64), (333, 72), (4099, 256), (49, 2048)]  # rows, channels


class BatchNormCase:
    """A random batch norm, its reference and its device arrays. `mean` is added to what it reads."""

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
        # Images of which the last may have fewer rows, and the second of three sets of factors for them.
        self.pixels = -(-rows // 5)
        images = -(-rows // self.pixels)
        factors = rounded(random.choice([0, 1 / 0.7], (3, images)), "float32")
        self.factor = factors[1].repeat(self.pixels)[:rows, None]
        self.factors = (device.put(factors), ctypes.c_uint32(images), ctypes.c_uint32(self.pixels))

    def kernel(self, name: str, *arguments: str | bool) -> str:
        return f"{name}<{', '.join([C_TYPES[self.dtype], *(str(argument) for argument in arguments)])}>".replace(
            "True", "true").replace("False", "false")

    def dropping(self, drop: bool) -> tuple[Any, ...]:
        """The kernels' last arguments."""
        return self.factors if drop else NOTHING_DROPPED

    def saved(self) -> int:
        return self.device.put(np.stack([self.mean, self.invstd]))

    def sums(self, about_mean: bool) -> tuple[int, ctypes.c_bool]:
        """Of x, or of x less its mean, as kernels take them."""
        sums = (sums_about_mean if about_mean else channel_sums)(self.x, 1)
        return self.device.put(sums), ctypes.c_bool(about_mean)


@dataclass(frozen=True)
class SecondGrad:
    """A second gradient of a tensor (rows, channels) as kernels take it: `given` to them, and `values` of all rows."""

    kind: str
    values: np.ndarray
    given: np.ndarray
    grid: Grid

    @classmethod
    def random(cls, rows: int, channels: int, dtype: str, kind: str, size: tuple[int, int] = (1, 1),
               stride: tuple[int, int] = (1, 1)) -> SecondGrad:
        """`size` of its images, and the `stride`, where it is compact."""
        values = np.zeros((rows, channels))
        there = values.reshape(-1, *size, channels)[:, ::stride[0], ::stride[1]]
        if kind != "NONE":
            there[...] = rounded(np.random.default_rng(rows + 1).normal(0.1, 1, there.shape), dtype)
        return cls(kind, values, there.reshape(-1, channels), Grid.of((1, *size, channels), stride))

    @property
    def whole(self) -> SecondGrad:
        """The same with its zeros."""
        return SecondGrad("WHOLE", self.values, self.values, self.grid)


# Sizes of images and strides of compact gradients: odd and even, one pixel, more than one step of a stride at the end.
COMPACT = [((7, 7), (2, 2)), ((8, 6), (2, 2)), ((5, 9), (2, 1)), ((6, 5), (1, 2)), ((10, 11), (3, 3)),
           ((1, 1), (2, 2)), ((2, 13), (3, 2))]


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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
    """As many as the last one reads at once, one more, and some without rows; equal bits every time."""
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
    if rows > 1:  # of one row the variance is 0 and what fp32 makes of it differs
        assert relative_error(got, wanted) < PRECISION[dtype] + 2e-5  # rounding of y; fp32 variance from sums
        # Statistics that the backward pass and inference use.
        assert relative_error(device.get(saved, (2, channels)), np.stack([case.mean, case.invstd])) < 1e-4
        new = zip((running_mean, running_var), running, (case.mean, case.var), strict=True)
        for address, old, value in new:
            wanted = MOMENTUM * old + (1 - MOMENTUM) * value
            assert relative_error(device.get(address, (channels,)), wanted) < 1e-5
    if relu:
        bits = np.unpackbits(device.get(mask, (rows, channels // 8), "uint8"), axis=1, bitorder="little")
        clear = np.abs(before_relu) > 1e-3  # near zero either answer is right
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


@pytest.mark.parametrize("rows, channels", SHAPES[1:])
@pytest.mark.parametrize("about_mean", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("drop", [False, True])
def test_batch_norm_pair_forward(device: Device, dtype: str, rows: int, channels: int, about_mean: tuple[bool, bool],
                                 drop: bool) -> None:
    cases = [BatchNormCase(device, rows, channels, dtype, seed) for seed in (rows, channels)]
    sums, flags = zip(*(case.sums(about) for case, about in zip(cases, about_mean, strict=True)), strict=True)
    y, mask = device.poisoned((rows, channels), dtype), device.poisoned((rows, channels // 8), "uint8")
    saved = [device.poisoned((2, channels)) for _ in cases]
    running = [device.put(np.full(channels, value)) for value in (0.25, 0.5, 2.0, 3.0)]
    device.run("batch_norm_pair.cu", cases[0].kernel("batch_norm_pair_apply", drop), (cases[0].tiles, 3, 1),
               APPLY_BLOCK, *(device.put(case.x, dtype) for case in cases),
               *sums, *flags, *(device.put(case.gamma) for case in cases), *(device.put(case.beta) for case in cases),
               y, mask, *saved, *running, ctypes.c_float(EPS), ctypes.c_float(MOMENTUM), *cases[0].size,
               *cases[0].dropping(drop))
    norms = [case.normal * case.gamma + case.beta for case in cases]
    before_relu = norms[0] * (cases[0].factor if drop else 1) + norms[1]
    got = device.get(y, (rows, channels), dtype)
    assert relative_error(got, np.maximum(before_relu, 0)) < PRECISION[dtype] + 2e-5  # as in test_batch_norm_forward
    bits = np.unpackbits(device.get(mask, (rows, channels // 8), "uint8"), axis=1, bitorder="little")
    clear = np.abs(before_relu) > 1e-3
    assert np.array_equal(bits[clear], (before_relu > 0)[clear])
    for number, case in enumerate(cases):
        kept = device.get(saved[number], (2, channels))
        assert relative_error(kept, np.stack([case.mean, case.invstd])) < 1e-4
        for address, old, value in ((running[number], (0.25, 0.5)[number], case.mean),
                                    (running[2 + number], (2.0, 3.0)[number], case.var)):
            wanted = MOMENTUM * old + (1 - MOMENTUM) * value
            assert relative_error(device.get(address, (channels,)), wanted) < 1e-5


@pytest.mark.parametrize("rows, channels", SHAPES[1:])
@pytest.mark.parametrize("two, drop", [(False, False), (True, False), (False, True), (True, True)])
def test_batch_norm_pair_backward(device: Device, dtype: str, rows: int, channels: int, two: bool, drop: bool) -> None:
    cases = [BatchNormCase(device, rows, channels, dtype, seed) for seed in (rows, channels)]
    random = np.random.default_rng(rows + channels)
    dy, dy2 = rounded(random.normal(0.1, 1, (rows, channels)), dtype), SecondGrad.random(
        rows, channels, dtype, "WHOLE" if two else "NONE")
    let_through = random.normal(0, 1, (rows, channels)) > 0
    dz = (dy + dy2.values) * let_through
    x, saved = [device.put(case.x, dtype) for case in cases], [case.saved() for case in cases]
    dgamma, dbeta = ([device.poisoned((channels,)) for _ in cases] for _ in range(2))
    dz_address = device.poisoned((rows, channels), dtype)
    partials = device.poisoned(((3 + drop) * 5 * channels,))
    mask = device.put(np.packbits(let_through, axis=1, bitorder="little"), "uint8")
    for _ in range(2):  # twice: the tickets must be back at zero
        device.run("batch_norm_pair.cu", cases[0].kernel("batch_norm_pair_backward_reduce", dy2.kind, drop),
                   (cases[0].tiles, 5, 1), REDUCE_BLOCK, *x, device.put(dy, dtype), device.put(dy2.given, dtype), mask,
                   dz_address, *saved, *dgamma, *dbeta, partials, cases[0].tickets, *cases[0].size,
                   *cases[0].dropping(drop), dy2.grid)
    sums = [[device.get(address, (channels,)) for address in pair] for pair in (dgamma, dbeta)]
    dx = [device.poisoned((rows, channels), dtype) for _ in cases]
    device.run("batch_norm_pair.cu", cases[0].kernel("batch_norm_pair_backward_apply", drop), (cases[0].tiles, 3, 1),
               APPLY_BLOCK, *x, dz_address, *dx, *saved, *(device.put(case.gamma) for case in cases), *dgamma, dbeta[0],
               *cases[0].size, dbeta[1] if drop else 0, *cases[0].dropping(drop))
    assert relative_error(device.get(dz_address, (rows, channels), dtype), rounded(dz, dtype)) < PRECISION[dtype]
    factors = cases[0].factor if drop else 1, 1
    for case, factor, address, got_dgamma, got_dbeta in zip(cases, factors, dx, *sums, strict=True):
        assert relative_error(got_dbeta, (dz * factor).sum(0)) < 1e-4
        assert relative_error(got_dgamma, (dz * factor * case.normal).sum(0)) < 1e-4
        of_norm = rounded(dz, dtype) * factor
        wanted = case.gamma * case.invstd * (of_norm - got_dbeta / rows - case.normal * got_dgamma / rows)
        assert relative_error(device.get(address, (rows, channels), dtype), wanted) < PRECISION[dtype] + 1e-4


@pytest.mark.parametrize("size, stride", COMPACT)
@pytest.mark.parametrize("kind, drop", [("NO_RELU", False), ("BITS", True), ("pair", False), ("pair", True)])
def test_a_compact_gradient(device: Device, dtype: str, size: tuple[int, int], stride: tuple[int, int], kind: str,
                            drop: bool) -> None:
    """Added by a BatchNorm's sums: against float64, and to the bit as it is with its zeros."""
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


@pytest.mark.parametrize("height, width, channels", [(1, 1, 8), (2, 5, 24), (15, 33, 64), (17, 8, 72), (36, 6, 128)])
def test_batch_norm_relu_max_pool(device: Device, dtype: str, height: int, width: int, channels: int) -> None:
    """Strips that are whole and others, odd and even sizes, scales of both signs, values that are equal."""
    images, blocks = 3, 2
    out = images, (height + 1) // 2, (width + 1) // 2, channels
    case = BatchNormCase(device, images * height * width, channels, dtype, seed=height)
    x = np.round(case.x * 4) / 4
    case.x, case.gamma = x, case.gamma * np.where(np.arange(channels) % 3, 1, -1)
    mean, invstd = x.mean(0), 1 / np.sqrt(x.var(0) + EPS)
    y, x_winner = (device.poisoned(out, dtype) for _ in range(2))
    winner, saved = device.poisoned(out, "uint8"), device.poisoned((2, channels))
    running_mean, running_var = (device.put(np.ones(channels)) for _ in range(2))
    device.run("batch_norm_relu_max_pool.cu", case.kernel("batch_norm_relu_max_pool"), (case.tiles, blocks, 1),
               APPLY_BLOCK, device.put(x, dtype), *case.sums(about_mean=True), device.put(case.gamma),
               device.put(case.beta), y, winner, x_winner, saved, running_mean, running_var, ctypes.c_float(EPS),
               ctypes.c_float(MOMENTUM),
               Image(height, width, *out[1:3]), ctypes.c_uint32(case.rows),
               ctypes.c_uint32(images * -(-out[1] // STRIP) * out[2]), ctypes.c_int(channels))
    sign = np.sign(case.gamma)
    largest, place = pool_reference(x.reshape(images, height, width, channels) * sign,
                                    Window(height, width, *out[1:3], 3, 3, 2, 2, 1, 1))
    value = largest * sign
    wanted = (value - mean) * invstd * case.gamma + case.beta
    clear = np.abs(wanted) > 1e-3  # near zero either answer is right
    assert np.array_equal(device.get(x_winner, out, dtype)[clear], value[clear])
    assert np.array_equal(device.get(winner, out, "uint8")[clear], np.where(wanted > 0, place, 255)[clear])
    if case.rows > 4:
        assert relative_error(device.get(y, out, dtype), np.maximum(wanted, 0)) < PRECISION[dtype] + 2e-5
        assert relative_error(device.get(saved, (2, channels)), np.stack([mean, invstd])) < 1e-4
        assert relative_error(device.get(running_mean, (channels,)), MOMENTUM + (1 - MOMENTUM) * mean) < 1e-5


@pytest.mark.parametrize("stem_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("height, width", [(14, 38), (33, 64)])
def test_stem(device: Device, stem_dtype: str, height: int, width: int) -> None:
    """The first convolution, its sums, and the gradient of its weights through BatchNorm, ReLU and pooling."""
    n, filters, random = 3, 64, np.random.default_rng(height)
    image = (height + 1) // 2, (width + 1) // 2
    pooled = (image[0] + 1) // 2, (image[1] + 1) // 2
    sizes, pool = Image(height, width, *image), Image(*image, *pooled)
    items, tiles, image_bytes, gradient_bytes = stem_work((n, *image, filters))
    blocks, rows = 3, n * image[0] * image[1]
    data = rounded(random.normal(0, 1, (n, height, width, 4)), stem_dtype)
    w = rounded(random.normal(0, 0.1, (filters, 7, 7, 4)), stem_dtype)
    padded = np.pad(data, ((0, 0), (3, 3), (3, 3), (0, 0)))
    # (N, rows, columns, 7, 7, 4): what each output pixel is made of
    windows = np.lib.stride_tricks.sliding_window_view(padded, (7, 7), (1, 2))[:, ::2, ::2].transpose(0, 1, 2, 4, 5, 3)
    wanted = np.einsum("nyxrsc,frsc->nyxf", windows, w, optimize=True)
    y, sums, tickets = device.poisoned(wanted.shape, stem_dtype), device.poisoned((3, filters)), device.zeros(4)
    partials = device.poisoned((blocks, filters, 7, 32))
    counts = ctypes.c_uint32(items), ctypes.c_int(tiles)
    data_address = device.put(data, stem_dtype)
    for _ in range(2):  # twice: the tickets must be back at zero
        device.run("stem.cu", f"stem_fprop<{C_TYPES[stem_dtype]}>", (blocks, 1, 1), STEM_BLOCK, data_address,
                   device.put(w, stem_dtype), y, sums, partials, tickets, sizes, *counts, shared_bytes=2 * image_bytes)
    got = device.get(y, wanted.shape, stem_dtype)
    assert relative_error(got, wanted) < PRECISION[stem_dtype]
    mean, var = statistics_of(device.get(sums, (3, filters)), got)
    assert relative_error(mean, got.mean((0, 1, 2))) < 1e-5 and relative_error(var, got.var((0, 1, 2))) < 1e-5

    saved = np.stack([got.mean((0, 1, 2)), 1 / np.sqrt(got.var((0, 1, 2)) + EPS)])
    gamma, dgamma, dbeta = (random.normal(0, 1, filters).astype(np.float32) for _ in range(3))
    dz = rounded(random.normal(0, 1, (n, *pooled, filters)), stem_dtype)
    winner = random.integers(0, 9, dz.shape).astype(np.uint8)
    winner[random.random(dz.shape) < 0.1] = 255  # nobody: ReLU lets nothing through
    dy = np.zeros((n, image[0] + 2, image[1] + 2, filters))  # with the padding that no winner lies in
    for at in np.ndindex(*dz.shape):
        place = int(winner[at])
        row, column = 2 * at[1] + place // 3, 2 * at[2] + place % 3
        if place < 9 and 0 < row <= image[0] and 0 < column <= image[1]:
            dy[at[0], row, column, at[3]] += dz[at]
    normal = (got - saved[0]) * saved[1]
    dy = gamma * saved[1] * (dy[:, 1:-1, 1:-1] - dbeta / rows - normal * dgamma / rows)
    dw = device.poisoned(w.shape, stem_dtype)
    device.run("stem.cu", f"stem_wgrad<{C_TYPES[stem_dtype]}>", (blocks, 1, 1), STEM_BLOCK, data_address, y,
               device.put(dz, stem_dtype), device.put(winner, "uint8"), device.put(saved), device.put(gamma),
               device.put(dgamma), device.put(dbeta), partials, sizes, pool, ctypes.c_uint32(rows), *counts,
               shared_bytes=image_bytes + gradient_bytes)
    device.run("stem.cu", f"stem_wgrad_sum<{C_TYPES[stem_dtype]}>", (filters * 7, 1, 1), (32, 8, 1), partials, dw,
               ctypes.c_int(blocks))
    wanted = np.einsum("nyxrsc,nyxf->frsc", windows, dy, optimize=True)
    # dy is rounded once before it is multiplied, and the result once.
    assert relative_error(device.get(dw, w.shape, stem_dtype), wanted) < 2 * PRECISION[stem_dtype]


def pool_reference(x: np.ndarray, window: Window) -> tuple[np.ndarray, np.ndarray]:
    """Maximum over each window and the place of the first maximum in it."""
    n, height, width, channels = x.shape
    y = np.full((n, window.out_height, window.out_width, channels), -np.inf)
    winner = np.zeros(y.shape, np.uint8)
    for i in range(window.kernel_h):
        for j in range(window.kernel_w):
            for row in range(window.out_height):
                for column in range(window.out_width):
                    h, w = row * window.stride_h - window.pad_h + i, column * window.stride_w - window.pad_w + j
                    if 0 <= h < height and 0 <= w < width:
                        better = x[:, h, w] > y[:, row, column]
                        y[:, row, column][better] = x[:, h, w][better]
                        winner[:, row, column][better] = i * window.kernel_w + j
    return y, winner


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("size, kernel, stride, pad", [((11, 9), 3, 2, 1), ((8, 8), 2, 2, 0), ((7, 5), 3, 1, 1)])
def test_max_pool(device: Device, dtype: str, size: tuple[int, int], kernel: int, stride: int, pad: int,
                  two: bool) -> None:
    n, channels = 3, 24
    random = np.random.default_rng(kernel)
    x = rounded(random.integers(-4, 4, (n, *size, channels)).astype(np.float64), dtype)  # many ties
    out = tuple((s + 2 * pad - kernel) // stride + 1 for s in size)
    window = Window(*size, *out, kernel, kernel, stride, stride, pad, pad)
    wanted, wanted_winner = pool_reference(x, window)
    shape = (n, *out, channels)
    y, winner = device.poisoned(shape, dtype), device.poisoned(shape, "uint8")
    vectors, pitch = n * out[0] * out[1] * channels // 8, ctypes.c_int(channels // 8)
    device.run("pooling.cu", f"max_pool<{C_TYPES[dtype]}>", (-(-vectors // 256), 1, 1), (256, 1, 1),
               device.put(x, dtype), y, winner, window, ctypes.c_uint32(vectors), pitch)
    assert np.array_equal(device.get(y, shape, dtype), wanted)
    assert np.array_equal(device.get(winner, shape, "uint8"), wanted_winner)

    dy, dy2 = (rounded(random.normal(0, 1, shape), dtype) for _ in range(2))
    dx = device.poisoned(x.shape, dtype)
    vectors = x.size // 8
    device.run("pooling.cu", f"max_pool_backward<{C_TYPES[dtype]}, {str(two).lower()}>", (-(-vectors // 256), 1, 1),
               (256, 1, 1), device.put(dy, dtype), device.put(dy2, dtype), winner, dx, window, ctypes.c_uint32(vectors),
               pitch)
    wanted_dx = np.zeros(x.shape)
    total = dy + dy2 if two else dy
    for image, row, column, channel in np.ndindex(shape):
        place = int(wanted_winner[image, row, column, channel])
        h, w = row * stride - pad + place // kernel, column * stride - pad + place % kernel
        wanted_dx[image, h, w, channel] += total[image, row, column, channel]
    assert relative_error(device.get(dx, x.shape, dtype), wanted_dx) < PRECISION[dtype]


@pytest.mark.parametrize("size", [(8, 8), (7, 5)])
@pytest.mark.parametrize("kernel, stride, pad, convention", [(2, 2, 0, "full"), (3, 2, 1, "valid"), (3, 1, 1, "full")])
@pytest.mark.parametrize("padding", [False, True])
def test_average_pool(device: Device, dtype: str, size: tuple[int, int], kernel: int, stride: int, pad: int,
                      convention: str, padding: bool) -> None:
    """Windows that end beyond the image too, whose pixels there do not count."""
    node = Node("Pooling", "pool", (), {"kernel": (kernel,) * 2, "stride": (stride,) * 2, "pad": (pad,) * 2,
                                        "pool_type": "avg", "layout": "NHWC", "pooling_convention": convention,
                                        "count_include_pad": padding})
    random = np.random.default_rng(size[0] + kernel)
    x = rounded(random.normal(0, 1, (3, *size, 24)), dtype)
    wanted = pooling.avg_pooling(node, x)
    dy = rounded(random.normal(0, 1, wanted.shape), dtype)
    window = Window(*size, *wanted.shape[1:3], kernel, kernel, stride, stride, pad, pad)
    flag = f"<{C_TYPES[dtype]}, {str(padding).lower()}>"
    for name, source, shape, result in (
            ("average_pool", x, wanted.shape, wanted),
            ("average_pool_backward", dy, x.shape, pooling.avg_pooling_backward(node, dy, x.shape))):
        target, vectors = device.poisoned(shape, dtype), int(np.prod(shape)) // 8
        device.run("pooling.cu", name + flag, (-(-vectors // 256), 1, 1), (256, 1, 1), device.put(source, dtype),
                   target, window, ctypes.c_uint32(vectors), ctypes.c_int(3))
        assert relative_error(device.get(target, shape, dtype), result) < PRECISION[dtype] + 1e-6


@pytest.mark.parametrize("pixels", [1, 3, 20, 49])
def test_global_average_pool(device: Device, dtype: str, pixels: int) -> None:
    n, channels = 5, 40
    random = np.random.default_rng(0)
    x = rounded(random.normal(0, 1, (n, pixels, channels)), dtype)
    dy = rounded(random.normal(0, 1, (n, channels)), dtype)
    y, dx = device.poisoned((n, channels), dtype), device.poisoned(x.shape, dtype)
    size, c_type = (ctypes.c_int(pixels), ctypes.c_int(channels // 8)), C_TYPES[dtype]
    device.run("pooling.cu", f"global_average_pool<{c_type}>", (1, 1, 1), (256, 1, 1), device.put(x, dtype), y,
               ctypes.c_uint32(n * channels // 8), *size)
    assert relative_error(device.get(y, (n, channels), dtype), x.mean(1)) < PRECISION[dtype]
    device.run("pooling.cu", f"global_average_pool_backward<{c_type}>", (5, 1, 1), (256, 1, 1), device.put(dy, dtype),
               dx, ctypes.c_uint32(x.size // 8), *size)
    wanted = np.broadcast_to(dy[:, None] / pixels, x.shape)
    assert relative_error(device.get(dx, x.shape, dtype), wanted) < PRECISION[dtype]


def ranked_labels(labels: np.ndarray, own_share: float) -> np.ndarray:
    """Those that hits are counted for, as `Draws` says."""
    if own_share == 0.5:
        return np.minimum(labels, labels[::-1])
    return labels if own_share > 0.5 else labels[::-1]


@pytest.mark.parametrize("kernel", ["softmax", "weighted softmax", "sigmoid", "sigmoid above 0.3"])
@pytest.mark.parametrize("rows, classes, smoothing", [(33, 10, 0.0), (5, 1000, 0.1), (3, 2, 0.2)])
@pytest.mark.parametrize("own_share", [1.0, 0.625, 0.5, 0.25, 0.0])
def test_cross_entropy(device: Device, dtype: str, kernel: str, rows: int, classes: int, smoothing: float,
                       own_share: float) -> None:
    random = np.random.default_rng(classes)
    pitch, loss_scale, gradient_scale, valid = -(-classes // 8) * 8, 64.0, 1 / rows, rows - 1
    scores = rounded(random.normal(0, 3, (rows, pitch)), dtype)
    scores[0, :2] = 100, -100
    bias = rounded(random.normal(0, 1, classes), "float32")
    labels = random.integers(0, classes, rows)
    weights = rounded(random.uniform(0.2, 5, classes), "float32") if kernel == "weighted softmax" else None
    threshold = 0.3 if kernel.endswith("0.3") else 0.0
    is_softmax = kernel.endswith("softmax")
    probabilities, gradient = device.poisoned((rows, classes)), device.poisoned((rows, pitch), dtype)
    row_loss, row_rank = device.poisoned((rows,)), device.poisoned((rows,), "int32")
    metrics, dbias = device.zeros(32), device.poisoned((classes,))
    c_type = C_TYPES[dtype]
    device.run("softmax.cu" if is_softmax else "sigmoid.cu",
               f"softmax_cross_entropy<{c_type}, {'false' if weights is None else 'true'}>" if is_softmax
               else f"sigmoid_cross_entropy<{c_type}>", (rows, 1, 1), (256, 1, 1),
               device.put(scores, dtype), device.put(bias), device.put(labels), device.put(np.array([own_share])),
               probabilities, gradient, row_loss, row_rank, device.put(np.array([loss_scale])),
               ctypes.c_float(gradient_scale / (1 if is_softmax else classes)), ctypes.c_float(smoothing),
               ctypes.c_int(classes), ctypes.c_int(pitch),
               (0 if weights is None else device.put(weights)) if is_softmax else ctypes.c_float(threshold),
               shared_bytes=4 * classes if is_softmax else 0)
    device.run("softmax.cu", "add_metrics", (1, 1, 1), (256, 1, 1), row_loss, row_rank,
               device.put(np.array([valid]), "int32"), metrics)
    device.run("softmax.cu", f"bias_gradient<{c_type}>", (-(-classes // 32), 1, 1), (32, 32, 1), gradient,
               dbias, ctypes.c_int(rows), ctypes.c_int(classes), ctypes.c_int(pitch))

    z = scores[:, :classes] + bias
    target = np.full((rows, classes), smoothing / (classes - 1))
    target[np.arange(rows), labels] = 1 - smoothing
    target = own_share * target + (1 - own_share) * target[::-1]
    if is_softmax:
        target *= 1.0 if weights is None else weights
        log_p = z - z.max(1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
        p, loss = np.exp(log_p), -(target * log_p).sum(1)
        slope = p * target.sum(1, keepdims=True) - target
    else:
        target = target > threshold if threshold else target
        p = 1 / (1 + np.exp(-z))
        loss = (np.logaddexp(0, z) - z * target).mean(1)
        slope = (p - target) / classes
    wanted = np.zeros((rows, pitch))
    wanted[:, :classes] = slope * gradient_scale * loss_scale
    assert relative_error(device.get(probabilities, (rows, classes)), p) < 1e-5
    assert relative_error(device.get(row_loss, (rows,)), loss) < 1e-5
    got = device.get(gradient, (rows, pitch), dtype)
    assert relative_error(got, wanted) < PRECISION[dtype] + 1e-5
    assert relative_error(device.get(dbias, (classes,)), got[:, :classes].sum(0)) < 1e-5
    rank = (z > z[np.arange(rows), ranked_labels(labels, own_share)][:, None]).sum(1)[:valid]
    sums = MetricsLayout.from_buffer_copy(device.get(metrics, (32,), "uint8").tobytes())
    assert (sums.top1, sums.top5, sums.count) == ((rank < 1).sum(), (rank < 5).sum(), valid)
    assert abs(sums.loss_sum - loss[:valid].sum()) < 1e-4 * loss[:valid].sum()


@pytest.mark.parametrize("kernel", ["softmax", "sigmoid"])
def test_a_label_outside_the_classes_gives_nan(device: Device, kernel: str) -> None:
    flags, last = (", false", 0) if kernel == "softmax" else ("", ctypes.c_float(0))
    metrics, row_loss, row_rank = device.zeros(32), device.poisoned((1,)), device.poisoned((1,), "int32")
    device.run(f"{kernel}.cu", f"{kernel}_cross_entropy<float{flags}>", (1, 1, 1), (256, 1, 1),
               device.put(np.zeros((1, 16))), 0, device.put(np.array([10.0])), 0, 0, 0, row_loss, row_rank, 0,
               ctypes.c_float(1), ctypes.c_float(0), ctypes.c_int(10), ctypes.c_int(16), last, shared_bytes=40)
    device.run("softmax.cu", "add_metrics", (1, 1, 1), (256, 1, 1), row_loss, row_rank,
               device.put(np.array([1]), "int32"), metrics)
    sums = MetricsLayout.from_buffer_copy(device.get(metrics, (32,), "uint8").tobytes())
    assert np.isnan(sums.loss_sum) and sums.top5 == 0


@pytest.mark.parametrize("images", [2, 5])
def test_mix_images(device: Device, dtype: str, images: int) -> None:
    x, mixup = rounded(np.random.default_rng(images).normal(0, 1, (images, 37, 29, 4)), dtype), 0.7
    mixed, size = device.put(x, dtype), x[0].size
    blocks = -(-size // 1024) * -(-images // 2)
    device.run("elementwise.cu", f"mix_images<{C_TYPES[dtype]}>", (blocks, 1, 1), (256, 1, 1), mixed,
               ctypes.c_int64(size), ctypes.c_int(images), ctypes.c_float(mixup))
    got = device.get(mixed, x.shape, dtype)
    assert relative_error(got, mixup * x + (1 - mixup) * x[::-1]) < PRECISION[dtype]


@pytest.mark.parametrize("images, channels", [(2, 4), (5, 4), (4, 3)])
def test_exchange_boxes(device: Device, dtype: str, images: int, channels: int) -> None:
    x = rounded(np.random.default_rng(images).normal(0, 1, (images, 37, 29, channels)), dtype)
    for top, left, bottom, right in ((0, 0, 37, 29), (3, 1, 36, 29), (36, 28, 37, 29)):
        mixed = device.put(x, dtype)
        blocks = -(-(bottom - top) * (right - left) // 256) * -(-images // 2)
        device.run("elementwise.cu", f"exchange_boxes<{C_TYPES[dtype]}, {channels}>", (blocks, 1, 1), (256, 1, 1),
                   mixed, *map(ctypes.c_int, (images, 37, 29, top, left, bottom, right)))
        wanted = x.copy()
        wanted[:, top:bottom, left:right] = x[::-1, top:bottom, left:right]
        assert np.array_equal(device.get(mixed, x.shape, dtype), wanted)


def test_elementwise(device: Device, dtype: str) -> None:
    random = np.random.default_rng(0)
    x, y = (rounded(random.normal(0, 1, (37, 8)), dtype) for _ in range(2))
    total = device.poisoned(x.shape, dtype)
    device.run("elementwise.cu", f"add<{C_TYPES[dtype]}>", (1, 1, 1), (256, 1, 1), device.put(x, dtype),
               device.put(y, dtype), total, ctypes.c_uint32(37))
    assert relative_error(device.get(total, x.shape, dtype), x + y) < PRECISION[dtype]
    image = random.normal(0, 1, (301, 3)).astype(np.float32)
    converted = device.poisoned((301, 4), dtype)
    device.run("elementwise.cu", f"convert_input<float, {C_TYPES[dtype]}>", (2, 1, 1), (256, 1, 1),
               device.put(image), converted, ctypes.c_int64(301), ctypes.c_int(3), ctypes.c_int(4))
    got = device.get(converted, (301, 4), dtype)
    assert np.array_equal(got[:, :3], rounded(image, dtype)) and not got[:, 3].any()
    wide = device.poisoned(x.shape)
    device.run("elementwise.cu", f"widen<{C_TYPES[dtype]}>", (1, 1, 1), (256, 1, 1), device.put(x, dtype), wide,
               ctypes.c_uint32(37))
    assert np.array_equal(device.get(wide, x.shape), x)
