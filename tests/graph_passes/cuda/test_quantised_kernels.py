"""INT8 on a GPU gives the bits of the reference executor: every operator, every kernel, whole networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_arrays import Device
from int8_networks import DIRECT, SQUARES, STREAMS, SUMS, TAPS, TILES, quantised

from common.mxnet_compat import mx
from graph_passes import Graph, Node, Ref
from graph_passes.candidates import Candidate
from graph_passes.errors import GraphError
from graph_passes.executors import reference
from graph_passes.executors.cuda import compiled
from graph_passes.executors.cuda.builder import Builder
from graph_passes.executors.cuda.executor import CudaExecutor
from graph_passes.executors.cuda.kernel_library import HOPPER
from graph_passes.executors.cuda.kernels.quantised import CHUNK
from graph_passes.executors.cuda.kernels.quantised_conv import TILE_CHANNELS
from graph_passes.executors.cuda.kernels.quantised_conv_squares import COLUMNS as SQUARES_COLUMNS
from graph_passes.executors.cuda.kernels.quantised_conv_stream import Stream
from graph_passes.executors.cuda.kernels.quantised_conv_taps import QuantisedConvTaps
from graph_passes.executors.cuda.lowering import lower_nodes
from graph_passes.executors.cuda.prices import Prices
from graph_passes.executors.cuda.program import Buffer, run
from graph_passes.executors.cuda.quantised import QuantisedNetwork
from graph_passes.passes import tensor_dtypes
from graph_passes.passes.quantise import Kept

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache, so that kernels are compiled once for all networks."""
    return tmp_path_factory.mktemp("cache")


def int8(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-127, 128, shape, np.int8)


def launched(device: Device, op: str, arrays: Sequence[np.ndarray], **attrs: Any) -> list[np.ndarray]:
    """The outputs of an operator's launches for these inputs."""
    names = [f"input{i}" for i in range(len(arrays))]
    node = Node(op, "y", tuple(map(Ref, names)), attrs)
    variables = [Node("null", name, (), {"dtype": array.dtype.name}) for name, array in zip(names, arrays, strict=True)]
    graph = Graph([*variables, node], node.refs())
    shapes = graph.infer_shapes({name: array.shape for name, array in zip(names, arrays, strict=True)})
    buffers = {Ref(name): Buffer(name, array.shape, array.dtype.name, device.put(array, array.dtype.name), True)
               for name, array in zip(names, arrays, strict=True)}
    tools: Any = SimpleNamespace(gpu=device.gpu, kernels=device.kernels, convolutions=None, recurrent=None, group=None)
    persistent: Any = SimpleNamespace(data=Buffer("data", (), "float16"))  # no input is a batch of images
    builder = Builder(shapes, tensor_dtypes(graph), buffers, "float16", persistent, tools)
    lower_nodes(builder, [node])
    made = {ref: builder.buffers[ref] for ref in node.refs()}
    for buffer in made.values():
        buffer.address = device.poisoned(buffer.shape, buffer.dtype)
    run(builder.program.launches)
    return [device.get(buffer.address, buffer.shape, buffer.dtype).reshape(shapes[ref]) for ref, buffer in made.items()]


def check(device: Device, label: str, arrays: Sequence[np.ndarray], **attrs: Any) -> None:
    """`label`: the operator, and its tile if it has one."""
    op, _, tile = label.partition(" ")
    attrs |= {"tile": tile} if tile else {}
    expected = reference.evaluate(Node(op, "y", (), attrs), arrays)
    for found, want in zip(launched(device, op, arrays, **attrs), expected, strict=True):
        want = want.astype(np.float16) if attrs.get("dtype") == "float16" else want
        assert found.astype(want.dtype).tobytes() == want.tobytes(), f"{(found != want).sum()} differ"


