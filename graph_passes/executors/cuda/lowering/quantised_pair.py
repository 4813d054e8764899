"""A 1x1 convolution in INT8 with sum and ReLU, and the next one, in one launch, by quantised_pair.cu."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from graph_passes.executors.cuda.kernels import HOPPER, Size, count, instance
from graph_passes.executors.cuda.lowering.builder import Builder, Rules, require
from graph_passes.executors.cuda.lowering.conv1x1_forward import SHARED_BYTES, TEAMS, TILE_ROWS, Tiles
from graph_passes.executors.cuda.lowering.operands import In, Out, Tiled
from graph_passes.executors.cuda.lowering.quantised import (
    CHUNK,
    STREAM_COLUMNS,
    STREAM_FACTOR_BYTES,
    STREAM_STAGES,
    TILE_VECTOR,
    Geometry,
    Stream,
)
from graph_passes.graph import Node

BLOCK: Size = (384, 1, 1)
SECOND = (64, 128)  # columns of the second product
PLACE_BYTES = TEAMS * TILE_ROWS * CHUNK  # for a stage of each team, or a result of each warp


@dataclass(frozen=True)
class QuantisedPair:
    """How quantised_pair.cu divides its work: from `channels` (C) to STREAM_COLUMNS filters (K) at most, and from these
    to `filters_2` (K_2). A block keeps all weights of both; the rest of its shared memory is as `Stream` says."""

    channels: int
    filters_2: int

    @property
    def second(self) -> int:
        """Columns of the second product."""
        return next(columns for columns in SECOND if columns >= self.filters_2)

    @property
    def chunks(self) -> int:
        return self._first.chunks

    @property
    def results(self) -> int:
        return self._first.results

    @property
    def stages(self) -> int:
        free = SHARED_BYTES - self.control_bytes - self._weight_bytes
        return min(STREAM_STAGES, free // PLACE_BYTES - self.results - 1)  # and one for z

    @property
    def control_bytes(self) -> int:
        return -(-(self._first.control_bytes + STREAM_FACTOR_BYTES * self.second) // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        return self.control_bytes + self._weight_bytes + PLACE_BYTES * (self.stages + self.results + 1)

    @property
    def _first(self) -> Stream:
        return Stream(self.channels, TEAMS, STREAM_COLUMNS, adds=True)

    @property
    def _weight_bytes(self) -> int:
        return (self.chunks * STREAM_COLUMNS + STREAM_COLUMNS // CHUNK * self.second) * CHUNK


def pair(builder: Builder, node: Node) -> None:
    x, weight, multiplier, bias, addend, weight_2, multiplier_2, bias_2 = (builder.input(node, role) for role in (
        "data", "weight", "multiplier", "bias", "addend", "weight_2", "multiplier_2", "bias_2"))
    y, z = builder.output(node), builder.output(node, "output_2")
    rows, channels, filters, filters_2 = Geometry.of(node, x, y).rows, x.shape[3], y.shape[3], z.shape[3]
    require(builder.gpu.capability == HOPPER, node, "is fused as only Hopper's instructions can compute it")
    require(filters <= STREAM_COLUMNS and filters_2 <= max(SECOND), node,
            f"makes {filters} and {filters_2} channels: its kernel takes {STREAM_COLUMNS} and {max(SECOND)} at most")
    require(channels % TILE_VECTOR == filters % TILE_VECTOR == filters_2 % TILE_VECTOR == 0, node,
            f"has channels that are no multiples of {TILE_VECTOR}")
    way = QuantisedPair(channels, filters_2)
    require(way.stages >= 2, node, f"has {channels} channels: the weights do not fit into shared memory")
    tiles, tiles_2 = (Tiles.of(data.shape, made.shape, (1, 1), CHUNK) for data, made in ((x, y), (y, z)))
    assert tiles and tiles_2
    blocks = min(builder.gpu.num_multiprocessors, -(-rows // (TEAMS * TILE_ROWS)))
    builder.launch(
        node, "quantised_pair.cu", instance("quantised_pair", way.second), (1, blocks, 1), BLOCK,
        Tiled(In(x), tiles.data), Tiled(In(addend), tiles.output), Tiled(Out(y, over=addend), tiles.output),
        Tiled(Out(z), tiles_2.output), In(weight), In(multiplier), In(bias), In(weight_2), In(multiplier_2), In(bias_2),
        count(rows), tiles.walk, *map(ctypes.c_int, (channels, filters, filters_2)),
        ctypes.c_float(node["addend_scale"] / node["scale"]),
        *map(ctypes.c_int, (way.chunks, way.stages, way.results)), shared_bytes=way.shared_bytes,
        flops=2 * rows * filters * (channels + filters_2))


RULES: Rules = {"QuantisedConvolutionPair": pair}
