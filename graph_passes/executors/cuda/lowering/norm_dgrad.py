"""From a BatchNorm's sums through the data of a 1x1 convolution to those of the BatchNorm before, by norm_dgrad.cu."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernels import HOPPER, Size, count
from graph_passes.executors.cuda.lowering.builder import Builder, Rules, require, rows_and_channels
from graph_passes.executors.cuda.lowering.conv1x1_forward import (
    CHUNK,
    CHUNK_BYTES,
    MAX_STAGES,
    SHARED_BYTES,
    TEAMS,
    TILE_ROWS,
    WARP_ROWS,
)
from graph_passes.executors.cuda.lowering.norm_conv1x1 import (
    RESULT_BYTES,
    STAGE_BYTES,
    STREAMED_BLOCK,
    WEIGHT_PLACES,
    affine_bytes,
)
from graph_passes.executors.cuda.lowering.operands import In, Out, Tiled
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.graph import Node

COLUMNS = (128, 256)  # that a block makes
CONTROL_BYTES = 5 << 10


@dataclass(frozen=True)
class NormDgrad:
    """How `norm_dgrad` divides the rows of a BatchNorm's tensors of `channels` (K), which a convolution has made of
    `data_channels` (C). A block streams the weights and has a place for results of each warp; the rest of its shared
    memory is for tiles on their way, `stages` for each team."""

    channels: int
    data_channels: int

    @property
    def columns(self) -> int:
        return next(columns for columns in COLUMNS if columns >= self.data_channels)

    @property
    def chunks(self) -> int:
        return self.channels // CHUNK

    @property
    def weights(self) -> Tiling:
        """As they lie, which is by rows of k."""
        return Tiling.of_matrix(self.channels, self.data_channels, (CHUNK, CHUNK))

    def read(self, rows: int, columns: int) -> Tiling:
        return Tiling.of_matrix(rows, columns, (TILE_ROWS, CHUNK))

    def written(self, rows: int, columns: int) -> Tiling:
        return Tiling.of_matrix(rows, columns, (WARP_ROWS, CHUNK))

    @property
    def stages(self) -> int:
        return min(MAX_STAGES, (SHARED_BYTES - self._kept_bytes) // STAGE_BYTES)

    @property
    def shared_bytes(self) -> int:
        return self._kept_bytes + self.stages * STAGE_BYTES

    def grid(self, rows: int, num_multiprocessors: int) -> Size:
        return 1, min(num_multiprocessors, -(-rows // (TEAMS * TILE_ROWS))), 1

    @property
    def _kept_bytes(self) -> int:
        weights = WEIGHT_PLACES * self.columns * CHUNK_BYTES
        return CONTROL_BYTES + affine_bytes(self.chunks) + weights + RESULT_BYTES


def norm_dgrad(builder: Builder, node: Node) -> None:
    require(builder.gpu.capability == HOPPER, node, "is fused as only Hopper's instructions can compute it")
    dz, x, behind = (builder.input(node, role) for role in ("masked_grad", "data", "data_2"))
    dx, dz_behind = builder.output(node, "conv_grad"), builder.output(node, "masked_grad")
    (rows, channels), (_, data_channels) = (rows_and_channels(node, each) for each in (x, behind))
    require(channels % CHUNK == 0, node, f"has {channels} channels: its kernel takes multiples of {CHUNK}")
    require(data_channels % VECTOR == 0 and data_channels <= max(COLUMNS), node, f"is made of {data_channels} channels: "
            f"its kernel takes multiples of {VECTOR}, {max(COLUMNS)} at most")
    way = NormDgrad(channels, data_channels)
    require(way.stages >= 2, node, f"has {channels} channels: there is no room in shared memory for tiles of them")
    grid = way.grid(rows, builder.gpu.num_multiprocessors)
    given = [builder.input(node, role) for role in ("saved", "gamma", "gamma_grad", "beta_grad", "saved_2", "gamma_2",
                                                    "beta_2")]
    wide, narrow = way.read(rows, channels), way.read(rows, data_channels)
    builder.launch(node, "norm_dgrad.cu", builder.kernel("norm_dgrad", way.columns), grid, STREAMED_BLOCK,
                   Tiled(In(dz), wide), Tiled(In(x), wide), Tiled(In(builder.input(node, "weight")), way.weights),
                   Tiled(In(behind), narrow), Tiled(Out(dx, over=x), way.written(rows, channels)),
                   Tiled(Out(dz_behind), way.written(rows, data_channels)), *map(In, given),
                   Out(builder.output(node, "gamma_grad")), Out(builder.output(node, "beta_grad")),
                   builder.partials(2 * data_channels * grid[1]), builder.tickets, count(rows),
                   *map(ctypes.c_int, (data_channels, way.chunks, way.stages)), shared_bytes=way.shared_bytes,
                   flops=2 * rows * data_channels * channels)


RULES: Rules = {"NormConvDgrad": norm_dgrad}
