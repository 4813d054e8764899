"""3x3 convolutions of 64 channels with their epilogue, also after a fused BatchNorm + ReLU, and the gradient of their
data, alone and with the sums of a BatchNorm. Against float64 NumPy: rows that do not fill a tile, tiles that do not
fill a block, images from one pixel on, poisoned outputs."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded
from test_batch_norm import BatchNormCase
from test_norm_conv1x1 import EPS, MOMENTUM, Norm

from graph_passes import Node
from graph_passes.executors.cuda.builder import APPLY_BLOCK
from graph_passes.executors.cuda.kernel_library import instance
from graph_passes.executors.cuda.kernels.conv3x3 import Conv3x3
from graph_passes.executors.reference import evaluate

# Bound for the norm of the error relative to the norm: rounding of stored values, and fp32 sums in another order.
STORED = {dtype: PRECISION[dtype] + 2e-5 for dtype in ("float16", "bfloat16")}
SUMMED = 1e-5  # bound for fp32 sums, relative to the sum of their terms' absolute values
# Bound for fp32 sums about a value near the mean: of the variance (relative), and of the mean (in standard deviations).
NEAR = 1e-5

# N, H, W: sizes of ResNet at 224 pixels; heights that are no multiple of a tile's; and images so wide that only two
# tiles fit into shared memory.
SHAPES = [(1, 56, 56), (3, 56, 56), (5, 13, 56), (2, 7, 9), (3, 12, 40), (5, 1, 1), (2, 1, 56), (1, 100, 1), (3, 5, 2),
          (7, 28, 28), (2, 57, 80), (1, 9, 81), (2, 6, 180)]
BLOCKS = [1, 3, 132]
FEW = 1000  # pixels
# With the sums of a BatchNorm, shared memory has no room for wider rows.
REDUCED = [shape for shape in SHAPES if shape[2] <= 64] + [(2, 7, 64)]


class Case:
    """Random operands, and the kernels' results on a GPU."""

    def __init__(self, device: Device, dtype: str, shape: tuple[int, int, int], kind: str, mean: float = 0.0) -> None:
        """`kind`: "Statistics", "Relu", "Dgrad" or "DgradReduce". `mean`: mean of the output, in deviations, or of
        the BatchNorm's input."""
        self.device, self.dtype, self.kind, self.shape = device, dtype, kind, (*shape, 64)
        random = np.random.default_rng(sum(shape))
        self.x = rounded(random.normal(0, 1, self.shape), dtype)
        self.w = rounded(random.normal(0, 576**-0.5, (64, 3, 3, 64)), dtype)
        if kind == "DgradReduce":
            self.norm = BatchNormCase(device, int(np.prod(shape)), 64, dtype, sum(shape), mean)
        elif mean:  # the first channel is 1, and the middle tap is never in the padding
            self.x[..., 0], self.w[..., 0] = 1, 0
            self.w[:, 1, 1, 0] = rounded(mean * random.choice([-1, 1], 64), dtype)
        self.bias = random.normal(0, 1, 64).astype(np.float32)

    @property
    def way(self) -> Conv3x3:
        return Conv3x3(self.shape, self.kind == "DgradReduce")

    def run(self, blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """y and its sums, from the second of two launches, so that wrong tickets are noticed. The sums of a BatchNorm
        are dgamma and dbeta."""
        device, dtype, way, size = self.device, self.dtype, self.way, self.shape
        grid = way.grid(blocks)
        y, sums = device.poisoned(size, dtype), device.poisoned((3, 64))
        partials, tickets = device.poisoned((3 * 64 * grid[1],)), device.zeros(4)
        operands: list[Any] = [device.gpu.tensor_map(device.put(self.x, dtype), dtype, way.padded_rows),
                               device.gpu.tensor_map(device.put(self.w, dtype), dtype, way.WEIGHTS),
                               device.gpu.tensor_map(y, dtype, way.image_rows)]
        if self.kind == "Dgrad":
            kernel = instance("conv3x3_dgrad", dtype)
        elif self.kind == "DgradReduce":
            kernel, norm = instance("conv3x3_dgrad_reduce", dtype), self.norm
            operands.insert(2, device.gpu.tensor_map(device.put(norm.x, dtype), dtype, way.image_rows))
            operands += [norm.saved(), device.put(norm.gamma), device.put(norm.beta), sums, sums + 4 * 64, partials,
                         tickets]
        else:
            kernel = instance("conv3x3_forward", dtype, self.kind == "Statistics", self.kind == "Relu")
            operands += [device.put(self.bias), sums, partials, tickets]
        for _ in range(2):
            device.run("conv3x3.cu", kernel, grid, way.BLOCK, *operands, way.images, shared_bytes=way.shared_bytes)
        results = device.get(y, size, dtype), device.get(sums, (3, 64))
        device.gpu.free_all()
        return results

    @property
    def wanted(self) -> np.ndarray:
        attrs = {"kernel": (3, 3), "pad": (1, 1), "num_filter": 64, "layout": "NHWC"}
        if self.kind == "Dgrad":
            attrs["data_shape"] = self.shape
        inputs = [self.x, self.w, *([self.bias.astype(np.float64)] if self.kind == "Relu" else [])]
        return evaluate(Node(f"Convolution{self.kind}", "conv", (), attrs), inputs)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["Statistics", "Relu", "Dgrad"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_of_every_shape(device: Device, dtype: str, kind: str, shape: tuple[int, int, int]) -> None:
    case = Case(device, dtype, shape, kind)
    wanted = case.wanted
    for blocks in BLOCKS:
        y, _ = case.run(blocks)
        assert relative_error(y, wanted) < STORED[dtype], f"{blocks} blocks"
        assert np.abs(y - wanted).max() < 8 * PRECISION[dtype] * np.abs(wanted).max()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype, mean", [("float16", 0.0), ("bfloat16", 0.0), ("float16", 100.0), ("float16", 1000.0)])
def test_sums_of_the_output(device: Device, dtype: str, mean: float, shape: tuple[int, int, int]) -> None:
    """The sums are of the stored values, about the mean; the bits are equal every time."""
    case = Case(device, dtype, shape, "Statistics", mean)
    for blocks in BLOCKS:
        y, sums = case.run(blocks)
        stored = y.reshape(-1, 64)
        assert np.all(sums[0] == 0)
        assert np.all(np.abs(sums[2] - stored.mean(0)) <= NEAR * stored.std(0) + 2.0**-22 * np.abs(stored.mean(0)))
        # With few pixels the blocks' means, which are rounded to 2^-24, differ as much as the pixels do.
        between = 2.0**-22 * np.abs(stored.mean(0)) * stored.std(0) if len(stored) < FEW else 0.0
        assert np.all(np.abs(sums[1] / len(stored) - stored.var(0)) <= NEAR * stored.var(0) + between + 1e-12)
        again = case.run(blocks)
        assert np.array_equal(again[0], y) and np.array_equal(again[1], sums)


class NormCase:
    """A BatchNorm + ReLU and the convolution that follows, in one launch or in two."""

    def __init__(self, device: Device, dtype: str, shape: tuple[int, int, int], about_mean: bool, mean: float) -> None:
        self.device, self.dtype, self.shape, self.way = device, dtype, (*shape, 64), Conv3x3((*shape, 64))
        random = np.random.default_rng(sum(shape))
        self.norm = Norm(int(np.prod(shape)), 64, dtype, about_mean, mean, random)
        self.w = rounded(random.normal(0, 576**-0.5, (64, 3, 3, 64)), dtype)

    def run(self, blocks: int, fused: bool) -> dict[str, np.ndarray]:
        device, dtype, way, norm, grid = self.device, self.dtype, self.way, self.norm, self.way.grid(blocks)
        shapes = {"y": self.shape, "z": self.shape, "saved": (2, 64), "running_mean": (64,), "running_var": (64,),
                  "sums": (3, 64)}
        dtypes = {"y": dtype, "z": dtype}
        at = {name: device.put(getattr(norm, name)) if name.startswith("running") else
              device.poisoned(shape, dtypes.get(name, "float32")) for name, shape in shapes.items()}
        x, w = device.put(norm.x, dtype), device.put(self.w, dtype)
        padded = {name: device.gpu.tensor_map(address, dtype, way.padded_rows)
                  for name, address in (("x", x), ("y", at["y"]))}
        y, z = (device.gpu.tensor_map(at[name], dtype, way.image_rows) for name in "yz")
        weights = device.gpu.tensor_map(w, dtype, way.WEIGHTS)
        given = device.put(norm.sums), ctypes.c_bool(norm.about_mean), device.put(norm.gamma), device.put(norm.beta)
        kept = at["saved"], at["running_mean"], at["running_var"], ctypes.c_float(EPS), ctypes.c_float(MOMENTUM)
        rest = at["sums"], device.poisoned((3 * 64 * grid[1],)), device.zeros(4), way.images
        if fused:
            device.run("conv3x3.cu", instance("norm_conv3x3", dtype), grid, way.BLOCK, padded["x"], weights, y, z,
                       *given, *kept, *rest, shared_bytes=way.shared_bytes)
        else:
            device.run("batch_norm.cu", instance("batch_norm_apply", dtype, False, True, False), (1, 3, 1), APPLY_BLOCK,
                       x, 0, *given, at["y"], 0, *kept, ctypes.c_uint32(len(norm.x)), ctypes.c_int(64), 0,
                       ctypes.c_uint32(0), ctypes.c_uint32(1))
            device.run("conv3x3.cu", instance("conv3x3_forward", dtype, True, False), grid, way.BLOCK, padded["y"],
                       weights, z, 0, *rest, shared_bytes=way.shared_bytes)
        results = {name: device.get(at[name], shape, dtypes.get(name, "float32")) for name, shape in shapes.items()}
        device.gpu.free_all()
        return results


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype, about_mean, mean", [("float16", True, 0.0), ("bfloat16", False, 0.0),
                                                     ("float16", True, 100.0)])