def factors(rng: np.random.Generator, filters: int, channels: int,
            multipliers: Sequence[float] = ()) -> list[np.ndarray]:
    """A multiplier and a bias for each filter. The multipliers bring most sums into int8, unless `multipliers` are
    given to draw from. `channels`: values of a filter, all taps included."""
    spread = 127**2 / 3 * np.sqrt(channels)  # scale of the sums
    multiplier = rng.choice(multipliers, filters) if multipliers else rng.uniform(0.5, 1.5, filters) * 60 / spread
    return [multiplier.astype(np.float32), rng.integers(-int(spread), int(spread), filters, np.int32)]


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {  # images, window
    "1x1": ((2, 9, 13, 64), {"kernel": (1, 1)}),
    "1x1, long": ((1, 7, 7, 1024), {"kernel": (1, 1)}),
    "1x1 at stride 2": ((2, 9, 13, 128), {"kernel": (1, 1), "stride": (2, 2)}),
    "1x1 at stride 2 of rows in pairs": ((2, 10, 13, 192), {"kernel": (1, 1), "stride": (2, 2)}),
    "3x3": ((2, 9, 13, 128), {"kernel": (3, 3), "pad": (1, 1)}),
    "3x3 at stride 2": ((3, 15, 14, 64), {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1)}),
    "3x3 at stride 2 of rows in pairs": ((3, 10, 14, 128), {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1)}),
    "3x3 over 256": ((1, 8, 9, 256), {"kernel": (3, 3), "pad": (1, 1)}),
    "3x3 over 64": ((3, 21, 37, 64), {"kernel": (3, 3), "pad": (1, 1)}),
    "3x3 over 384": ((5, 7, 7, 384), {"kernel": (3, 3), "pad": (1, 1)}),
    "3x2 with holes": ((2, 11, 12, 32), {"kernel": (3, 2), "stride": (1, 2), "pad": (2, 1), "dilate": (2, 3)}),
    "4x4 over 16": ((2, 20, 19, 16), {"kernel": (4, 4)}),
    "2x2 over 16": ((3, 115, 13, 16), {"kernel": (2, 2)}),
}


def check_epilogues(device: Device, shape: tuple[int, ...], window: dict[str, Any], label: str, filters: int,
                    rng: np.random.Generator, multipliers: Sequence[float] = ()) -> None:
    x, weight = int8(rng, *shape), int8(rng, filters, *window["kernel"], shape[3])
    multiplier, bias = factors(rng, filters, weight[0].size, multipliers)
    attrs = {**window, "num_filter": filters, "layout": "NHWC", "scale": 0.062 if multipliers else 0.047}
    addend = int8(rng, *reference.evaluate(Node("QuantisedConvolution", "y", (), attrs),
                                           [x, weight, multiplier, bias])[0].shape)
    for relu in (False, True):
        for dtype in ("int8", "float16")[:1 if label in (TAPS, *STREAMS) else 2]:
            check(device, label, [x, weight, multiplier, bias], relu=relu, dtype=dtype, **attrs)
        check(device, DIRECT if label == SQUARES else label, [x, weight, multiplier, bias, addend], relu=relu,
              dtype="int8", no_addend=False, addend_scale=0.031, **attrs)


