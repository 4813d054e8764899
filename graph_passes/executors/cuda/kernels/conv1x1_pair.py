"""The last convolution of a residual block and the first convolution of the next block, in one launch, for inference.

    before    x, weight, bias, shortcut -> ConvolutionAddRelu `r` -> y;  y, weight_2, bias_2 -> ConvolutionRelu -> z
    after     x, weight, bias, shortcut, weight_2, bias_2 -> Conv1x1Pair `r` -> y, z

For 16-bit types and Hopper GPUs. y is written because the next sum reads it, too. z is computed from y while y is still
in registers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches, require, require_hopper, rows_and_channels
from graph_passes.executors.cuda.declarations import Declarations
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
    is_product,
)
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.graph import Node
from graph_passes.operators import Operator
from graph_passes.operators.base import Attribute
from graph_passes.operators.body import Body
from graph_passes.operators.convolution import CONVOLUTION

_CUDA = Declarations("conv1x1_pair.cu")
BLOCK: Size = (_CUDA.value("PAIR_THREADS"), 1, 1)
COLUMNS = _CUDA.value("COLUMNS")  # most columns of the first product
SECOND = (64, 128)  # columns of the second product
CONTROL_BYTES = _CUDA.sizeof("PairControl")
PLACE_BYTES = TEAMS * TILE_ROWS * CHUNK_BYTES  # bytes of one stage of each team, which equal one result of each warp


def conv1x1_pair(table: Candidates, first: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a ConvolutionAddRelu `first`."""
    output = first.output("output")
    for second in table.readers(output, "ConvolutionRelu"):
        if second.input("data") == output and is_product(first.node) and is_product(second.node):
            inputs = (*first.node.inputs, *second.node.inputs[1:])
            yield first.node.derive("Conv1x1Pair", first.node.name, inputs, num_filter_2=second["num_filter"])


def _body(b: Body) -> list[Any]:
    y = b.stored(b.epilogue(b.conv(b["data"], b["weight"]), relu=True))
    z = b.conv(y, b["weight_2"], num_filter=b.node["num_filter_2"])
    return [y, b.relu(b.bias(z, b["bias_2"]))]


@dataclass(frozen=True)
class Conv1x1Pair:
    """How `conv1x1_pair` divides its work: a convolution from `channels` (C) to `filters` (K), and a convolution from
    there to `filters_2` (K_2). A block keeps the weights of both convolutions. The rest of its shared memory is used as
    in `Conv1x1Forward`.
    """

    channels: int
    filters: int
    filters_2: int
    results: int = 3  # as in Conv1x1Forward

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
    geometry = Conv1x1Pair(channels, filters, filters_2)
    require(filters <= COLUMNS and filters_2 <= max(SECOND), node,
            f"makes {filters} and {filters_2} channels: its kernel takes {COLUMNS} and {max(SECOND)} at most")
    require(geometry.stages >= 2, node, f"has {channels} channels: the weights do not fit into shared memory")
    tiles, tiles_2 = Tiles.of(x.shape, y.shape, (1, 1)), Tiles.of(y.shape, z.shape, (1, 1))
    assert tiles and tiles_2
    weights, weights_2 = geometry.weights
    grid = geometry.grid(-(-rows // tiles.walk.rows), builder.gpu.num_multiprocessors)
    builder.launch(node, "conv1x1_pair.cu", builder.kernel("conv1x1_pair", geometry.second), grid, BLOCK,
                   Tiled(In(x), tiles.data), Tiled(In(w), weights), Tiled(In(addend), tiles.output),
                   Tiled(Out(y, over=addend), tiles.output), Tiled(In(w_2), weights_2),
                   Tiled(Out(z), tiles_2.output), In(bias), In(bias_2), count(rows), tiles.walk,
                   *map(ctypes.c_int, (filters, filters_2, geometry.chunks, geometry.stages, geometry.results)),
                   shared_bytes=geometry.shared_bytes, flops=2 * rows * filters * (channels + filters_2))


OPERATORS = (
    Operator("Conv1x1Pair", ("data", "weight", "bias", "addend", "weight_2", "bias_2"),
             attrs={**CONVOLUTION, "num_filter_2": Attribute(int)}, outputs=("output", "output_2"), body=_body,
             forward="Convolution", fused=True),
)
RULES = (("ConvolutionAddRelu", conv1x1_pair),)
LAUNCHES: Launches = {"Conv1x1Pair": pair}
