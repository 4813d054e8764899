"""BatchNorm, with ReLU, or with addition and ReLU: both halves of its forward and backward pass. Also the gradient of
its data fused with the addition of another gradient of that data.

    before    dy, x, ..., dgamma, dbeta -> BatchNormReluBackwardApply -> dx;  dx, other -> elemwise_add `s`
    after     dy, x, ..., dgamma, dbeta, other -> BatchNormReluBackwardApplyAdd `s`

dx is neither written nor read. This pattern occurs in the blocks of ResNet v2: a sum is read by a BatchNorm and by the
shortcut around this BatchNorm.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import (
    APPLY_BLOCK,
    REDUCE_BLOCK,
    Builder,
    Launches,
    padded_rows,
    require,
    rows_and_channels,
)
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import count, threads
from graph_passes.executors.cuda.kernels.dropout import drops, factors_of
from graph_passes.executors.cuda.operands import In, InOut, Out
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node, Ref
from graph_passes.operators import Operator, Shape, shown_name
from graph_passes.operators.batch_norm import ATTRIBUTES, RUNNING
from graph_passes.operators.batch_norm_halves import backward_apply_body

# --- what kernels of other files take from here ---


def require_gamma(node: Node) -> None:
    require(not node["fix_gamma"], node, "has fix_gamma=True, which has no GPU lowering: set it to False")


def about_mean(sums: Buffer) -> ctypes.c_bool:
    """Whether the sums are about the mean. The mean is then the third row of `sums`."""
    return ctypes.c_bool(sums.shape[0] == 3)


def before(builder: Builder, node: Node) -> tuple[Any, ...]:
    """The kernel arguments of a BatchNorm that a node includes."""
    sums = builder.input(node, "sums")
    return (In(sums), about_mean(sums), *(In(builder.input(node, role)) for role in ("gamma", "beta")),
            Out(builder.output(node, "saved")), *(InOut(builder.input(node, role)) for role in RUNNING),
            ctypes.c_float(node["eps"]), ctypes.c_float(node["momentum"]))


_CUDA = Declarations("batch_norm.cuh")


class FastDivisor(ctypes.Structure):
    """Division of numbers below 2^31 by a fixed divisor, without a division instruction."""

    _fields_ = _CUDA.fields("FastDivisor")

    @classmethod
    def by(cls, value: int) -> FastDivisor:
        shift = (value - 1).bit_length()
        return cls(value, 2 ** (31 + shift) // value + 1, shift)


class Grid(ctypes.Structure):
    """`Grid` of batch_norm.cuh: the pixels of images for which a compact gradient has values."""

    _fields_ = _CUDA.fields("Grid", FastDivisor=FastDivisor)

    @classmethod
    def of(cls, shape: Shape, stride: tuple[int, int]) -> Grid:
        """Return the grid of images (N, H, W, C)."""
        size = shape[1:3]
        out_size = (-(-pixels // step) for pixels, step in zip(size, stride, strict=True))
        return cls(*map(FastDivisor.by, (*size, *stride)), *out_size)


class Second(NamedTuple):
    """The second gradient. `kind`: a value of `SecondGradient` in batch_norm.cuh."""

    kind: str
    grad: Buffer | None
    grid: Grid

    @property
    def whole(self) -> Buffer | None:
        """The second gradient if it has all pixels, otherwise None. The sum may overwrite this buffer."""
        return self.grad if self.kind == "WHOLE" else None

    @property
    def compact(self) -> Buffer | None:
        return self.grad if self.kind == "COMPACT" else None

    @classmethod
    def of(cls, builder: Builder, node: Node) -> Second:
        """The second gradient of a node: its input `out_grad_2`, if the node has this input."""
        grad, stride = builder.optional_input(node, "out_grad_2", "single_grad"), node["grad_stride"]
        if grad is None or not stride:
            return cls("WHOLE" if grad else "NONE", grad, Grid())
        return cls("COMPACT", grad, Grid.of(builder.shapes[node.input("data")], stride))


def relu_reductions(table: Candidates, gradient: Ref) -> Iterator[Candidate]:
    """The first half of the backward pass of a BatchNorm + ReLU that is the only reader of this gradient."""
    for reduction in table.readers(gradient, "BatchNormReluBackwardReduce"):
        if reduction["single_grad"]:
            yield reduction


def of_reduction(reduction: Candidate) -> list[Ref]:
    """The reduction's inputs besides the gradient."""
    return [reduction.input(role) for role in ("data", "gamma", "saved", "beta")]


