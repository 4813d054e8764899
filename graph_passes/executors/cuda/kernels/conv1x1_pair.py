"""A 1x1 convolution with sum and ReLU, and the next one, in one launch, by conv1x1_pair.cu."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from graph_passes.executors.cuda.builder import Builder, Launches, require, require_hopper, rows_and_channels
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import Size, count
from graph_passes.executors.cuda.kernels.conv1x1_forward import (
    CHUNK,
    CHUNK_BYTES,
    MAX_STAGES,
    SHARED_BYTES,
    TEAMS,
    TILE_ROWS,
    Tiles,
)
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.graph import Node

BLOCK: Size = (384, 1, 1)
COLUMNS = 256  # of the first product, at most
SECOND = (64, 128)  # of the second
CONTROL_BYTES = 3 << 10
PLACE_BYTES = TEAMS * TILE_ROWS * CHUNK_BYTES  # for a stage of each team, or a result of each warp


@dataclass(frozen=True)
class Conv1x1Pair:
    """How `conv1x1_pair` divides its work: from `channels` (C) to `filters` (K), and from these to `filters_2` (K_2). A
    block keeps all weights of both; the rest of its shared memory is as `Conv1x1Forward` says."""

    channels: int
    filters: int
    filters_2: int
    results: int = 3  # as Conv1x1Forward has them

    @property
    def second(self) -> int:
        """Columns of the second product."""
        return next(columns for columns in SECOND if columns >= self.filters_2)

    @property
    def weights(self) -> tuple[Tiling, Tiling]:
        return (Tiling.of_matrix(self.filters, self.channels, (COLUMNS, CHUNK)),
                Tiling.of_matrix(self.filters_2, self.filters, (self.second, CHUNK)))

    @property
    def chunks(self) -> int:
        return -(-self.channels // CHUNK)

    @property
    def stages(self) -> int:
        free = SHARED_BYTES - CONTROL_BYTES - self._weight_bytes
        return min(MAX_STAGES, free // PLACE_BYTES - self._results_of_both)

    @property
    def shared_bytes(self) -> int:
        return CONTROL_BYTES + self._weight_bytes + PLACE_BYTES * (self.stages + self._results_of_both)

    def grid(self, tiles: int, num_multiprocessors: int) -> Size:
        return 1, min(num_multiprocessors, -(-tiles // TEAMS)), 1

    @property
    def _results_of_both(self) -> int:
        return self.results + self.second // CHUNK

    @property
    def _weight_bytes(self) -> int:
        return (self.chunks * COLUMNS + COLUMNS // CHUNK * self.second) * CHUNK_BYTES


def pair(builder: Builder, node: Node) -> None:
    x, w, bias, addend, w_2, bias_2 = (builder.input(node, role) for role in (
        "data", "weight", "bias", "addend", "weight_2", "bias_2"))
    y, z = builder.output(node), builder.output(node, "output_2")
    require_hopper(builder, node)
    (rows, filters), (_, channels), (_, filters_2) = (rows_and_channels(node, each) for each in (y, x, z))
    way = Conv1x1Pair(channels, filters, filters_2)
    require(filters <= COLUMNS and filters_2 <= max(SECOND), node,
            f"makes {filters} and {filters_2} channels: its kernel takes {COLUMNS} and {max(SECOND)} at most")
    require(way.stages >= 2, node, f"has {channels} channels: the weights do not fit into shared memory")
    tiles, tiles_2 = Tiles.of(x.shape, y.shape, (1, 1)), Tiles.of(y.shape, z.shape, (1, 1))
    assert tiles and tiles_2
    weights, weights_2 = way.weights
    grid = way.grid(-(-rows // tiles.walk.rows), builder.gpu.num_multiprocessors)
    builder.launch(node, "conv1x1_pair.cu", builder.kernel("conv1x1_pair", way.second), grid, BLOCK,
                   Tiled(In(x), tiles.data), Tiled(In(w), weights), Tiled(In(addend), tiles.output),
                   Tiled(Out(y, over=addend), tiles.output), Tiled(In(w_2), weights_2),
                   Tiled(Out(z), tiles_2.output), In(bias), In(bias_2), count(rows), tiles.walk,
                   *map(ctypes.c_int, (filters, filters_2, way.chunks, way.stages, way.results)),
                   shared_bytes=way.shared_bytes, flops=2 * rows * filters * (channels + filters_2))


LAUNCHES: Launches = {"Conv1x1Pair": pair}