def test_after_a_batch_norm(device: Device, dtype: str, about_mean: bool, mean: float, shape: tuple[int, int, int]
                            ) -> None:
    """One launch gives the bits of two, every time. The normalised tensor is also checked against float64."""
    case = NormCase(device, dtype, shape, about_mean, mean)
    for blocks in BLOCKS:
        wanted = case.run(blocks, fused=False)
        if len(case.norm.x) > 1:  # with one pixel the variance is 0
            assert relative_error(wanted["y"].reshape(-1, 64), np.maximum(case.norm.y, 0)) < STORED[dtype]
        for got in (case.run(blocks, fused=True) for _ in range(2)):
            for name, values in wanted.items():
                assert np.array_equal(got[name], values), f"{name}, {blocks} blocks"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REDUCED)
@pytest.mark.parametrize("dtype, mean", [("float16", 0.0), ("bfloat16", 0.0), ("float16", 100.0), ("float16", 1000.0)])
def test_gradient_with_the_sums_of_a_batch_norm(device: Device, dtype: str, mean: float,
                                                shape: tuple[int, int, int]) -> None:
    """The gradient has the bits of the unfused kernel where ReLU lets it through. The sums are of the stored values.
    The bits are equal every time."""
    case, alone = Case(device, dtype, shape, "DgradReduce", mean), Case(device, dtype, shape, "Dgrad")
    wanted, norm = alone.wanted, case.norm
    saved = np.stack([norm.mean, norm.invstd]).astype(np.float32).astype(np.float64)
    normal = (norm.x - saved[0]) * saved[1]
    before_relu = (normal * norm.gamma + norm.beta).reshape(case.shape)
    clear = np.abs(before_relu) > 1e-3  # near zero either sign is right
    for blocks in BLOCKS:
        dz, sums = case.run(blocks)
        error = relative_error(dz[clear], np.where(before_relu > 0, wanted, 0)[clear])
        assert error < STORED[dtype], f"{blocks} blocks"
        assert np.array_equal(dz[clear], np.where(before_relu > 0, alone.run(blocks)[0], 0)[clear])
        stored = dz.reshape(-1, 64)
        for got, terms in zip(sums, (stored * normal, stored), strict=False):
            assert np.all(np.abs(got - terms.sum(0)) <= SUMMED * np.abs(terms).sum(0))
        again = case.run(blocks)
        assert np.array_equal(again[0], dz) and np.array_equal(again[1][:2], sums[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Statistics", "Relu", "Dgrad", "DgradReduce"])
def test_not_a_number_stays_in_its_neighbourhood(device: Device, kind: str) -> None:
    """A NaN reaches only outputs whose window contains it, also at an image's border, where the next image begins."""
    case = Case(device, "float16", (3, 10, 56), kind)
    touched = np.zeros(case.shape, bool)
    for image, row, column in ((0, 9, 55), (1, 4, 20), (2, 0, 0)):
        case.x[image, row, column, 7] = np.nan
        touched[image, max(row - 1, 0):row + 2, max(column - 1, 0):column + 2] = True
    y, _ = case.run(3)
    if kind == "DgradReduce":
        touched &= (case.norm.normal * case.norm.gamma + case.norm.beta > 0).reshape(case.shape)
    assert np.array_equal(np.isnan(y), touched)


@pytest.mark.parametrize("shape, reduces", [*((shape, False) for shape in [*SHAPES, (256, 56, 56), (64, 72, 72)]),
                                            *((shape, True) for shape in [*REDUCED, (256, 56, 56)])])
def test_division_into_tiles(shape: tuple[int, int, int], reduces: bool) -> None:
    """Every pixel of a tile is in its product, everything that the product reads is in the tile's slot, and all slots
    fit."""
    way = Conv3x3((*shape, 64), reduces)
    assert way.fits and way.rows * way.pitch - 2 <= way.PIXELS
    read = 2 * way.pitch + 2 + way.PIXELS  # from the tile's first pixel on
    assert 128 * max(read, (way.rows + 2) * way.pitch) <= way.place_bytes and way.place_bytes % 1024 == 0
    assert way.shared_bytes <= 227 << 10


def test_what_does_not_fit() -> None:
    assert not Conv3x3((1, 9, 181, 64)).fits and not Conv3x3((1, 9, 300, 64)).fits
    assert [Conv3x3((1, 9, width, 64)).places for width in (56, 80, 81, 180)] == [3, 3, 2, 2]
    assert Conv3x3((256, 56, 56, 64), True).shared_bytes == (4 + 72 + 2 * 44 + 2 * 29) << 10
    assert Conv3x3((1, 9, 64, 64), True).fits and not Conv3x3((1, 9, 65, 64), True).fits
    assert Conv3x3((256, 56, 56, 64)).grid(132) == (1, 132, 1) and Conv3x3((2, 9, 56, 64)).grid(132) == (1, 6, 1)
