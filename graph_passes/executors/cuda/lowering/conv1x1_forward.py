"""The forward pass of 1x1 convolutions, with what follows it, by conv1x1_forward.cu, which is for Hopper's matrix
instructions and copy engine."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from graph_passes.executors.cuda.kernels import HOPPER, Size, count
from graph_passes.executors.cuda.lowering.builder import Builder, Rules, require, rows_and_channels
from graph_passes.executors.cuda.lowering.operands import In, Out, Tiled
from graph_passes.graph import Node

BLOCK: Size = (320, 1, 1)
TEAMS, TILE_ROWS, CHUNK, WARP_ROWS = 2, 64, 64, 16
COLUMNS = (64, 128, 256)  # that a block makes
MAX_STAGES, MAX_RESULTS = 12, 8
SHARED_BYTES, CONTROL_BYTES = 227 << 10, 2 << 10
CHUNK_BYTES = 2 * CHUNK  # of a row
MAX_WEIGHT_BYTES = 128 << 10  # of shared memory that a block gives to its weights


@dataclass(frozen=True)
class Conv1x1Forward:
    """How `conv1x1_forward` divides a convolution of `channels` (C) to `filters` (K), which adds a tensor with `adds`.

    A block keeps the weights of `columns` filters; the rest of its shared memory is for tiles of the data that are on
    their way, `stages` for each team, and for parts of the output, `results` for each warp.
    """

    channels: int
    filters: int
    adds: bool

    tile_of_x, tile_of_y = (TILE_ROWS, CHUNK), (WARP_ROWS, CHUNK)

    @property
    def tile_of_w(self) -> tuple[int, int]:
        return self.columns, CHUNK

    @property
    def chunks(self) -> int:
        return -(-self.channels // CHUNK)

    @property
    def columns(self) -> int:
        """As few blocks as there can be read the same data; 0 where the weights do not fit."""
        fitting = [columns for columns in COLUMNS if self._weight_bytes(columns) <= MAX_WEIGHT_BYTES]
        return next((columns for columns in fitting if columns >= self.filters), max(fitting, default=0))

    @property
    def results(self) -> int:
        """Two, of which one is being copied away; where they are also read, half of the room."""
        return min(MAX_RESULTS, self._places // 2) if self.adds else 2

    @property
    def stages(self) -> int:
        return min(MAX_STAGES, self._places - self.results)

    @property
    def shared_bytes(self) -> int:
        places = TEAMS * TILE_ROWS * CHUNK_BYTES * (self.stages + self.results)
        return CONTROL_BYTES + self._weight_bytes(self.columns) + places

    def grid(self, rows: int, num_multiprocessors: int) -> Size:
        """Blocks for columns and rows, one for each multiprocessor."""
        blocks, pairs = -(-self.filters // self.columns), -(-rows // (TEAMS * TILE_ROWS))
        return blocks, max(1, min(num_multiprocessors // blocks, pairs)), 1

    @property
    def _places(self) -> int:
        """For a stage of each team, or a result of each warp: they have the same size."""
        free = SHARED_BYTES - CONTROL_BYTES - self._weight_bytes(self.columns)
        return free // (TEAMS * TILE_ROWS * CHUNK_BYTES)

    def _weight_bytes(self, columns: int) -> int:
        return self.chunks * columns * CHUNK_BYTES


def forward(builder: Builder, node: Node) -> None:
    """The convolution with a bias, and perhaps a sum and ReLU; or with the sums of its output."""
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    require(builder.gpu.capability == HOPPER, node, "is fused as only Hopper's instructions can compute it")
    sums = builder.output(node, "sums") if node.op == "Conv1x1Statistics" else None
    bias = None if sums else builder.input(node, "bias")
    addend = builder.input(node, "addend") if node.op == "Conv1x1AddRelu" else None
    (rows, filters), (_, channels) = rows_and_channels(node, y), rows_and_channels(node, x)
    way = Conv1x1Forward(channels, filters, addend is not None)
    require(way.columns > 0, node, f"has {channels} channels: their weights do not fit into shared memory")
    grid = way.grid(rows, builder.gpu.num_multiprocessors)

    flags = addend is not None, node.op.endswith("Relu"), sums is not None
    builder.launch(node, "conv1x1_forward.cu", builder.kernel("conv1x1_forward", way.columns, *flags), grid, BLOCK,
                   Tiled(In(x), rows, channels, way.tile_of_x), Tiled(In(w), filters, channels, way.tile_of_w),
                   Tiled(In(addend), rows, filters, way.tile_of_y),
                   Tiled(Out(y, over=addend), rows, filters, way.tile_of_y), In(bias), Out(sums),
                   builder.partials(3 * filters * grid[1] if sums else 0), builder.tickets, count(rows),
                   *map(ctypes.c_int, (filters, way.chunks, way.stages, way.results)), shared_bytes=way.shared_bytes,
                   flops=2 * rows * filters * channels)


RULES: Rules = dict.fromkeys(("Conv1x1", "Conv1x1Relu", "Conv1x1AddRelu", "Conv1x1Statistics"), forward)
