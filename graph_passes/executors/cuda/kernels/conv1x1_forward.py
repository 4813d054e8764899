"""1x1 convolutions in inference with bias, optionally also with addition and ReLU, or with the convolution of a
projection shortcut.

    before    x, weight, bias, shortcut -> ConvolutionAddRelu `r`
    after     x, weight, bias, shortcut -> Conv1x1ForwardAddRelu `r`

    before    x, weight, bias -> Convolution -> s;  y, weight_2, bias_2, s -> ConvolutionAddRelu `r`
    after     x, weight, bias, y, weight_2, bias_2 -> Conv1x1ForwardSumRelu `r`

For 16-bit types, stride 1 or 2, and Hopper GPUs. In a sum, only the new node's first convolution may have stride 2. The
sum is one product over the channels of both convolutions: s is neither written nor read nor rounded.
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
SHARED_BYTES = 227 << 10  # most shared memory of a block on Hopper
CHUNK_BYTES = 2 * CHUNK  # bytes of a row
PLACE_BYTES = TEAMS * TILE_ROWS * CHUNK_BYTES  # bytes of one stage of each team, which equal one result of each warp
MAX_WEIGHT_BYTES = 128 << 10  # shared memory that a block gives to its weights
AFFINE_BYTES = Declarations("norm_stream.cuh").sizeof("Affine")  # a chunk's scales and shifts




def is_product(convolution: Node, stride: tuple[int, int] = (1, 1)) -> bool:
    """Whether the convolution (or the convolution whose gradient this node is) is a matrix product in a 16-bit type."""
    return (window(convolution) == ((1, 1), stride, (0, 0), (1, 1)) and convolution["layout"] == "NHWC"
            and convolution["num_group"] == 1 and convolution.attrs.get("dtype") in ("float16", "bfloat16"))


def is_own(convolution: Node) -> bool:
    """Whether the node is a product by `is_product` with stride 1 or 2."""
    return is_product(convolution) or is_product(convolution, stride=(2, 2))


def _has_bias(convolution: Node) -> bool:
    return is_own(convolution) and not convolution["no_bias"]


def sum_of_two(table: Candidates, last: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a ConvolutionAddRelu `last` that adds another convolution."""
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


# --- division of the work ---


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
        """The tiles, with chunks of `chunk` channels; None if this division is impossible. With stride 2, every other
        row of pixels is read, and every other pixel of these rows. The rows are counted through all images, so the
        height must be even.
        """
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
        """The tiling, in chunks of `chunk` channels, of a second tensor that has the output's pixels and `channels`
        channels.
        """
        lines, rows, _ = self.output.shape
        return Tiling((lines, rows, channels), (rows * channels, channels), (1, self.walk.rows, chunk))


@dataclass(frozen=True)
class Conv1x1Forward:
    """How `conv1x1_forward` divides a convolution from `channels` (C) to `filters` (K). `adds`: it adds a tensor.
    `channels_2` (C_2): it adds a second convolution with these input channels.

    A block keeps the weights of `columns` filters. The rest of its shared memory holds tiles of the data in flight,
    `stages` for each team, and parts of the output, `results` for each warp.
    """

    BLOCK: ClassVar[Size] = BLOCK
    COLUMNS: ClassVar[tuple[int, ...]] = (64, 128, 256)  # columns that a block computes

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
        """Chunks of both tensors."""
        return -(-self.channels // CHUNK) + self.chunks_2

    @property
    def chunks_2(self) -> int:
        return -(-self.channels_2 // CHUNK)

    @property
    def columns(self) -> int:
        """Columns of a block, so that as few blocks as possible read the same data; 0 if the weights do not fit."""
        fitting = [columns for columns in self.COLUMNS if self._weight_bytes(columns) <= MAX_WEIGHT_BYTES]
        return next((columns for columns in fitting if columns >= self.filters), max(fitting, default=0))

    @property
    def results(self) -> int:
        """Result slots of a warp: two, so that one result can be copied away while the other is computed; three if
        addends are read into them. With addends, from 64 to 256 and from 128 to 512 channels, two, four or more slots
        took 9 to 11 % longer on an H200.
        """
        return 3 if self.adds else 2

    @property
    def stages(self) -> int:
        return min(MAX_STAGES, (SHARED_BYTES - self._kept_bytes) // PLACE_BYTES - self.results)

    @property
    def shared_bytes(self) -> int:
        return self._kept_bytes + PLACE_BYTES * (self.stages + self.results)

    @property
    def blocks(self) -> int:
        """The number of blocks that compute the columns of the same rows."""
        return -(-self.filters // self.columns)

    def grid(self, tiles: int, num_multiprocessors: int) -> Size:
        """The grid: blocks for columns and for rows, one block per multiprocessor."""
        pairs = -(-tiles // TEAMS)
        return self.blocks, max(1, min(num_multiprocessors // self.blocks, pairs)), 1

    @property
    def _kept_bytes(self) -> int:
        """Bytes of shared memory in use besides stages and results."""
        return CONTROL_BYTES + self._weight_bytes(self.columns)

    def _weight_bytes(self, columns: int) -> int:
        return self.chunks * columns * CHUNK_BYTES


def affine_bytes(chunks: int) -> int:
    """Bytes of shared memory for the scales and shifts of a BatchNorm, rounded up: tiles begin at multiples of 1024
    bytes."""
    return -(-chunks * AFFINE_BYTES // 1024) * 1024


def tiles_of(builder: Builder, node: Node, geometry: Conv1x1Forward, y: Buffer) -> Tiles:
    """The tiles. Raises GraphError if the kernels do not support the GPU or these sizes."""
    require_hopper(builder, node)
    channels = geometry.channels + geometry.channels_2
    require(geometry.columns > 0, node, f"has {channels} channels: their weights do not fit into shared memory")
    x = builder.input(node, "data")
    tiles = Tiles.of(x.shape, y.shape, window(node).stride)
    require(tiles is not None, node, f"has images of {x.shape[1]}x{x.shape[2]} pixels, which its kernel cannot divide")
    assert tiles
    return tiles


def forward(builder: Builder, node: Node) -> None:
    """Launch a convolution with bias, optionally addition and ReLU; or the sum of two convolutions."""
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
    """The kernel's operator. It computes the same outputs as the Convolution operator whose name has this ending."""
    return Operator(f"Conv1x1Forward{ends}", (*_INPUTS, *more), attrs=CONVOLUTION, form_of=f"Convolution{ends}",
                    body=partial(convolution_body, relu=ends.endswith("Relu")), forward="Convolution", fused=True)


OPERATORS = (
    _operator(""), _operator("Relu"), _operator("AddRelu", "addend"),
    # A convolution of `data_2` with stride 1, added to the convolution of `data`.
    Operator("Conv1x1ForwardSumRelu", (*_INPUTS, *(f"{name}_2" for name in _INPUTS)), attrs=CONVOLUTION, body=_sum_body,
             forward="Convolution", fused=True),
)
RULES = (*((each.form_of, form(each.name, _has_bias)) for each in OPERATORS if each.form_of),
         ("ConvolutionAddRelu", sum_of_two))
LAUNCHES: Launches = {operator.name: forward for operator in OPERATORS}
