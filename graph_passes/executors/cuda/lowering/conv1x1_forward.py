"""The forward pass of 1x1 convolutions, with what follows it, by conv1x1_forward.cu, which is for Hopper's matrix
instructions and copy engine."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernels import Size, count
from graph_passes.executors.cuda.lowering.builder import Builder, Rules, require, require_hopper, rows_and_channels
from graph_passes.executors.cuda.lowering.operands import In, Out, Tiled
from graph_passes.graph import Node
from graph_passes.operators import Shape, window

BLOCK: Size = (320, 1, 1)
SUMMING_BLOCK: Size = (448, 1, 1)  # four more warps, which add up
TEAMS, TILE_ROWS, CHUNK, WARP_ROWS = 2, 64, 64, 16
COLUMNS = (64, 128, 256)  # that a block makes
COLUMNS_SUMMED = 128  # at most: so many warps have few registers
MAX_STAGES = 12
SHARED_BYTES, CONTROL_BYTES = 227 << 10, 2 << 10
CHUNK_BYTES = 2 * CHUNK  # of a row
MAX_WEIGHT_BYTES = 128 << 10  # of shared memory that a block gives to its weights


class Walk(ctypes.Structure):
    """`TileWalk` of kernels/copy_engine.cuh."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("rows", "x_row", "x_line", "y_row", "y_line"))


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
    with `channels_2` (C_2) a convolution of so many, and with `sums` makes those of its output.

    A block keeps the weights of `columns` filters; the rest of its shared memory is for tiles of the data that are on
    their way, `stages` for each team, and for parts of the output, `results` for each warp.
    """

    channels: int
    filters: int
    adds: bool
    channels_2: int = 0
    sums: bool = False

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
        fitting = [columns for columns in COLUMNS if self._weight_bytes(columns) <= MAX_WEIGHT_BYTES
                   and not (self.sums and columns > COLUMNS_SUMMED)]
        return next((columns for columns in fitting if columns >= self.filters), max(fitting, default=0))

    @property
    def results(self) -> int:
        """Two, of which one is being copied away; three where they are also read: from 64 to 256 and from 128 to 512
        channels an H200 took 9 to 11 % longer with two, four and more."""
        return 3 if self.adds or self.sums else 2

    @property
    def stages(self) -> int:
        return min(MAX_STAGES, self._places - self.results)

    @property
    def shared_bytes(self) -> int:
        places = TEAMS * TILE_ROWS * CHUNK_BYTES * (self.stages + self.results)
        return CONTROL_BYTES + self._weight_bytes(self.columns) + places

    @property
    def blocks(self) -> int:
        """That make the columns of the same rows."""
        return -(-self.filters // self.columns)

    @property
    def peers(self) -> int:
        """How many of these are a cluster, which brings data from the L2 cache once. On an H200 that pays for two
        blocks, and not for more, of which two would be together."""
        return 2 if self.sums and self.blocks == 2 else 1

    def grid(self, tiles: int, num_multiprocessors: int) -> Size:
        """Blocks for columns and rows, one for each multiprocessor."""
        pairs = -(-tiles // TEAMS)
        return self.blocks, max(1, min(num_multiprocessors // self.blocks, pairs)), 1

    @property
    def _places(self) -> int:
        """For a stage of each team, or a result of each warp: they have the same size."""
        free = SHARED_BYTES - CONTROL_BYTES - self._weight_bytes(self.columns)
        return free // (TEAMS * TILE_ROWS * CHUNK_BYTES)

    def _weight_bytes(self, columns: int) -> int:
        return self.chunks * columns * CHUNK_BYTES


def forward(builder: Builder, node: Node) -> None:
    """The convolution with a bias, and perhaps a sum and ReLU; or with the sums of its output; or the sum of two."""
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    require_hopper(builder, node)
    sums = builder.output(node, "sums") if node.op == "Conv1x1Statistics" else None
    bias = None if sums else builder.input(node, "bias")
    addend = builder.input(node, "addend") if node.op == "Conv1x1AddRelu" else None
    is_sum = node.op == "Conv1x1SumRelu"
    x_2, w_2, bias_2 = (builder.input(node, role) if is_sum else None for role in ("data_2", "weight_2", "bias_2"))
    (rows, filters), (_, channels) = rows_and_channels(node, y), rows_and_channels(node, x)
    channels_2 = rows_and_channels(node, x_2)[1] if x_2 else 0
    way = Conv1x1Forward(channels, filters, addend is not None, channels_2, sums is not None)
    require(way.columns > 0, node, f"has {channels + channels_2} channels: their weights do not fit into shared memory")
    tiles = Tiles.of(x.shape, y.shape, window(node).stride)
    require(tiles is not None, node, f"has images of {x.shape[1]}x{x.shape[2]} pixels, which its kernel cannot divide")
    assert tiles
    grid = way.grid(-(-rows // tiles.walk.rows), builder.gpu.num_multiprocessors)
    flags = addend is not None, node.op.endswith("Relu"), sums is not None, is_sum
    kernel = builder.kernel("conv1x1_forward", way.columns, way.peers, *flags)
    builder.launch(node, "conv1x1_forward.cu", kernel, grid, SUMMING_BLOCK if sums else BLOCK,
                   Tiled(In(x), tiles.data), Tiled(In(w), way.weights), Tiled(In(addend), tiles.output),
                   Tiled(Out(y, over=addend), tiles.output), In(bias), Out(sums),
                   builder.partials(3 * filters * grid[1] if sums else 0), builder.tickets, count(rows), tiles.walk,
                   *map(ctypes.c_int, (filters, way.chunks, way.stages, way.results)),
                   Tiled(In(x_2), tiles.beside(channels_2)), Tiled(In(w_2), way.weights_2), In(bias_2),
                   ctypes.c_int(way.chunks_2), shared_bytes=way.shared_bytes,
                   flops=2 * rows * filters * (channels + channels_2))


RULES: Rules = dict.fromkeys(
    ("Conv1x1", "Conv1x1Relu", "Conv1x1AddRelu", "Conv1x1SumRelu", "Conv1x1Statistics"), forward)
