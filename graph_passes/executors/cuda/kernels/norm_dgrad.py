"""From a BatchNorm's sums through the data of a 1x1 convolution to those of the BatchNorm before, by norm_dgrad.cu."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from graph_passes.executors.cuda.builder import Builder, Launches, require, require_hopper, rows_and_channels
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import count
from graph_passes.executors.cuda.kernels.conv1x1_forward import CHUNK
from graph_passes.executors.cuda.kernels.norm_stream import STREAMED_BLOCK, WEIGHT_PLACES, NormStream
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.graph import Node


@dataclass(frozen=True)
class NormDgrad(NormStream):
    """`norm_dgrad`, of a convolution from `others` (C) to `channels` (K)."""

    COLUMNS = (128, 256)
    CONTROL_BYTES = 5 << 10

    places = WEIGHT_PLACES

    @property
    def weights(self) -> Tiling:
        """As they lie, which is by rows of k."""
        return Tiling.of_matrix(self.channels, self.others, (CHUNK, CHUNK))


def norm_dgrad(builder: Builder, node: Node) -> None:
    require_hopper(builder, node)
    dz, x, behind = (builder.input(node, role) for role in ("masked_grad", "data", "data_2"))
    dx, dz_behind = builder.output(node, "conv_grad"), builder.output(node, "masked_grad")
    (rows, channels), (_, data_channels) = (rows_and_channels(node, each) for each in (x, behind))
    require(channels % CHUNK == 0, node, f"has {channels} channels: its kernel takes multiples of {CHUNK}")
    most = max(NormDgrad.COLUMNS)
    require(data_channels % VECTOR == 0 and data_channels <= most, node,
            f"is made of {data_channels} channels: its kernel takes multiples of {VECTOR}, {most} at most")
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
                   *map(ctypes.c_int, (data_channels, way.chunks, way.stages)),
                   shared_bytes=way.shared_bytes, flops=2 * rows * data_channels * channels)


LAUNCHES: Launches = {"NormConvDgrad": norm_dgrad}
