"""The gradient of a 1x1 convolution's data, with the sums of the BatchNorm + add + ReLU that made the data. This kernel
is for convolutions with more output channels than `dgrad_reduce` supports. It does not support pairs of BatchNorms.

    before    dy, weight -> ConvolutionDgrad -> dx;  dx, addend, x, mask -> BatchNormAddReluBackwardReduce `b`
    after     dy, weight, addend, x, mask -> DgradStream `b` -> dgamma, dbeta, dz

dx is not written. For 16-bit types and Hopper GPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches, require, require_hopper, rows_and_channels
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import Size, count
from graph_passes.executors.cuda.kernels.batch_norm import Second
from graph_passes.executors.cuda.kernels.conv1x1_forward import BLOCK as STREAM_BLOCK
from graph_passes.executors.cuda.kernels.conv1x1_forward import (
    CHUNK,
    CHUNK_BYTES,
    CONTROL_BYTES,
    MAX_STAGES,
    SHARED_BYTES,
    TEAMS,
    Tiles,
)
from graph_passes.executors.cuda.kernels.dgrad_reduce import (
    ATTRS,
    INPUTS,
    MIN_CHANNELS,
    READ,
    TILE_ROWS,
    WRITTEN,
    fused,
    reduce_body,
    reduced_gradients,
)
from graph_passes.executors.cuda.kernels.dropout import drops, factors_of
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.graph import Node
from graph_passes.operators import Operator
from graph_passes.operators.base import SECOND_GRAD
from graph_passes.operators.dropout import FACTORS

# Supported output channels of the convolution. For fewer channels dgrad_reduce is faster (docs/performance.md).
STREAM_CHANNELS = range(129, 512 + 1)


def dgrad_stream(table: Candidates, reduction: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a BatchNormAddReluBackwardReduce `reduction`."""
    for dgrad, gradient in reduced_gradients(table, reduction):
        if dgrad["num_filter"] in STREAM_CHANNELS:
            yield fused("DgradStream", reduction.node, dgrad, gradient)


@dataclass(frozen=True)
class DgradStream:
    """How `dgrad_stream` divides the gradient of a convolution to `k` channels. A block keeps the weights of `COLUMNS`
    channels of the data. The rest of its shared memory holds tiles of dy in flight, `stages` for each team, and for
    each warp two parts of its output and `ahead` parts of each of `read` input tensors (at most two)."""

    COLUMNS = MIN_CHANNELS
    PLACE_BYTES = TEAMS * TILE_ROWS * CHUNK_BYTES  # bytes of one stage of each team, which equal one part of each warp

    k: int
    read: int

    @property
    def chunks(self) -> int:
        return -(-self.k // CHUNK)

    def weights(self, columns: int) -> Tiling:
        """The weights' layout in the parameter: by rows of k."""
        return Tiling.of_matrix(self.k, columns, (CHUNK, CHUNK))

    @property
    def ahead(self) -> int:
        """Number of parts of x and of the addend that are read ahead: as many as leave enough stages, namely two stages
        or half a tile of dy. One part always leaves enough.
        """
        enough = (3, 4), (2, max(2, self.chunks // 2)), (1, 2)
        return next(ahead for ahead, stages in enough if self._stages(ahead) >= stages)

    @property
    def stages(self) -> int:
        return min(MAX_STAGES, self._stages(self.ahead))

    @property
    def shared_bytes(self) -> int:
        places = self.stages + self._results(self.ahead)
        return CONTROL_BYTES + self._weight_bytes + places * self.PLACE_BYTES

    def grid(self, rows: int, columns: int, num_multiprocessors: int) -> Size:
        """The grid: blocks for columns and for rows, one block per multiprocessor."""
        blocks, pairs = -(-columns // self.COLUMNS), -(-rows // (TEAMS * TILE_ROWS))
        return blocks, max(1, min(num_multiprocessors // blocks, pairs)), 1

    @property
    def _weight_bytes(self) -> int:
        return self.chunks * self.COLUMNS * CHUNK_BYTES

    def _results(self, ahead: int) -> int:
        return 2 + ahead * self.read

    def _stages(self, ahead: int) -> int:
        free = SHARED_BYTES - CONTROL_BYTES - self._weight_bytes
        return free // self.PLACE_BYTES - self._results(ahead)


def launch(builder: Builder, node: Node) -> None:
    require_hopper(builder, node)
    dy, w, x, mask, saved = (builder.input(node, role) for role in READ)
    addend = Second.of(builder, node)
    dz, dgamma, dbeta = (builder.output(node, role) for role in WRITTEN)
    (rows, columns), k = rows_and_channels(node, x), w.shape[0]
    require(k % VECTOR == 0, node, f"makes {k} channels: its kernel takes multiples of {VECTOR}")
    geometry, tiles = DgradStream(k, 1 + (addend.grad is not None)), Tiles.of(dy.shape, x.shape, (1, 1))
    assert tiles
    grid, by_part = geometry.grid(rows, columns, builder.gpu.num_multiprocessors), tiles.output
    builder.launch(node, "dgrad_stream.cu", builder.kernel("dgrad_stream", addend.kind, drops(node)), grid,
                   STREAM_BLOCK, Tiled(In(dy), tiles.data), Tiled(In(w), geometry.weights(columns)),
                   Tiled(In(x), by_part), Tiled(In(addend.whole), by_part), Tiled(Out(dz, over=addend.whole), by_part),
                   In(addend.compact), In(mask), In(saved), Out(dgamma), Out(dbeta),
                   builder.partials(2 * columns * grid[1]), builder.tickets, count(rows), tiles.walk,
                   *map(ctypes.c_int, (columns, geometry.chunks, geometry.stages, geometry.ahead)),
                   *factors_of(builder, node, rows), addend.grid,
                   shared_bytes=geometry.shared_bytes, flops=2 * rows * columns * k)


OPERATORS = (
    Operator("DgradStream", (*INPUTS, "factors", "out_grad_2"), attrs=ATTRS,
             outputs=("gamma_grad", "beta_grad", "masked_grad"), optional={**SECOND_GRAD, **FACTORS},
             in_place={"masked_grad": ("out_grad_2",)}, form_of="DgradReduce", body=reduce_body, forward="Convolution",
             fused=True),
)
RULES = (("BatchNormAddReluBackwardReduce", dgrad_stream),)
LAUNCHES: Launches = {"DgradStream": launch}