def from_masked(table: Candidates, reduction: Candidate) -> Iterator[Node]:
    """Yield the second half that starts from the masked gradient, which the first half `reduction` keeps."""
    sums = reduction.output("gamma_grad"), reduction.output("beta_grad")
    for apply in table.readers(sums[0], "BatchNormReluBackwardApply"):
        data, gamma, saved = (apply.input(role) for role in ("data", "gamma", "saved"))
        yield apply.node.derive("BatchNormBackwardApply", apply.node.name,
                                (reduction.output("masked_grad"), data, gamma, saved, *sums))


def convolutions_after(table: Candidates, norm: Candidate, fits: Callable[[Node], bool]) -> Iterator[Candidate]:
    """Yield the convolutions that read the output of a BatchNorm's half, and whose output statistics are needed. Yields
    none if stochastic depth is between BatchNorm and convolution.
    """
    if norm.node.get("no_factors", True):
        for convolution in table.readers(norm.output("output"), "Convolution"):
            if (convolution["no_bias"] and fits(convolution.node)
                    and table.readers(convolution.output("output"), "BatchNormStatistics")):
                yield convolution


def with_conv(op: str, norm: Candidate, convolution: Candidate) -> Node:
    """The fusion of a BatchNorm's half and a convolution, as one node."""
    return Node(op, norm.node.name, (*norm.node.inputs, convolution.input("weight")),
                {**convolution.node.attrs, **norm.node.attrs})


# --- with another gradient ---


def norm_grad_add(table: Candidates, add: Candidate) -> Iterator[Node]:
    """Yield the second half of a BatchNorm's backward pass that also does the elemwise_add `add`."""
    for one, other in (add.node.inputs, reversed(add.node.inputs)):
        for apply in table.makers(one, "BatchNormBackwardApply", "BatchNormReluBackwardApply"):
            if apply.node.get("no_factors", True):
                yield apply.node.derive(f"{apply.op}Add", add.node.name, (*apply.node.inputs, other))


# --- launches ---


def statistics(builder: Builder, node: Node) -> None:
    """Launch the sums over the input."""
    require_gamma(node)
    x = builder.input(node, "data")
    rows, channels = rows_and_channels(node, x)
    grid = builder.reduce_grid(rows, channels)
    builder.launch(node, "batch_norm.cu", builder.kernel("batch_norm_statistics"), grid, REDUCE_BLOCK,
                   In(x), Out(builder.output(node)), builder.partials(2 * channels * grid[1]), builder.tickets,
                   count(rows), ctypes.c_int(channels))


def apply(builder: Builder, node: Node) -> None:
    """Launch the forward pass in training: the output, from the input and its sums."""
    _apply(builder, node, builder.input(node, "sums"))


def inference(builder: Builder, node: Node) -> None:
    """Launch inference: the output, from the input and the running statistics, which are converted to sums."""
    x = builder.input(node, "data")
    rows, channels = rows_and_channels(node, x)
    sums = Buffer(f"{node.name}:sums", (3, channels), "float32")
    mean, var = (builder.input(node, role) for role in RUNNING)
    builder.launch(node, "batch_norm.cu", "sums_from_running", *threads(channels), In(mean), In(var), Out(sums),
                   count(rows), ctypes.c_int(channels))
    _apply(builder, node, sums)


def _apply(builder: Builder, node: Node, sums: Buffer) -> None:
    require_gamma(node)
    training, kind = node.op.endswith("Apply"), shown_name(node.op)
    add, relu = kind == "BatchNormAddRelu", kind != "BatchNorm"
    x, y = builder.input(node, "data"), builder.output(node)
    rows, channels = rows_and_channels(node, x)
    running = [InOut(builder.input(node, role)) if training else In(None) for role in RUNNING]
    builder.launch(node, "batch_norm.cu", builder.kernel("batch_norm_apply", add, relu, drops(node)),
                   builder.grid(rows, channels), APPLY_BLOCK, In(x),
                   In(builder.input(node, "addend") if add else None), In(sums), about_mean(sums),
                   In(builder.input(node, "gamma")), In(builder.input(node, "beta")), Out(y, over=x),
                   Out(builder.output(node, "mask") if training and add else None),
                   Out(builder.output(node, "saved") if training else None), *running,
                   ctypes.c_float(node["eps"]), ctypes.c_float(node["momentum"]), count(rows), ctypes.c_int(channels),
                   *factors_of(builder, node, rows))


# Operator -> the source of ReLU's mask, as named in batch_norm.cu.
_RELU = {"BatchNorm": "NO_RELU", "BatchNormRelu": "RECOMPUTED", "BatchNormAddRelu": "BITS"}


