"""The gradient of a 1x1 convolution's data, with the sums of the BatchNorm + add + ReLU (or pair of BatchNorms) that
made the data.

    before    dy, weight -> ConvolutionDgrad -> dx;  dx, addend, x, mask -> BatchNormAddReluBackwardReduce `b`
    after     dy, weight, addend, x, mask -> DgradReduce `b` -> dgamma, dbeta, dz

dx is not written. For 16-bit types and Hopper GPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches, require_hopper, rows_and_channels
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import Size, count
from graph_passes.executors.cuda.kernels.batch_norm import Second
from graph_passes.executors.cuda.kernels.conv1x1_forward import is_product
from graph_passes.executors.cuda.kernels.dropout import drops, factors_of
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node, Ref
from graph_passes.operators import Operator
from graph_passes.operators.base import DATA_SHAPE, GRAD_STRIDE, SECOND_GRAD, SINGLE_GRAD, TRUE
from graph_passes.operators.batch_norm import ATTRIBUTES
from graph_passes.operators.body import Body
from graph_passes.operators.convolution import CONVOLUTION
from graph_passes.operators.dropout import FACTORS, dropping

_CUDA = Declarations("dgrad_reduce.cu")
_SHAPE = "Shape<64, false, false>"  # an instance of Shape; the constants read here are equal in all instances
BLOCK: Size = (_CUDA.value(f"{_SHAPE}::THREADS"), 1, 1)
TILE_ROWS = _CUDA.value(f"{_SHAPE}::ROWS")
READ = "conv_grad", "weight", "data", "mask", "saved"
WRITTEN = "masked_grad", "gamma_grad", "beta_grad"
# supported output channels of the convolution: chunks of 64 whose tiles fit into shared memory
OUT_CHANNELS = (64, 128, 256)
MIN_CHANNELS = _CUDA.value(f"{_SHAPE}::COLUMNS")  # fewest channels of the convolution's data
PAIR = "BatchNormPairBackwardReduce"


def dgrad_reduce(table: Candidates, reduction: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for one of the reductions."""
    for dgrad, gradient in reduced_gradients(table, reduction):
        if dgrad["num_filter"] in OUT_CHANNELS:
            yield fused("DgradReduce", reduction.node, dgrad, gradient, single_norm=reduction.op != PAIR)


def reduced_gradients(table: Candidates, reduction: Candidate) -> Iterator[tuple[Node, Ref]]:
    """Yield the gradients of convolutions' data that the reduction reads, each with its tensor. A compact gradient is
    left out, because the kernel can read it only as the addend.
    """
    gradients = [reduction.input("out_grad")]
    if not reduction["single_grad"] and not reduction["grad_stride"]:
        gradients.append(reduction.input("out_grad_2"))
    if len({*gradients}) < len(gradients):  # the reduction adds a tensor to itself
        return
    for gradient in gradients:
        for dgrad in table.makers(gradient, "ConvolutionDgrad"):
            if is_product(dgrad.node) and dgrad["data_shape"][3] >= MIN_CHANNELS:
                yield dgrad.node, gradient


def fused(op: str, reduction: Node, dgrad: Node, gradient: Ref, **attrs: Any) -> Node:
    """The fusion of both nodes as one node; `gradient` is the tensor between the two."""
    roles = ("data", "saved", "data_2", "saved_2") if reduction.op == PAIR else ("data", "saved")
    norms = [reduction.input(role) for role in roles]
    gradients = [reduction.input("out_grad")]
    if not reduction["single_grad"]:
        gradients.append(reduction.input("out_grad_2"))
    addend = [ref for ref in gradients if ref != gradient]
    factors = [] if reduction["no_factors"] else [reduction.input("factors")]
    inputs = (*dgrad.inputs, reduction.input("mask"), *norms, *factors, *addend)
    return Node(op, reduction.name, inputs,
                {**dgrad.attrs, **reduction.attrs, **attrs, "single_grad": not addend})


