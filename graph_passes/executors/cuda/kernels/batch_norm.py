"""BatchNorm, with ReLU, or the sum with another tensor and ReLU: the halves of its forward and of its backward pass."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from graph_passes.executors.cuda.builder import (
    APPLY_BLOCK,
    REDUCE_BLOCK,
    Builder,
    Launches,
    require,
    rows_and_channels,
)
from graph_passes.executors.cuda.kernel_library import count, threads
from graph_passes.executors.cuda.kernels.dropout import drops, factors_of
from graph_passes.executors.cuda.kernels.second_grad import Second
from graph_passes.executors.cuda.operands import In, InOut, Out
from graph_passes.executors.cuda.program import Buffer
from graph_passes.executors.cuda.statistics_group import MAX_ARRAYS, MAX_VALUES, THREADS
from graph_passes.graph import Node
from graph_passes.operators import shown_name
from graph_passes.operators.batch_norm import RUNNING


def require_gamma(node: Node) -> None:
    require(not node["fix_gamma"], node, "has fix_gamma=True, which has no GPU lowering: set it to False")


def about_mean(sums: Buffer) -> ctypes.c_bool:
    """Whether they are about the mean, which is their third row."""
    return ctypes.c_bool(sums.shape[0] == 3)


def before(builder: Builder, node: Node) -> tuple[Any, ...]:
    """Of a node that does a BatchNorm on the way: what its kernel takes for `Before` of kernels/batch_norm.cuh."""
    sums = builder.input(node, "sums")
    return (In(sums), about_mean(sums), *(In(builder.input(node, role)) for role in ("gamma", "beta")),
            Out(builder.output(node, "saved")), *(InOut(builder.input(node, role)) for role in RUNNING),
            ctypes.c_float(node["eps"]), ctypes.c_float(node["momentum"]))


def statistics(builder: Builder, node: Node) -> None:
    """The sums of the input."""
    require_gamma(node)
    x = builder.input(node, "data")
    rows, channels = rows_and_channels(node, x)
    grid = builder.reduce_grid(rows, channels)
    builder.launch(node, "batch_norm.cu", builder.kernel("batch_norm_statistics"), grid, REDUCE_BLOCK,
                   In(x), Out(builder.output(node)), builder.partials(2 * channels * grid[1]), builder.tickets,
                   count(rows), ctypes.c_int(channels))


def apply(builder: Builder, node: Node) -> None:
    """In training: the output, from the input and its sums."""
    _apply(builder, node, builder.input(node, "sums"))


def inference(builder: Builder, node: Node) -> None:
    """In inference: the output, from the input and the running statistics, of which sums are made."""
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


# How batch_norm.cu knows where ReLU let the gradient through.
_RELU = {"BatchNorm": "NO_RELU", "BatchNormRelu": "RECOMPUTED", "BatchNormAddRelu": "BITS"}


def backward_reduce(builder: Builder, node: Node) -> None:
    """The sums, which are the gradients of gamma and beta, and the masked gradient where it is kept."""
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
    """The gradient of the input, from the sums, and the masked gradient or else that of the output. With the other
    gradient of the input, if there is one to add."""
    recompute, add = node.op.startswith("BatchNormRelu"), node.op.endswith("Add")
    source, x = builder.buffers[node.inputs[0]], builder.input(node, "data")
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


def group_statistics(builder: Builder, node: Node) -> None:
    """The sums over the rows of all of the group, from those over this GPU's."""
    sums, result = builder.input(node, "sums"), builder.output(node)
    channels = sums.shape[1]
    _require_shared(node, channels)
    assert builder.group
    rows = math.prod(builder.shapes[node.input("data")]) // channels
    builder.launch(node, "batch_norm_group.cu", "group_statistics", (-(-channels // THREADS), 1, 1), (THREADS, 1, 1),
                   In(sums), about_mean(sums), Out(result), count(rows), *builder.group.arguments(channels))


def _require_shared(node: Node, channels: int) -> None:
    require(channels <= MAX_VALUES, node, f"has {channels} channels: a group shares {MAX_VALUES} at most")


def group_mean(builder: Builder, node: Node) -> None:
    """Replace sums over this GPU's rows by their means over the group, where they lie."""
    arrays = [builder.buffers[ref] for ref in node.inputs]
    builder.buffers |= dict(zip(node.refs(), arrays, strict=True))
    values = math.prod(arrays[0].shape)
    _require_shared(node, values)
    assert builder.group
    missing = [In(None)] * (MAX_ARRAYS - len(arrays))
    builder.launch(node, "batch_norm_group.cu", "group_mean", (-(-values // THREADS), 1, 1), (THREADS, 1, 1),
                   *map(InOut, arrays), *missing, *builder.group.arguments(values))


def refuse(builder: Builder, node: Node) -> None:
    """A BatchNorm of a training step that no pass has taken apart."""
    require(False, node, "has use_global_stats=True, which has no GPU lowering in training: set it to False")


LAUNCHES: Launches = {
    "BatchNorm": inference,
    "BatchNormRelu": inference,
    "BatchNormAddRelu": inference,
    "BatchNormTrain": refuse,
    "BatchNormReluTrain": refuse,
    "BatchNormAddReluTrain": refuse,
    "BatchNormStatistics": statistics,
    "BatchNormApply": apply,
    "BatchNormReluApply": apply,
    "BatchNormAddReluApply": apply,
    "BatchNormBackwardReduce": backward_reduce,
    "BatchNormReluBackwardReduce": backward_reduce,
    "BatchNormAddReluBackwardReduce": backward_reduce,
    "BatchNormBackwardApply": backward_apply,
    "BatchNormReluBackwardApply": backward_apply,
    "BatchNormBackwardApplyAdd": backward_apply,
    "BatchNormReluBackwardApplyAdd": backward_apply,
    "GroupStatistics": group_statistics,
    "GroupMean": group_mean,
}