def backward_reduce(builder: Builder, node: Node) -> None:
    """Launch the sums (the gradients of gamma and beta), and the masked gradient if it is kept."""
    relu = _RELU[shown_name(node.op)]
    dy, x = builder.input(node, "out_grad"), builder.input(node, "data")
    second = Second.of(builder, node)
    beta = builder.input(node, "beta") if relu == "RECOMPUTED" else None
    mask = builder.input(node, "mask") if relu == "BITS" else None
    dz = builder.output(node, "masked_grad") if node.num_outputs == 3 else None
    rows, channels = rows_and_channels(node, x)
    grid = builder.reduce_grid(rows, channels)
    flags = second.kind, dz is not None, drops(node)
    builder.launch(node, "batch_norm.cu", builder.kernel("batch_norm_backward_reduce", relu, *flags), grid,
                   REDUCE_BLOCK, In(x), In(dy), In(second.grad), In(mask), Out(dz, over=dy),
                   In(builder.input(node, "saved")), In(builder.input(node, "gamma")), In(beta),
                   Out(builder.output(node, "gamma_grad")), Out(builder.output(node, "beta_grad")),
                   builder.partials(2 * channels * grid[1]), builder.tickets,
                   count(rows), ctypes.c_int(channels), *factors_of(builder, node, rows), second.grid)


def backward_apply(builder: Builder, node: Node) -> None:
    """Launch the gradient of the input, from the sums and either the masked gradient or the output's gradient. Adds
    the other gradient of the input, if there is one."""
    recompute, add = node.op.startswith("BatchNormRelu"), node.op.endswith("Add")
    source, x = builder.tensor(node.inputs[0]), builder.input(node, "data")
    rows, channels = rows_and_channels(node, x)
    builder.launch(node, "batch_norm.cu",
                   builder.kernel("batch_norm_backward_apply", "RECOMPUTED" if recompute else "NO_RELU", add,
                                  drops(node)),
                   builder.grid(rows, channels), APPLY_BLOCK, In(x), In(source),
                   In(builder.input(node, "addend") if add else None), Out(builder.output(node), over=source),
                   In(builder.input(node, "saved")), In(builder.input(node, "gamma")),
                   In(builder.input(node, "beta") if recompute else None), In(builder.input(node, "gamma_grad")),
                   In(builder.input(node, "beta_grad")), count(rows), ctypes.c_int(channels),
                   *factors_of(builder, node, rows))


def refuse(builder: Builder, node: Node) -> None:
    """Refuse a BatchNorm that no pass of the training step has split into halves."""
    require(False, node, "has use_global_stats=True, which has no GPU lowering in training: set it to False")


_SUMS = ("gamma_grad", "beta_grad")
OPERATORS = (
    Operator("BatchNormBackwardApplyAdd", ("masked_grad", "data", "gamma", "saved", *_SUMS, "addend"),
             attrs=ATTRIBUTES, outputs=("data_grad",), in_place={"data_grad": ("masked_grad", "addend")},
             body=backward_apply_body, forward="BatchNorm", plain=True, fused=True),
    Operator("BatchNormReluBackwardApplyAdd", ("out_grad", "data", "gamma", "saved", "beta", *_SUMS, "addend"),
             attrs=ATTRIBUTES, outputs=("data_grad",), in_place={"data_grad": ("out_grad", "addend")},
             body=backward_apply_body, forward="BatchNormRelu", plain=True, fused=True),
)
RULES = (("elemwise_add", norm_grad_add),)
LAUNCHES: Launches = {
    "BatchNorm": padded_rows(inference),
    "BatchNormRelu": padded_rows(inference),
    "BatchNormAddRelu": padded_rows(inference),
    "BatchNormTrain": refuse,
    "BatchNormReluTrain": refuse,
    "BatchNormAddReluTrain": refuse,
    "BatchNormStatistics": padded_rows(statistics),
    "BatchNormApply": padded_rows(apply),
    "BatchNormReluApply": padded_rows(apply),
    "BatchNormAddReluApply": padded_rows(apply),
    "BatchNormBackwardReduce": padded_rows(backward_reduce),
    "BatchNormReluBackwardReduce": padded_rows(backward_reduce),
    "BatchNormAddReluBackwardReduce": padded_rows(backward_reduce),
    "BatchNormBackwardApply": padded_rows(backward_apply),
    "BatchNormReluBackwardApply": padded_rows(backward_apply),
    "BatchNormBackwardApplyAdd": padded_rows(backward_apply),
    "BatchNormReluBackwardApplyAdd": padded_rows(backward_apply),
}