@pytest.mark.parametrize("filters", [48, 64, 128, 272])
@pytest.mark.parametrize("label", [*TILES, *STREAMS, TAPS, SQUARES, DIRECT])
@pytest.mark.parametrize("shape, window", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolution(device: Device, shape: tuple[int, ...], window: dict[str, Any], label: str, filters: int,
                     rng: np.random.Generator) -> None:
    """With and without addend and ReLU, as int8 and as float16."""
    if (device.gpu.capability < (8, 0) and label != DIRECT) or (
            device.gpu.capability != HOPPER and label in (TAPS, SQUARES, *STREAMS)):
        pytest.skip("for tensor cores that this GPU has not")
    columns = (STREAMS | TILES).get(label, (0, 0))[1]
    if columns and filters <= columns // 2:
        pytest.skip("has less filters than that tile is for")
    if label in TILES and shape[3] % CHUNK and shape[3] not in TILE_CHANNELS:
        pytest.skip("for channels that fill tiles")
    if label in STREAMS and (window["kernel"] != (1, 1) or ("stride" in window and shape[1] % 2) or
                           Stream(shape[3], *STREAMS[label], True).stages < 2):
        pytest.skip("not for this window, or so many weights")
    (size, width), (stride, _) = window["kernel"], window.get("stride", (1, 1))
    if label == TAPS and (size != width or (size == 1) == ("pad" in window) or QuantisedConvTaps.of(
            shape, filters, size, stride, True, device.gpu.num_multiprocessors) is None):
        pytest.skip("for some 3x3 and 1x1, and channels that fill tiles, but not too many")
    if label == SQUARES and shape[3] != 16 and (
            window != {"kernel": (3, 3), "pad": (1, 1)} or filters <= SQUARES_COLUMNS.get(shape[3], 2 * filters) // 2):
        pytest.skip("for squares with 16 channels, and 3x3 over few")
    check_epilogues(device, shape, window, label, filters, rng)


@pytest.mark.parametrize("label", STREAMS)
@pytest.mark.parametrize("channels, filters, stride", [
    (64, 256, 1), (64, 272, 2), (128, 512, 1), (192, 400, 1), (256, 256, 2), (512, 304, 1), (16, 144, 1)])
def test_blocks_that_walk(device: Device, label: str, channels: int, filters: int, stride: int,
                          rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few multiprocessors give many tiles per block, as a large batch does."""
    if device.gpu.capability != HOPPER:
        pytest.skip("for Hopper")
    monkeypatch.setattr(device.gpu, "num_multiprocessors", 2)
    check_epilogues(device, (1, 46, 83, channels), {"kernel": (1, 1), "stride": (stride, stride)}, label, filters, rng)


@pytest.mark.parametrize("num_multiprocessors", [1, 5, 132])
@pytest.mark.parametrize("size, stride, shape, filters", [
    (3, 1, (1, 56, 56, 64), 64), (3, 1, (3, 57, 55, 64), 112), (3, 1, (9, 1, 1, 64), 64), (3, 1, (2, 5, 239, 64), 48),
    (3, 1, (3, 28, 28, 128), 128), (3, 1, (7, 3, 1, 128), 272), (3, 1, (5, 14, 14, 256), 256),
    (3, 1, (3, 15, 13, 256), 96), (3, 1, (9, 7, 7, 512), 512), (3, 1, (17, 5, 6, 512), 144),
    (3, 1, (2, 33, 31, 384), 64), (3, 2, (2, 56, 56, 128), 128), (3, 2, (5, 28, 28, 256), 256),
    (3, 2, (7, 2, 6, 64), 272), (3, 2, (3, 34, 22, 128), 96), (1, 1, (3, 19, 23, 64), 256), (1, 1, (5, 3, 1, 64), 48),
    (1, 1, (3, 28, 28, 128), 512), (1, 1, (5, 14, 14, 256), 1024), (1, 1, (9, 7, 7, 512), 2048),
    (1, 1, (7, 13, 11, 384), 272)])
def test_taps_of_many_tiles(device: Device, size: int, stride: int, shape: tuple[int, ...], filters: int,
                            num_multiprocessors: int, rng: np.random.Generator,
                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Many and few tiles per block; tiles of one image or several, whose rows do not fill a tile; resident and streamed
    weights."""
    if device.gpu.capability != HOPPER:
        pytest.skip("for Hopper")
    monkeypatch.setattr(device.gpu, "num_multiprocessors", num_multiprocessors)
    assert QuantisedConvTaps.of(shape, filters, size, stride, True, num_multiprocessors)
    window = {"kernel": (size, size), "stride": (stride, stride), "pad": (size // 2, size // 2)}
    check_epilogues(device, shape, window, TAPS, filters, rng)


def operands_of_sum(x_shape: tuple[int, ...], channels_2: int, filters: int, stride: int, rng: np.random.Generator,
                    multipliers: Sequence[float]) -> list[np.ndarray]:
    images, height, width, _ = x_shape
    made = []
    for shape in (x_shape, (images, -(-height // stride), -(-width // stride), channels_2)):
        made += [int8(rng, *shape), int8(rng, filters, 1, 1, shape[3]), *factors(rng, filters, shape[3], multipliers)]
    return made


def check_sums(device: Device, x_shape: tuple[int, ...], channels_2: int, label: str, filters: int, stride: int,
               rng: np.random.Generator, multipliers: Sequence[float] = ()) -> None:
    """A projection shortcut fused with the convolution to which it is added, with and without ReLU."""
    operands = operands_of_sum(x_shape, channels_2, filters, stride, rng, multipliers)
    for relu in (False, True):
        check(device, label, operands, kernel=(1, 1), stride=(stride, stride), num_filter=filters,
              layout="NHWC", scale=0.062 if multipliers else 0.047, addend_scale=0.031, relu=relu,
              dtype="int8")


@pytest.mark.parametrize("num_multiprocessors", [1, 132])
@pytest.mark.parametrize("label", SUMS)
@pytest.mark.parametrize("channels, channels_2, filters, stride", [
    (64, 64, 256, 1), (256, 128, 512, 2), (512, 256, 272, 2), (16, 144, 144, 1), (192, 64, 400, 2), (128, 320, 256, 1)])
def test_sums(device: Device, label: str, channels: int, channels_2: int, filters: int, stride: int,
              num_multiprocessors: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not fill a tile; many and few tiles per block."""
    if device.gpu.capability != HOPPER:
        pytest.skip("for Hopper")
    teams, columns = STREAMS[label.replace("Sum", "")]
    if filters <= columns // 2 or Stream(channels, teams, columns, False, channels_2).stages < 2:
        pytest.skip("has less filters than that tile is for, or too many weights")
    monkeypatch.setattr(device.gpu, "num_multiprocessors", num_multiprocessors)
    check_sums(device, (1, 46, 83, channels), channels_2, label, filters, stride, rng)
    check_sums(device, (3, 10, 7, channels), channels_2, label, filters, stride, rng)


def check_pair(device: Device, shape: tuple[int, ...], filters: int, filters_2: int, rng: np.random.Generator,
               multipliers: Sequence[float] = ()) -> None:
    """A convolution with addend and ReLU, and the convolution that reads its output."""
    channels = shape[3]
    operands = [int8(rng, *shape), int8(rng, filters, 1, 1, channels), *factors(rng, filters, channels, multipliers),
                int8(rng, *shape[:3], filters), int8(rng, filters_2, 1, 1, filters),
                *factors(rng, filters_2, filters, multipliers)]
    check(device, "QuantisedPair", operands, kernel=(1, 1), num_filter=filters, num_filter_2=filters_2,
          layout="NHWC", scale=0.062 if multipliers else 0.047, addend_scale=0.031, scale_2=0.02, dtype="int8")


def check_sum_pair(device: Device, x_shape: tuple[int, ...], channels_2: int, filters: int, filters_z: int, stride: int,
                   rng: np.random.Generator, multipliers: Sequence[float] = ()) -> None:
    """A projection shortcut, the convolution to which it is added, with ReLU, and the convolution that reads the
    sum."""
    operands = [*operands_of_sum(x_shape, channels_2, filters, stride, rng, multipliers),
                int8(rng, filters_z, 1, 1, filters), *factors(rng, filters_z, filters, multipliers)]
    check(device, "QuantisedPairSum", operands, kernel=(1, 1), stride=(stride, stride), num_filter=filters,
          num_filter_2=filters_z, layout="NHWC", scale=0.062 if multipliers else 0.047, addend_scale=0.031,
          scale_2=0.02, dtype="int8")


@pytest.mark.parametrize("num_multiprocessors", [1, 132])
@pytest.mark.parametrize("channels, channels_2, filters, filters_z, stride", [
    (64, 64, 256, 64, 1), (64, 64, 256, 128, 1), (128, 32, 208, 48, 2), (16, 144, 96, 112, 1), (256, 64, 256, 64, 2)])
def test_pairs_that_begin_with_a_sum(device: Device, channels: int, channels_2: int, filters: int, filters_z: int,
                                     stride: int, num_multiprocessors: int, rng: np.random.Generator,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    if device.gpu.capability != HOPPER:
        pytest.skip("for Hopper")
    monkeypatch.setattr(device.gpu, "num_multiprocessors", num_multiprocessors)
    for shape in ((1, 46, 83, channels), (3, 10, 7, channels)):
        check_sum_pair(device, shape, channels_2, filters, filters_z, stride, rng)


@pytest.mark.parametrize("num_multiprocessors", [1, 132])
@pytest.mark.parametrize("channels, filters, filters_2", [
    (64, 256, 64), (64, 256, 128), (128, 256, 64), (144, 208, 48), (16, 96, 112), (320, 256, 64)])
def test_pairs(device: Device, channels: int, filters: int, filters_2: int, num_multiprocessors: int,
               rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not fill a tile; many and few tiles per block."""
    if device.gpu.capability != HOPPER:
        pytest.skip("for Hopper")
    monkeypatch.setattr(device.gpu, "num_multiprocessors", num_multiprocessors)
    for shape in ((1, 46, 83, channels), (3, 5, 7, channels), (1, 8, 8, channels)):
        check_pair(device, shape, filters, filters_2, rng)


@pytest.mark.parametrize("filters_2", [64, 128])
def test_ties_and_saturation_of_pairs(device: Device, filters_2: int, rng: np.random.Generator) -> None:
    if device.gpu.capability != HOPPER:
        pytest.skip("for Hopper")
    multipliers = (0.5, 2.0**-9, 2.0**-10, 2.0**-11, 2.0**-12, 2.0**-14, 1e3, 1e30, 1e-30, 1e-40)
    check_pair(device, (2, 20, 21, 16), 256, filters_2, rng, multipliers)
    check_sum_pair(device, (2, 20, 21, 16), 32, 256, filters_2, 1, rng, multipliers)


@pytest.mark.parametrize("label", SUMS)
def test_ties_and_saturation_of_sums(device: Device, label: str, rng: np.random.Generator) -> None:
    """The shortcut is rounded and saturated before the addition, and the sum after it."""
    if device.gpu.capability != HOPPER:
        pytest.skip("for Hopper")
    check_sums(device, (2, 20, 21, 16), 32, label, 256, 1, rng,
               (0.5, 2.0**-9, 2.0**-10, 2.0**-11, 2.0**-12, 2.0**-14, 1e3, 1e30, 1e-30, 1e-40))


@pytest.mark.parametrize("label", [*TILES, *STREAMS])
def test_ties_and_saturation(device: Device, label: str, rng: np.random.Generator) -> None:
    """Sums exactly between two integers, alone and with half an addend, and far outside the range."""
    if device.gpu.capability < (8, 0) or (label in STREAMS and device.gpu.capability != HOPPER):
        pytest.skip("for tensor cores that this GPU has not")
    check_epilogues(device, (2, 20, 21, 16), {"kernel": (1, 1)}, label, 256, rng,
                    (0.5, 2.0**-9, 2.0**-10, 2.0**-11, 2.0**-12, 2.0**-14, 1e3, 1e30, 1e-30, 1e-40))


def test_ties_and_saturation_of_taps(device: Device, rng: np.random.Generator) -> None:
    if device.gpu.capability != HOPPER:
        pytest.skip("for Hopper")
    check_epilogues(device, (2, 20, 21, 64), {"kernel": (3, 3), "pad": (1, 1)}, TAPS, 256, rng,
                    (0.5, 2.0**-9, 2.0**-10, 2.0**-11, 2.0**-12, 2.0**-14, 1e3, 1e30, 1e-30, 1e-40))


@pytest.mark.parametrize("num_multiprocessors", [1, 3, 132])  # divides the rows differently among teams
@pytest.mark.parametrize("images, height, width", [(2, 112, 112), (3, 17, 33), (5, 16, 20), (2, 1, 1), (40, 2, 3)])
def test_stem_pool(device: Device, images: int, height: int, width: int, num_multiprocessors: int,
                   rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """`height`, `width`: of the convolution's output."""
    if device.gpu.capability != HOPPER:
        pytest.skip("for Hopper")
    monkeypatch.setattr(device.gpu, "num_multiprocessors", num_multiprocessors)
    x, weight = int8(rng, images, height + 3, width + 3, 16), int8(rng, 64, 4, 4, 16)
    spread = 127**2 / 3 * np.sqrt(weight[0].size)  # scale of the sums
    for multiplier in (rng.uniform(0.5, 1.5, 64) * 60 / spread, rng.choice([0, 2.0**-9, 2.0**-12, 1e30, 1e-40], 64)):
        for relu in (False, True):
            check(device, "QuantisedStemPool",
                  [x, weight, multiplier.astype(np.float32), rng.integers(-int(spread), int(spread), 64, np.int32)],
                  kernel=(4, 4), num_filter=64, layout="NHWC", scale=0.047, relu=relu, dtype="int8")


def test_convolution_in_groups_and_of_images(device: Device, rng: np.random.Generator) -> None:
    for channels, groups in ((32, 8), (4, 1), (24, 3)):
        x, weight = int8(rng, 2, 11, 9, channels), int8(rng, 48, 3, 3, channels // groups)
        check(device, "QuantisedConvolution",
              [x, weight, rng.uniform(0, 1e-3, 48).astype(np.float32), rng.integers(-9999, 9999, 48, np.int32)],
              kernel=(3, 3), pad=(1, 1), num_filter=48, num_group=groups, layout="NHWC", scale=1.0, dtype="int8")


def test_sums_beyond_24_bits(device: Device) -> None:
    """fp32 cannot hold these sums, and only an int32 can hold one of the biases."""
    x, weight = np.full((1, 2, 2, 2048), 127, np.int8), np.full((64, 1, 1, 2048), 127, np.int8)
    weight[::3] = -127
    x[0, 1, 1, 5] = 1
    bias = np.arange(64, dtype=np.int32) * 2**24 + 1
    for label in ("QuantisedConv 2x64", DIRECT):
        if label == DIRECT or device.gpu.capability >= (8, 0):
            check(device, label, [x, weight, np.full(64, 2.0**-24, np.float32), bias], kernel=(1, 1), num_filter=64,
                  layout="NHWC", scale=1.0, dtype="float16")


@pytest.mark.parametrize("dtype", ["int8", "float16"])
@pytest.mark.parametrize("channels", [64, 12])
def test_pooling(device: Device, channels: int, dtype: str, rng: np.random.Generator) -> None:
    x = int8(rng, 3, 15, 13, channels)
    for window in ({"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1)}, {"global_pool": True, "kernel": (1, 1)},
                   {"kernel": (2, 3), "stride": (2, 1), "pooling_convention": "full"}):
        for include in (False, True):
            for kind in ("avg", "sum"):
                check(device, "QuantisedPooling", [x], pool_type=kind, count_include_pad=include, layout="NHWC",
                      data_scale=0.03, scale=0.017 if dtype == "int8" else 1.0, dtype=dtype, **window)
        if dtype == "int8":
            check(device, "QuantisedPooling", [x], pool_type="max", layout="NHWC", data_scale=0.03, scale=0.03,
                  dtype="int8", **window)


def test_quantising_and_back(device: Device, rng: np.random.Generator) -> None:
    """Includes ties."""
    x = np.concatenate([rng.normal(0, 3, 4096), np.arange(-4096, 4096) / 64]).astype(np.float16).reshape(2, 8, 96, 8)
    for scale in (1 / 32, 0.0371):
        check(device, "Quantise", [x], scale=scale, dtype="int8")
        check(device, "Dequantise", [int8(rng, 2, 8, 96, 8)], data_scale=scale, dtype="float16")


@pytest.mark.parametrize("kernel, pad", [((7, 7), (3, 3)), ((3, 3), (1, 1)), ((6, 5), (2, 0))])
@pytest.mark.parametrize("size", [(32, 32), (31, 40)])
def test_squares(device: Device, kernel: tuple[int, int], pad: tuple[int, int], size: tuple[int, int],
                 rng: np.random.Generator) -> None:
    check(device, "QuantiseSquares", [rng.normal(0, 1, (2, *size, 4)).astype(np.float16)], scale=0.021, kernel=kernel,
          pad=pad, dtype="int8")


def test_classifier(device: Device, rng: np.random.Generator) -> None:
    x, weight = int8(rng, 5, 64), int8(rng, 24, 64)
    (expected,) = reference.evaluate(
        Node("QuantisedFullyConnected", "y", (), {"num_hidden": 24, "scale": 1.0, "dtype": "float16"}),
        [x, weight, np.full(24, 1e-3, np.float32)])
    (found,) = launched(device, "QuantisedFullyConnected", [x, weight, np.full(24, 1e-3, np.float32)], num_hidden=24,
                        scale=1.0, dtype="float16")
    np.testing.assert_array_equal(found, expected.astype(np.float16))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name, size, kept", [
    ("resnet18", 64, Kept()), ("resnet50", 65, Kept()), ("resnet50", 64, Kept(classifier=False)),
    ("resnet18", 64, Kept(first=True)), ("resnext50_32x4d", 33, Kept()), ("resnet50d", 64, Kept()),
    ("resnet18_v2", 64, Kept())])
def test_whole_networks(name: str, size: int, kept: Kept, fused: bool, rng: np.random.Generator, cache: Path,
                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor by tensor, every integer is equal: with several convolutions, or a convolution and its pooling, fused
    wherever possible, and nowhere. If the first convolution is in floats, its float16 changes some integers; then only
    the network's result is compared."""
    times = Prices._times

    def preferred(self: Prices, *asked: Any) -> dict[Candidate, float]:
        of_several = ("QuantisedStemPool", "QuantisedPair", "QuantisedConvStreamSum",
                      "QuantisedPairSum", "StemPool")
        return {each: ms if each.op not in of_several or ms == math.inf else 1e-9 if fused else math.inf
                for each, ms in times(self, *asked).items()}

    monkeypatch.setattr(Prices, "_times", preferred)
    case = quantised(name, 3, size, rng, kept)
    network = QuantisedNetwork(case.network, case.shapes, case.scales, kept, case.params, cache_folder=cache)
    network.load(case.images.astype(np.float16), np.zeros(3))
    network.infer()
    # The means before the classifier are float16: after rounding some become another integer if the classifier is in
    # INT8.
    expected, compared = case.expected(in_16_bits=("pool",)), 0
    probabilities = network.probabilities()
    assert network._inference
    for launch in network._inference._compiled[3].lowering.program.launches:
        launch.enqueue()
        for buffer in launch.writes:
            want = expected.get(Ref(launch.node))
            if buffer.dtype == "int8" and want is not None and want.shape == buffer.shape and not kept.first and (
                    name != "resnet18_v2"):
                found = network.gpu.download(buffer.address, buffer.shape, np.int8)
                assert (found == want).all(), f"{launch.node}: {(found != want).sum()} of {want.size} differ"
                compared += 1
    assert compared > 15 or kept.first or name == "resnet18_v2"
    want, (softmax,) = expected[case.network.outputs[0]], [case.network[case.network.outputs[0].node]]
    # The scores (and the classifier's weights, if it is in floats) are rounded to fp16: each score by at most 2^-10 of
    # the largest. Two such errors add up in a probability.
    error = np.expm1(2 * 2.0**-10 * np.abs(expected[softmax.inputs[0]]).max())
    np.testing.assert_allclose(probabilities, want, rtol=max(error, 0.02) if compared else 0.2, atol=1e-4)
    network.gpu.free_all()


def test_the_executor_answers_as_the_reference_does(rng: np.random.Generator, cache: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """On MXNet's arrays, for a whole batch and a partial one, including the metrics."""
    monkeypatch.setenv("RESNET_CACHE", str(cache))
    case = quantised("resnet18", 4, 64, rng)
    label = rng.integers(0, 24, 4)
    oracle = reference.QuantisedExecutor(case.network, case.shapes, case.scales, case.kept, case.params)
    executor = CudaExecutor(case.network, case.shapes, int8=case.int8)
    data, labels = (mx.nd.array(array, ctx=mx.gpu(0)) for array in (case.images, label))
    want = oracle.forward(case.images)
    np.testing.assert_allclose(executor.forward(data).asnumpy(), want, rtol=0.02, atol=1e-4)
    np.testing.assert_allclose(executor.forward(data[:3]).asnumpy(), want[:3], rtol=0.02, atol=1e-4)
    np.testing.assert_allclose(executor.request_probabilities()(), want[:3], rtol=0.02, atol=1e-4)
    executor.read_metrics()
    executor.infer(data, labels, 3)
    oracle.infer(case.images, label, 3)
    found, expected = executor.read_metrics(), oracle.read_metrics()
    assert found.count == expected.count == 3 and found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-3)
    with pytest.raises(GraphError, match="a network in INT8 cannot be trained"):
        executor.forward_backward(data, labels)
    executor.close()


def test_batches_are_read_where_they_lie(rng: np.random.Generator, cache: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that are read in place, whole and partial and without waiting in between, give the results of copied
    batches."""
    monkeypatch.setenv("RESNET_CACHE", str(cache))
    case = quantised("resnet18", 4, 64, rng)
    images = np.pad(case.images, ((0, 0), (0, 0), (0, 0), (0, 1))).astype(np.float16)
    answers = []
    for least in (0, 1 << 40):
        monkeypatch.setattr(compiled, "LEAST_READ", least)
        executor = CudaExecutor(case.network, case.shapes, int8=case.int8)
        batches = [mx.nd.array(batch, ctx=mx.gpu(0), dtype="float16") for batch in (images, images[::-1], images[1:])]
        asked = [executor.forward(batch) for batch in batches * 2]
        answers.append([answer.asnumpy() for answer in asked])
        executor.close()
    assert all(np.array_equal(*each) for each in zip(*answers, strict=True))
    assert not np.array_equal(answers[0][0], answers[0][1])


def test_a_network_with_parameters_of_another_shape(rng: np.random.Generator, cache: Path) -> None:
    case = quantised("resnet18", 2, 32, rng)
    params = case.params | {"classifier_weight": np.zeros((3, 512), np.float32)}
    with pytest.raises(GraphError, match="'classifier_weight' has the shape .3, 512.: the network in INT8 needs"):
        QuantisedNetwork(case.network, case.shapes, case.scales, case.kept, params, cache_folder=cache)
