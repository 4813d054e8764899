"""The forward pass of 1x1 convolutions, with what comes before and after it, by conv1x1_forward.cu and
conv1x1_statistics.cu, which are for Hopper's matrix instructions and copy engine."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from graph_passes.executors.cuda.builder import Builder, Launches, require, require_hopper, rows_and_channels
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import Size, count
from graph_passes.executors.cuda.kernels.batch_norm import before, require_gamma
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators import Shape, window

BLOCK: Size = (320, 1, 1)
TEAMS, TILE_ROWS, CHUNK, WARP_ROWS = 2, 64, 64, 16
MAX_STAGES = 12
SHARED_BYTES, CONTROL_BYTES = 227 << 10, 2 << 10
CHUNK_BYTES = 2 * CHUNK  # of a row
PLACE_BYTES = TEAMS * TILE_ROWS * CHUNK_BYTES  # for a stage of each team, or a result of each warp
MAX_WEIGHT_BYTES = 128 << 10  # of shared memory that a block gives to its weights
AFFINE_BYTES = 12 * CHUNK  # a chunk's scales and shifts


class Walk(ctypes.Structure):
    """`TileStep` of kernels/tma.cuh."""

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


@dataclass(frozen=True)
class Conv1x1Statistics(Conv1x1Forward):
    """The same of the kernels of conv1x1_statistics.cu, which make the sums of their output. `normalises`: what a
    BatchNorm and ReLU before the convolution give, for which each warp has a place more.

    Four more warps add up, so that a thread has registers for 128 columns at most.
    """

    BLOCK: ClassVar[Size] = (448, 1, 1)
    COLUMNS: ClassVar[tuple[int, ...]] = (64, 128)

    normalises: bool = False

    @property
    def results(self) -> int:
        """Each is copied away, and added up."""
        return 3

    @property
    def peers(self) -> int:
        """How many of the blocks are a cluster, which brings data from the L2 cache once. On an H200 that pays for two,
        and not for more, of which two would be together."""
        return 2 if self.blocks == 2 else 1

    @property
    def _kept_bytes(self) -> int:
        return super()._kept_bytes + (affine_bytes(self.chunks) + PLACE_BYTES if self.normalises else 0)


def affine_bytes(chunks: int) -> int:
    """Of shared memory, for the scales and shifts of a BatchNorm: tiles begin at multiples of 1024 bytes."""
    return -(-chunks * AFFINE_BYTES // 1024) * 1024


def _tiles(builder: Builder, node: Node, way: Conv1x1Forward, y: Buffer) -> Tiles:
    """Raises GraphError where the GPU or these sizes are not for the kernels."""
    require_hopper(builder, node)
    channels = way.channels + way.channels_2
    require(way.columns > 0, node, f"has {channels} channels: their weights do not fit into shared memory")
    x = builder.input(node, "data")
    tiles = Tiles.of(x.shape, y.shape, window(node).stride)
    require(tiles is not None, node, f"has images of {x.shape[1]}x{x.shape[2]} pixels, which its kernel cannot divide")
    assert tiles
    return tiles


def statistics(builder: Builder, node: Node) -> None:
    """The convolution with the sums of its output."""
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    (rows, filters), (_, channels) = rows_and_channels(node, y), rows_and_channels(node, x)
    way = Conv1x1Statistics(channels, filters)
    tiles = _tiles(builder, node, way, y)
    grid = way.grid(-(-rows // tiles.walk.rows), builder.gpu.num_multiprocessors)
    builder.launch(node, "conv1x1_statistics.cu", builder.kernel("conv1x1_statistics", way.columns, way.peers), grid,
                   way.BLOCK, Tiled(In(x), tiles.data), Tiled(In(w), way.weights), Tiled(Out(y), tiles.output),
                   Out(builder.output(node, "sums")), builder.partials(3 * filters * grid[1]), builder.tickets,
                   count(rows), tiles.walk, *map(ctypes.c_int, (filters, way.chunks, way.stages, way.results)),
                   shared_bytes=way.shared_bytes, flops=2 * rows * filters * channels)


def norm_statistics(builder: Builder, node: Node) -> None:
    """BatchNorm + ReLU of the data, and the convolution of that with the sums of its output."""
    require_gamma(node)
    x, w, z = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node, "convolved")
    (rows, filters), (_, channels) = rows_and_channels(node, z), rows_and_channels(node, x)
    require(channels % CHUNK == 0, node, f"has {channels} channels: its kernel takes multiples of {CHUNK}")
    way = Conv1x1Statistics(channels, filters, normalises=True)
    tiles = _tiles(builder, node, way, z)
    require(way.stages >= 2, node, f"has {channels} channels: their weights leave no place in shared memory")
    grid = way.grid(-(-rows // TILE_ROWS), builder.gpu.num_multiprocessors)
    y = None if node["no_output"] else builder.output(node)
    builder.launch(node, "conv1x1_statistics.cu", builder.kernel("norm_relu_conv1x1", way.columns, way.peers), grid,
                   way.BLOCK, Tiled(In(x), tiles.data), Tiled(In(w), way.weights),
                   Tiled(Out(y), Tiling.of_matrix(rows, channels, (WARP_ROWS, CHUNK))), Tiled(Out(z), tiles.output),
                   ctypes.c_bool(y is not None), *before(builder, node), Out(builder.output(node, "sums")),
                   builder.partials(3 * filters * grid[1]), builder.tickets, count(rows), tiles.walk,
                   *map(ctypes.c_int, (filters, way.chunks, way.stages, way.results)),
                   shared_bytes=way.shared_bytes, flops=2 * rows * filters * channels)


def forward(builder: Builder, node: Node) -> None:
    """The convolution with a bias, and perhaps a sum and ReLU; or the sum of two."""
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    addend = builder.input(node, "addend") if node.op == "Conv1x1AddRelu" else None
    is_sum = node.op == "Conv1x1SumRelu"
    x_2, w_2, bias_2 = (builder.input(node, role) if is_sum else None for role in ("data_2", "weight_2", "bias_2"))
    (rows, filters), (_, channels) = rows_and_channels(node, y), rows_and_channels(node, x)
    channels_2 = rows_and_channels(node, x_2)[1] if x_2 else 0
    way = Conv1x1Forward(channels, filters, addend is not None, channels_2)
    tiles = _tiles(builder, node, way, y)
    grid = way.grid(-(-rows // tiles.walk.rows), builder.gpu.num_multiprocessors)
    flags = addend is not None, node.op.endswith("Relu"), is_sum
    builder.launch(node, "conv1x1_forward.cu", builder.kernel("conv1x1_forward", way.columns, *flags), grid, way.BLOCK,
                   Tiled(In(x), tiles.data), Tiled(In(w), way.weights), Tiled(In(addend), tiles.output),
                   Tiled(Out(y, over=addend), tiles.output), In(builder.input(node, "bias")), count(rows), tiles.walk,
                   *map(ctypes.c_int, (filters, way.chunks, way.stages, way.results)),
                   Tiled(In(x_2), tiles.beside(channels_2)), Tiled(In(w_2), way.weights_2), In(bias_2),
                   ctypes.c_int(way.chunks_2), shared_bytes=way.shared_bytes,
                   flops=2 * rows * filters * (channels + channels_2))


LAUNCHES: Launches = {**dict.fromkeys(("Conv1x1", "Conv1x1Relu", "Conv1x1AddRelu", "Conv1x1SumRelu"), forward),
                "Conv1x1Statistics": statistics, "BatchNormReluConv1x1": norm_statistics}