def reduce_body(b: Body) -> list[Any]:
    """The body: the sums of one BatchNorm or of a pair."""
    gradient = b.gate(b.total(b.dgrad(b["conv_grad"], b["weight"])), b["mask"])
    return [*b.reduced(b.dropped(gradient)), gradient, *(b.reduced(gradient, "_2") if b.has("data_2") else [])]


class DgradReduce:
    """Geometry of `dgrad_reduce`, for convolutions from at least 128 channels to `k` channels."""

    COLUMNS = MIN_CHANNELS

    def __init__(self, k: int) -> None:
        self.k = k

    def grid(self, rows: int, columns: int, num_multiprocessors: int) -> Size:
        """The grid: blocks for columns and for rows, one block per multiprocessor."""
        blocks = -(-columns // self.COLUMNS)
        return blocks, max(1, min(num_multiprocessors // blocks, -(-rows // TILE_ROWS))), 1

    def shared_bytes(self, add: bool, pair: bool) -> int:
        return _CUDA.sizeof(f"Shared<Shape<{self.k}, {int(add)}, {int(pair)}>>")


def launch(builder: Builder, node: Node) -> None:
    """Launch the gradient of a convolution's data, plus the residual's gradient, masked. The launch also computes the
    sums of the BatchNorm that made the data, and of the shortcut's BatchNorm if there is one.
    """
    require_hopper(builder, node)

    def second(role: str) -> Buffer | None:
        return builder.optional_input(node, role, "single_norm")

    def second_output(role: str) -> Buffer | None:
        return None if node["single_norm"] else builder.output(node, role)

    dy, w, x, mask, saved = (builder.input(node, role) for role in READ)
    x_2, addend = second("data_2"), Second.of(builder, node)
    dz, dgamma, dbeta = (builder.output(node, role) for role in WRITTEN)
    (rows, columns), k, pair = rows_and_channels(node, x), w.shape[0], not node["single_norm"]
    sums = 2 + pair + (pair and drops(node))
    geometry = DgradReduce(k)
    grid = geometry.grid(rows, columns, builder.gpu.num_multiprocessors)
    builder.launch(node, "dgrad_reduce.cu", builder.kernel("dgrad_reduce", k, addend.kind, pair, drops(node)),
                   grid, BLOCK, In(dy), In(w), In(x), In(x_2), In(addend.grad), In(mask), Out(dz, over=addend.whole),
                   In(saved), In(second("saved_2")), Out(dgamma), Out(second_output("gamma_grad_2")), Out(dbeta),
                   Out(second_output("beta_grad_2")), builder.partials(sums * columns * grid[1]), builder.tickets,
                   count(rows), ctypes.c_int(columns), *factors_of(builder, node, rows), addend.grid,
                   shared_bytes=geometry.shared_bytes(addend.grad is not None, pair), flops=2 * rows * columns * k)


INPUTS = ("conv_grad", "weight", "mask", "data", "saved")
ATTRS = CONVOLUTION | ATTRIBUTES | DATA_SHAPE | dropping(["factors"]) | SINGLE_GRAD | GRAD_STRIDE

OPERATORS = (
    Operator("DgradReduce", (*INPUTS, "data_2", "saved_2", "factors", "out_grad_2"),
             attrs=ATTRS | {"single_norm": TRUE},
             outputs=("gamma_grad", "beta_grad", "masked_grad", "gamma_grad_2", "beta_grad_2"),
             optional={**SECOND_GRAD, **FACTORS,
                       **dict.fromkeys(("data_2", "saved_2", "gamma_grad_2", "beta_grad_2"), "single_norm")},
             in_place={"masked_grad": ("out_grad_2",)}, body=reduce_body, forward="Convolution", fused=True),
)
RULES = tuple((op, dgrad_reduce) for op in ("BatchNormAddReluBackwardReduce", PAIR))
LAUNCHES: Launches = {"DgradReduce": launch}
