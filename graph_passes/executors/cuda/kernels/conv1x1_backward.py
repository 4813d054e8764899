"""The fused backward passes of 1x1 convolutions by dgrad_reduce.cu, dgrad_stream.cu and norm_backward.cu,
which are for the matrix instructions of Hopper."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

from graph_passes.executors.cuda.builder import Builder, Launches, require, require_hopper, rows_and_channels
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import Size, count, instance
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
from graph_passes.executors.cuda.kernels.dropout import drops, factors_of
from graph_passes.executors.cuda.kernels.second_grad import Second
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.passes.dgrad_reduce import MIN_CHANNELS

VECTOR_BYTES, FLOAT_BYTES = 16, 4
BLOCK: Size = (512, 1, 1)
TILE_ROWS = 64
_READ = "conv_grad", "weight", "data", "mask", "saved"
_WRITTEN = "masked_grad", "gamma_grad", "beta_grad"


class DgradReduce:
    """`dgrad_reduce`, for convolutions of at least 128 channels to `k`."""

    COLUMNS = MIN_CHANNELS

    def __init__(self, k: int) -> None:
        self.k = k

    def grid(self, rows: int, columns: int, num_multiprocessors: int) -> Size:
        """Blocks for columns and rows, one for each multiprocessor."""
        blocks = -(-columns // self.COLUMNS)
        return blocks, max(1, min(num_multiprocessors // blocks, -(-rows // TILE_ROWS))), 1

    def shared_bytes(self, add: bool, pair: bool) -> int:
        """sizeof(Shared<Shape<k, add, pair>>) of dgrad_reduce.cu."""
        weights = self.k * self.COLUMNS // VECTOR * VECTOR_BYTES
        stage = (self.k + (1 + add + pair) * self.COLUMNS) * TILE_ROWS // VECTOR * VECTOR_BYTES
        stages = 2 if self.k > 128 else 3 if self.k < 128 or pair else 4  # of two teams two each
        return weights + stages * stage


@dataclass(frozen=True)
class DgradStream:
    """How `dgrad_stream` divides the gradient of a convolution to `k` channels. A block keeps the weights of `COLUMNS`
    channels of data; the rest of its shared memory is for tiles of dy that are on their way, `stages` for each team,
    and for parts of what each warp writes, two, and reads: `ahead` of each of `read` tensors, which are two at most."""

    COLUMNS = MIN_CHANNELS
    PLACE_BYTES = TEAMS * TILE_ROWS * CHUNK_BYTES  # for a stage of each team, or a part of each warp

    k: int
    read: int

    @property
    def chunks(self) -> int:
        return -(-self.k // CHUNK)

    def weights(self, columns: int) -> Tiling:
        """As they lie, which is by rows of k."""
        return Tiling.of_matrix(self.k, columns, (CHUNK, CHUNK))

    @property
    def ahead(self) -> int:
        """As many as leave enough stages: two at least, or half a tile of dy. One always does."""
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
        """Blocks for columns and rows, one for each multiprocessor."""
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


def dgrad_reduce(builder: Builder, node: Node) -> None:
    """The gradient of a convolution's data, the residual's added to it, masked, and the sums of the BatchNorm (and its
    shortcut's) that made the data; by the kernel that the pass has chosen."""
    require_hopper(builder, node)
    if node["way"] == "dgrad_stream":
        _stream(builder, node)
        return

    def second(role: str) -> Buffer | None:
        return builder.optional_input(node, role, "single_norm")

    def second_output(role: str) -> Buffer | None:
        return None if node["single_norm"] else builder.output(node, role)

    dy, w, x, mask, saved = (builder.input(node, role) for role in _READ)
    x_2, addend = second("data_2"), Second.of(builder, node)
    dz, dgamma, dbeta = (builder.output(node, role) for role in _WRITTEN)
    (rows, columns), k, pair = rows_and_channels(node, x), w.shape[0], not node["single_norm"]
    sums = 2 + pair + (pair and drops(node))
    way = DgradReduce(k)
    grid = way.grid(rows, columns, builder.gpu.num_multiprocessors)
    builder.launch(node, "dgrad_reduce.cu", builder.kernel("dgrad_reduce", k, addend.kind, pair, drops(node)),
                   grid, BLOCK, In(dy), In(w), In(x), In(x_2), In(addend.grad), In(mask), Out(dz, over=addend.whole),
                   In(saved), In(second("saved_2")), Out(dgamma), Out(second_output("gamma_grad_2")), Out(dbeta),
                   Out(second_output("beta_grad_2")), builder.partials(sums * columns * grid[1]), builder.tickets,
                   count(rows), ctypes.c_int(columns), *factors_of(builder, node, rows), addend.grid,
                   shared_bytes=way.shared_bytes(addend.grad is not None, pair), flops=2 * rows * columns * k)


def _stream(builder: Builder, node: Node) -> None:
    """By `dgrad_stream`, with the sums of one BatchNorm."""
    dy, w, x, mask, saved = (builder.input(node, role) for role in _READ)
    addend = Second.of(builder, node)
    dz, dgamma, dbeta = (builder.output(node, role) for role in _WRITTEN)
    (rows, columns), k = rows_and_channels(node, x), w.shape[0]
    require(k % VECTOR == 0, node, f"makes {k} channels: its kernel takes multiples of {VECTOR}")
    way, tiles = DgradStream(k, 1 + (addend.grad is not None)), Tiles.of(dy.shape, x.shape, (1, 1))
    assert tiles
    grid, by_part = way.grid(rows, columns, builder.gpu.num_multiprocessors), tiles.output
    builder.launch(node, "dgrad_stream.cu", builder.kernel("dgrad_stream", addend.kind, drops(node)), grid,
                   STREAM_BLOCK, Tiled(In(dy), tiles.data), Tiled(In(w), way.weights(columns)), Tiled(In(x), by_part),
                   Tiled(In(addend.whole), by_part), Tiled(Out(dz, over=addend.whole), by_part), In(addend.compact),
                   In(mask), In(saved), Out(dgamma), Out(dbeta), builder.partials(2 * columns * grid[1]),
                   builder.tickets, count(rows), tiles.walk,
                   *map(ctypes.c_int, (columns, way.chunks, way.stages, way.ahead)), *factors_of(builder, node, rows),
                   addend.grid,
                   shared_bytes=way.shared_bytes, flops=2 * rows * columns * k)


class NormBackward:
    """`norm_backward`, for convolutions of 64 channels to `k`, or of 128 by clusters of two blocks with half of the `k`
    channels each: what a block makes of the weights' gradient fits into its registers."""

    OWN_COLUMNS = 64  # of the data's gradient, that a block finishes
    WARPS, PIECE_ROWS, X_PLACES = 4, 16, 5  # that prepare dz, and of each the pieces of x that have a place

    def __init__(self, k: int, columns: int) -> None:
        self.columns, self.blocks = columns, columns // self.OWN_COLUMNS
        self.k, self.stages = k // self.blocks, 3 if self.blocks == 1 else 2

    def grid(self, rows: int, num_multiprocessors: int) -> Size:
        """The blocks of a cluster, and clusters."""
        return self.blocks, max(1, min(num_multiprocessors // self.blocks, -(-rows // TILE_ROWS))), 1

    def tiling(self, rows: int, channels: int) -> Tiling:
        return Tiling.of_matrix(rows, channels, (self.PIECE_ROWS, CHUNK))

    @property
    def shared_bytes(self) -> int:
        """sizeof(Shared<Shape<k, columns>>) of norm_backward.cu."""
        weights = self.k * self.columns // VECTOR * VECTOR_BYTES
        stages = self.stages * (self.k + self.columns) * TILE_ROWS // VECTOR * VECTOR_BYTES
        x = self.WARPS * self.X_PLACES * self.PIECE_ROWS * CHUNK_BYTES
        received = TILE_ROWS * (8 if self.blocks == 1 else self.OWN_COLUMNS) * FLOAT_BYTES
        barriers = self.stages * (TILE_ROWS // self.PIECE_ROWS + 2) + self.WARPS * self.X_PLACES + 2
        return weights + stages + x + received + 3 * self.columns * FLOAT_BYTES + -(-barriers // 2) * VECTOR_BYTES


def norm_backward(builder: Builder, node: Node) -> None:
    """The gradients of the weights and of the data, or the masked one and the sums of the BatchNorm that reads it."""
    require_hopper(builder, node)
    reduces = node.op == "NormConvReduce"
    dz, x, behind = (In(builder.input(node, role)) for role in ("masked_grad", "data", "data_2"))
    w, dw = builder.input(node, "weight"), builder.output(node, "weight_grad")
    beta = builder.optional_input(node, "beta", "no_relu")
    (rows, k), columns = rows_and_channels(node, builder.input(node, "data")), w.shape[3]
    way = NormBackward(k, columns)
    of_k, of_columns = way.tiling(rows, k), way.tiling(rows, columns)
    grid = way.grid(rows, builder.gpu.num_multiprocessors)
    parts = Buffer(f"{node.name}:parts", (grid[1], k, columns), "float32")
    before = [builder.input(node, role) if reduces else None for role in ("saved_2", "gamma_2", "beta_2")]
    sums = [builder.output(node, role) if reduces else None for role in ("gamma_grad", "beta_grad")]
    flags = beta is not None, reduces, drops(node)
    builder.launch(node, "norm_backward.cu", builder.kernel("norm_backward", k, columns, *flags), grid, BLOCK,
                   Tiled(dz, of_k), Tiled(x, of_k), Tiled(behind, of_columns),
                   In(builder.input(node, "saved")), In(builder.input(node, "gamma")), In(beta),
                   In(builder.input(node, "gamma_grad")), In(builder.input(node, "beta_grad")), In(w), behind,
                   Out(builder.output(node, "masked_grad" if reduces else "data_grad")), *map(In, before),
                   *map(Out, sums), Out(parts), builder.partials(2 * columns * grid[1]), builder.tickets, count(rows),
                   *factors_of(builder, node, rows), shared_bytes=way.shared_bytes, flops=4 * rows * columns * k)
    sum_parts(builder, node, parts, dw)


def sum_parts(builder: Builder, node: Node, parts: Buffer, dw: Buffer) -> None:
    """dw from the parts that blocks have left of it, one behind the other."""
    vectors = math.prod(parts.shape[1:]) // VECTOR
    builder.launch(node, "norm_backward.cu", instance("sum_parts", dw.dtype), (-(-vectors // 16), 1, 1), (256, 1, 1),
                   In(parts), Out(dw), ctypes.c_int(parts.shape[0]), count(vectors))


LAUNCHES: Launches = {
    "DgradReduce": dgrad_reduce,
    "NormConvBackward": norm_backward,
    "NormConvReduce": norm_backward,
}
