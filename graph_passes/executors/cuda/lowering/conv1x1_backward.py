"""The fused backward passes of 1x1 convolutions by dgrad_reduce.cu and norm_backward.cu, which are for the matrix
instructions of Hopper."""

from __future__ import annotations

import ctypes

from graph_passes.executors.cuda.kernels import HOPPER, Size, count, instance
from graph_passes.executors.cuda.lowering.builder import Builder, Rules, require, rows_and_channels
from graph_passes.executors.cuda.lowering.dropout import drops, factors_of
from graph_passes.executors.cuda.lowering.operands import In, Out
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.passes.dgrad_reduce import MIN_CHANNELS
from graph_passes.passes.norm_backward import CHANNELS

VECTOR_BYTES, FLOAT_BYTES = 16, 4
BLOCK: Size = (512, 1, 1)
TILE_ROWS = 64


def _require_hopper(builder: Builder, node: Node) -> None:
    require(builder.gpu.capability == HOPPER, node, "is fused as only Hopper's instructions can compute it")


def _stages(k: int) -> int:
    """Tiles of rows that have a place in shared memory: `Shape::STAGES` of both kernels."""
    return 2 if k > 128 else 3


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
        return weights + _stages(self.k) * stage


def dgrad_reduce(builder: Builder, node: Node) -> None:
    """The gradient of a convolution's data, the residual's added to it, masked, and the sums of the BatchNorm (and its
    shortcut's) that made the data."""
    _require_hopper(builder, node)

    def second(role: str) -> Buffer | None:
        return builder.optional_input(node, role, "single_norm")

    def second_output(role: str) -> Buffer | None:
        return None if node["single_norm"] else builder.output(node, role)

    dy, w, x, mask, saved = (builder.input(node, role) for role in ("conv_grad", "weight", "data", "mask", "saved"))
    addend = builder.optional_input(node, "out_grad_2", "single_grad")
    dz, dgamma, dbeta = (builder.output(node, role) for role in ("masked_grad", "gamma_grad", "beta_grad"))
    (rows, columns), k, flags = rows_and_channels(node, x), w.shape[0], (addend is not None, not node["single_norm"])
    way = DgradReduce(k)
    grid = way.grid(rows, columns, builder.gpu.num_multiprocessors)
    sums = 2 + flags[1] + (flags[1] and drops(node))
    builder.launch(node, "dgrad_reduce.cu", builder.kernel("dgrad_reduce", k, *flags, drops(node)), grid, BLOCK,
                   In(dy), In(w), In(x), In(second("data_2")), In(addend), In(mask), Out(dz, over=addend), In(saved),
                   In(second("saved_2")), Out(dgamma), Out(second_output("gamma_grad_2")), Out(dbeta),
                   Out(second_output("beta_grad_2")), builder.partials(sums * columns * grid[1]),
                   builder.tickets, count(rows), ctypes.c_int(columns), *factors_of(builder, node, rows),
                   shared_bytes=way.shared_bytes(*flags), flops=2 * rows * columns * k)


class NormBackward:
    """`norm_backward`, for convolutions of 64 channels to `k`: the weights' gradient fits into a block's registers."""

    COLUMNS = CHANNELS

    def __init__(self, k: int) -> None:
        self.k = k

    def grid(self, rows: int, num_multiprocessors: int) -> Size:
        return 1, min(num_multiprocessors, -(-rows // TILE_ROWS)), 1

    @property
    def shared_bytes(self) -> int:
        """sizeof(Shared<Shape<k>>) of norm_backward.cu."""
        weights = self.k * self.COLUMNS // VECTOR * VECTOR_BYTES
        stage = (2 * self.k + 2 * self.COLUMNS) * TILE_ROWS // VECTOR * VECTOR_BYTES
        return weights + _stages(self.k) * stage + (4 * self.k + 3 * self.COLUMNS) * FLOAT_BYTES


def norm_backward(builder: Builder, node: Node) -> None:
    """The gradients of the weights and of the data, or the masked one and the sums of the BatchNorm that reads it."""
    _require_hopper(builder, node)
    reduces = node.op == "NormConvReduce"
    x, w, dw = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node, "weight_grad")
    beta = builder.optional_input(node, "beta", "no_relu")
    (rows, k), columns, way = rows_and_channels(node, x), w.shape[3], NormBackward(w.shape[0])
    grid = way.grid(rows, builder.gpu.num_multiprocessors)
    parts = Buffer(f"{node.name}:parts", (grid[1], k, columns), "float32")
    before = [builder.input(node, role) if reduces else None for role in ("saved_2", "gamma_2", "beta_2")]
    sums = [builder.output(node, role) if reduces else None for role in ("gamma_grad", "beta_grad")]
    flags = beta is not None, reduces, drops(node)
    builder.launch(node, "norm_backward.cu", builder.kernel("norm_backward", k, *flags), grid, BLOCK,
                   In(builder.input(node, "masked_grad")), In(x), In(builder.input(node, "saved")),
                   In(builder.input(node, "gamma")), In(beta), In(builder.input(node, "gamma_grad")),
                   In(builder.input(node, "beta_grad")), In(w), In(builder.input(node, "data_2")),
                   Out(builder.output(node, "masked_grad" if reduces else "data_grad")), *map(In, before),
                   *map(Out, sums), Out(parts), builder.partials(2 * columns * grid[1]), builder.tickets, count(rows),
                   *factors_of(builder, node, rows), shared_bytes=way.shared_bytes, flops=4 * rows * columns * k)
    vectors = k * columns // VECTOR
    builder.launch(node, "norm_backward.cu", instance("sum_parts", dw.dtype), (-(-vectors // 16), 1, 1), (256, 1, 1),
                   In(parts), Out(dw), ctypes.c_int(grid[1]), count(vectors))


RULES: Rules = {
    "DgradReduce": dgrad_reduce,
    "NormConvBackward": norm_backward,
    "NormConvReduce": norm_backward,
}
