"""1x1 convolutions with bias, and perhaps a sum and ReLU, in inference; and with the convolution of a projection
shortcut.

    before    x, weight, bias, shortcut -> ConvolutionAddRelu `r`
    after     x, weight, bias, shortcut -> Conv1x1ForwardAddRelu `r`

    before    x, weight, bias -> Convolution -> s;  y, weight_2, bias_2, s -> ConvolutionAddRelu `r`
    after     x, weight, bias, y, weight_2, bias_2 -> Conv1x1ForwardSumRelu `r`

In 16-bit types, with stride 1 or 2, on GPUs of the Hopper generation. Of a sum one of the two, the first in the new
node, may have stride 2. Their sum is one product over the channels of both: s is neither written nor read, nor is it
rounded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from graph_passes.candidates import Candidate, Candidates, form
from graph_passes.executors.cuda.builder import Builder, Launches, require, require_hopper, rows_and_channels
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import Size, count
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators import Operator, Shape, window
from graph_passes.operators.body import Body
from graph_passes.operators.convolution import CONVOLUTION, convolution_body

_CUDA = Declarations("conv1x1_forward.cuh")
BLOCK: Size = (_CUDA.value("THREADS"), 1, 1)
TEAMS, TILE_ROWS, CHUNK, WARP_ROWS = _CUDA.values("TEAMS", "ROWS", "CHUNK", "WARP_ROWS")
MAX_STAGES = _CUDA.value("MAX_STAGES")
CONTROL_BYTES = _CUDA.sizeof("Control")
SHARED_BYTES = 227 << 10  # that a block can have on Hopper
CHUNK_BYTES = 2 * CHUNK  # of a row
PLACE_BYTES = TEAMS * TILE_ROWS * CHUNK_BYTES  # for a stage of each team, or a result of each warp
MAX_WEIGHT_BYTES = 128 << 10  # of shared memory that a block gives to its weights
AFFINE_BYTES = Declarations("norm_stream.cuh").sizeof("Affine")  # a chunk's scales and shifts


# --- where it can be ---


def is_product(convolution: Node, stride: tuple[int, int] = (1, 1)) -> bool:
    """Is it, or the convolution whose gradient it is, a product of matrices, in a type of 16 bits?"""
    return (window(convolution) == ((1, 1), stride, (0, 0), (1, 1)) and convolution["layout"] == "NHWC"
            and convolution["num_group"] == 1 and convolution.attrs.get("dtype") in ("float16", "bfloat16"))


def is_own(convolution: Node) -> bool:
    """Is it such a product at stride 1 or 2?"""
    return is_product(convolution) or is_product(convolution, stride=(2, 2))


def _has_bias(convolution: Node) -> bool:
    return is_own(convolution) and not convolution["no_bias"]


def of_two(table: Candidates, last: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for the places where `last` is a ConvolutionAddRelu."""
    for addend in table.makers(last.input("addend"), "Convolution"):
        if addend["no_bias"]:
            continue
        first, second = (last.node, addend.node) if is_product(addend.node) else (addend.node, last.node)
        if is_product(second) and (is_product(first) or is_product(first, stride=(2, 2))):
            yield first.derive("Conv1x1ForwardSumRelu", last.node.name, (*first.inputs[:3], *second.inputs[:3]))


# --- what is computed ---


def _sum_body(b: Body) -> list[Any]:
    one = b.bias(b.conv(b["data"], b["weight"]), b["bias"])
    other = b.bias(b.conv(b["data_2"], b["weight_2"], stride=(1, 1)), b["bias_2"])
    return [b.relu(b.add(one, other))]


# --- how the work is divided ---


class Walk(ctypes.Structure):
    """`TileStep` of kernels/tma.cuh."""

    _fields_ = _CUDA.fields("TileStep")


class Tiles(NamedTuple):
    """How the pixels of a convolution's data (N, H, W, C) and of its output (N, OH, OW, K) are divided into tiles."""

    walk: Walk
    data: Tiling
    output: Tiling

    @classmethod
    def of(cls, data: Shape, output: Shape, stride: tuple[int, int], chunk: int = CHUNK) -> Tiles | None:
        """By `chunk` channels; None where there is no such division. With stride 2, rows of pixels of which every other
        is read, and every other pixel of these; from image to image too, which is why their height is even."""
        (_, height, width, channels), (images, out_height, out_width, filters) = data, output
        rows = images * out_height * out_width
        if stride == (1, 1):
            return cls(Walk(TILE_ROWS, TILE_ROWS, 0, TILE_ROWS, 0),
                       Tiling.of_matrix(rows, channels, (TILE_ROWS, chunk)),
                       Tiling.of_matrix(rows, filters, (WARP_ROWS, chunk)))
        if stride != (2, 2) or height % 2 or out_width > TILE_ROWS:
            return None
        lines = images * out_height
        at_once = max(number for number in range(1, TILE_ROWS // out_width + 1) if lines % number == 0)
        in_tile = at_once * out_width
        return cls(Walk(in_tile, 0, at_once, 0, 1),
                   Tiling((lines, out_width, channels), (2 * width * channels, 2 * channels),
                          (at_once, out_width, chunk)),
                   Tiling((rows // in_tile, in_tile, filters), (in_tile * filters, filters), (1, WARP_ROWS, chunk)))

    def beside(self, channels: int, chunk: int = CHUNK) -> Tiling:
        """Of data with so many channels, by `chunk` of them, whose pixels are those of the output."""
        lines, rows, _ = self.output.shape
        return Tiling((lines, rows, channels), (rows * channels, channels), (1, self.walk.rows, chunk))


@dataclass(frozen=True)
class Conv1x1Forward:
    """How `conv1x1_forward` divides a convolution of `channels` (C) to `filters` (K), which adds a tensor with `adds`,
    and with `channels_2` (C_2) a convolution of so many.

    A block keeps the weights of `columns` filters; the rest of its shared memory is for tiles of the data that are on
    their way, `stages` for each team, and for parts of the output, `results` for each warp.
    """

    BLOCK: ClassVar[Size] = BLOCK
    COLUMNS: ClassVar[tuple[int, ...]] = (64, 128, 256)  # that a block makes

    channels: int
    filters: int
    adds: bool = False
    channels_2: int = 0

    @property
    def weights(self) -> Tiling:
        return Tiling.of_matrix(self.filters, self.channels, (self.columns, CHUNK))

    @property
    def weights_2(self) -> Tiling:
        return Tiling.of_matrix(self.filters, self.channels_2, (self.columns, CHUNK))

    @property
    def chunks(self) -> int:
        """Of both."""
        return -(-self.channels // CHUNK) + self.chunks_2

    @property
    def chunks_2(self) -> int:
        return -(-self.channels_2 // CHUNK)

    @property
    def columns(self) -> int:
        """As few blocks as there can be read the same data; 0 where the weights do not fit."""
        fitting = [columns for columns in self.COLUMNS if self._weight_bytes(columns) <= MAX_WEIGHT_BYTES]
        return next((columns for columns in fitting if columns >= self.filters), max(fitting, default=0))

    @property
    def results(self) -> int:
        """Two, of which one is being copied away; three where they are also read: from 64 to 256 and from 128 to 512
        channels an H200 took 9 to 11 % longer with two, four and more."""
        return 3 if self.adds else 2

    @property
    def stages(self) -> int:
        return min(MAX_STAGES, (SHARED_BYTES - self._kept_bytes) // PLACE_BYTES - self.results)

    @property
    def shared_bytes(self) -> int:
        return self._kept_bytes + PLACE_BYTES * (self.stages + self.results)

    @property
    def blocks(self) -> int:
        """That make the columns of the same rows."""
        return -(-self.filters // self.columns)

    def grid(self, tiles: int, num_multiprocessors: int) -> Size:
        """Blocks for columns and rows, one for each multiprocessor."""
        pairs = -(-tiles // TEAMS)
        return self.blocks, max(1, min(num_multiprocessors // self.blocks, pairs)), 1

    @property
    def _kept_bytes(self) -> int:
        """Of shared memory, beside those places."""
        return CONTROL_BYTES + self._weight_bytes(self.columns)

    def _weight_bytes(self, columns: int) -> int:
        return self.chunks * columns * CHUNK_BYTES


def affine_bytes(chunks: int) -> int:
    """Of shared memory, for the scales and shifts of a BatchNorm: tiles begin at multiples of 1024 bytes."""
    return -(-chunks * AFFINE_BYTES // 1024) * 1024


def tiles_of(builder: Builder, node: Node, geometry: Conv1x1Forward, y: Buffer) -> Tiles:
    """Raises GraphError where the GPU or these sizes are not for the kernels."""
    require_hopper(builder, node)
    channels = geometry.channels + geometry.channels_2
    require(geometry.columns > 0, node, f"has {channels} channels: their weights do not fit into shared memory")
    x = builder.input(node, "data")
    tiles = Tiles.of(x.shape, y.shape, window(node).stride)
    require(tiles is not None, node, f"has images of {x.shape[1]}x{x.shape[2]} pixels, which its kernel cannot divide")
    assert tiles
    return tiles


def forward(builder: Builder, node: Node) -> None:
    """The convolution with a bias, and perhaps a sum and ReLU; or the sum of two."""
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    addend = builder.input(node, "addend") if node.op == "Conv1x1ForwardAddRelu" else None
    is_sum = node.op == "Conv1x1ForwardSumRelu"
    x_2, w_2, bias_2 = (builder.input(node, role) if is_sum else None for role in ("data_2", "weight_2", "bias_2"))
    (rows, filters), (_, channels) = rows_and_channels(node, y), rows_and_channels(node, x)
    channels_2 = rows_and_channels(node, x_2)[1] if x_2 else 0
    geometry = Conv1x1Forward(channels, filters, addend is not None, channels_2)
    tiles = tiles_of(builder, node, geometry, y)
    grid = geometry.grid(-(-rows // tiles.walk.rows), builder.gpu.num_multiprocessors)
    flags = addend is not None, node.op.endswith("Relu"), is_sum
    builder.launch(node, "conv1x1_forward.cu", builder.kernel("conv1x1_forward", geometry.columns, *flags), grid,
                   geometry.BLOCK, Tiled(In(x), tiles.data), Tiled(In(w), geometry.weights),
                   Tiled(In(addend), tiles.output), Tiled(Out(y, over=addend), tiles.output),
                   In(builder.input(node, "bias")), count(rows), tiles.walk,
                   *map(ctypes.c_int, (filters, geometry.chunks, geometry.stages, geometry.results)),
                   Tiled(In(x_2), tiles.beside(channels_2)), Tiled(In(w_2), geometry.weights_2), In(bias_2),
                   ctypes.c_int(geometry.chunks_2), shared_bytes=geometry.shared_bytes,
                   flops=2 * rows * filters * (channels + channels_2))


_INPUTS = ("data", "weight", "bias")


def _operator(ends: str, *more: str) -> Operator:
    """The kernel's, with what a convolution's operator of the same ending computes."""
    return Operator(f"Conv1x1Forward{ends}", (*_INPUTS, *more), attrs=CONVOLUTION, form_of=f"Convolution{ends}",
                    body=partial(convolution_body, relu=ends.endswith("Relu")), forward="Convolution", fused=True)


OPERATORS = (
    _operator(""), _operator("Relu"), _operator("AddRelu", "addend"),
    # A convolution with stride 1 of `data_2`, and the one that it is added to.
    Operator("Conv1x1ForwardSumRelu", (*_INPUTS, *(f"{name}_2" for name in _INPUTS)), attrs=CONVOLUTION, body=_sum_body,
             forward="Convolution", fused=True),
)
RULES = (*((each.form_of, form(each.name, _has_bias)) for each in OPERATORS if each.form_of),
         ("ConvolutionAddRelu", of_two))
LAUNCHES: Launches = {operator.name: forward for operator in OPERATORS}
