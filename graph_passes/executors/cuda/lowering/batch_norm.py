"""BatchNorm, with ReLU, or the sum with another tensor and ReLU: the forward pass, and the two launches of the backward
pass. Which launches a backward pass is made of is decided in `batch_norm_backward.py`."""

from __future__ import annotations

import ctypes
import math

from graph_passes.executors.cuda.kernels import count, threads
from graph_passes.executors.cuda.lowering import batch_norm_pair, batch_norm_pool
from graph_passes.executors.cuda.lowering.builder import APPLY_BLOCK, REDUCE_BLOCK, Builder, require, rows_and_channels
from graph_passes.executors.cuda.program import Buffer
from graph_passes.executors.cuda.statistics_group import MAX_ARRAYS, MAX_VALUES, THREADS
from graph_passes.graph import Node
from graph_passes.operators_backward import FORWARD_OF

# How batch_norm.cu knows where ReLU let the gradient through.
_RELU = {"BatchNormBackward": "NO_RELU", "BatchNormReluBackward": "RECOMPUTED", "BatchNormAddReluBackward": "BITS"}


def forward(builder: Builder, node: Node) -> None:
    """In training (with the batch's statistics) and inference (with the running ones)."""
    require(not node["fix_gamma"], node, "has fix_gamma=True, which has no GPU lowering: set it to False")
    sums = _sums(builder, node)
    if batch_norm_pair.added_by(builder, node):
        return  # `batch_norm_pair.apply`, at the node that adds it
    if shortcut := batch_norm_pair.shortcut_of(builder, node):
        batch_norm_pair.apply(builder, node, shortcut)
    elif pool := batch_norm_pool.pool_behind(builder, node):
        batch_norm_pool.apply(builder, node, pool, sums)
    else:
        _apply(builder, node, sums)


def _sums(builder: Builder, node: Node) -> Buffer:
    """The sum and the sum of squares of the input, in training those of the whole group's batch."""
    x, running_mean, running_var = (builder.input(node, index) for index in (0, 3, 4))
    rows, channels = rows_and_channels(node, x)
    size = (count(rows), ctypes.c_int(channels))
    known = builder.fusions.sums
    sums = known.get(node.inputs[0]) or Buffer(f"{node.name}:sums", (2, channels), "float32")
    if not node.op.endswith("Train"):
        builder.launch(node, "batch_norm.cu", "sums_from_running", *threads(channels),
                       (running_mean, running_var, sums, *size), (running_mean, running_var), (sums,))
        return sums
    if node.inputs[0] not in known:
        builder.launch(node, "batch_norm.cu", builder.kernel("batch_norm_statistics"),
                       builder.reduce_grid(rows, channels), REDUCE_BLOCK,
                       (x, sums, builder.partials, builder.persistent.tickets, *size), (x,), (sums,))
        known[node.inputs[0]] = sums
    share(builder, node, sums)
    return sums


def share(builder: Builder, node: Node, *arrays: Buffer) -> None:
    """Replace sums over this GPU's rows by their means over the group, where there is one."""
    if builder.group is None:
        return
    values = math.prod(arrays[0].shape)
    require(values <= MAX_VALUES, node, f"has {values // 2} channels: a group shares {MAX_VALUES // 2} at most")
    missing = (None,) * (MAX_ARRAYS - len(arrays))
    builder.launch(node, "batch_norm_group.cu", "average_over_group", (-(-values // THREADS), 1, 1), (THREADS, 1, 1),
                   (*arrays, *missing, *builder.group.arguments(values)), arrays, arrays)


def _apply(builder: Builder, node: Node, sums: Buffer) -> None:
    """The output, from the input and its sums."""
    training, operator = node.op.endswith("Train"), FORWARD_OF.get(node.op, node.op)
    add, relu = operator == "BatchNormAddRelu", operator != "BatchNorm"
    x, gamma, beta, running_mean, running_var = (builder.input(node, index) for index in range(5))
    rows, channels = rows_and_channels(node, x)
    saved = builder.output(node, 1) if training else None
    y = builder.output(node)
    addend = builder.input(node, 5) if add else None
    mask = builder.output(node, 4) if training and add else None
    running = (running_mean, running_var) if training else (None, None)
    builder.launch(node, "batch_norm.cu", builder.kernel("batch_norm_apply", add, relu),
                   builder.grid(rows, channels), APPLY_BLOCK,
                   (x, addend, sums, gamma, beta, y, mask, saved, *running, ctypes.c_float(node["eps"]),
                    ctypes.c_float(node["momentum"]), count(rows), ctypes.c_int(channels)),
                   (x, addend, sums, gamma, beta), (y, saved, mask), in_place=(x, y))


# --- the backward pass ---


def dz(builder: Builder, node: Node) -> Buffer:
    """The gradient of a BatchNorm + ReLU's output where ReLU let it through: what its addend gets."""
    if node.op == "BatchNormAddReluBackward":
        return builder.output(node, 3)
    x = builder.input(node, 1)
    return builder.fusions.dz.setdefault(node.name, Buffer(f"{node.name}:dz", x.shape, x.dtype))


def stores_dz(node: Node) -> bool:
    """Where it is wanted (by the addend), or would cost more than one read."""
    return node.op == "BatchNormAddReluBackward" or not node["single_grad"]


def backward_alone(builder: Builder, node: Node) -> None:
    """Both launches."""
    backward_reduce(builder, node)
    backward_apply(builder, node, stores_dz(node))


def backward_reduce(builder: Builder, node: Node) -> None:
    """The sums, which are the gradients of gamma and beta, and `dz` where it is stored."""
    if len(batch_norm_pair.norms(builder, node)) == 2:
        batch_norm_pair.backward_reduce(builder, node)
        return
    relu = _RELU[node.op]
    dy, x, gamma, saved = (builder.input(node, index) for index in range(4))
    beta = builder.input(node, 4) if relu == "RECOMPUTED" else None
    mask = builder.input(node, 4) if relu == "BITS" else None
    dy2 = None if node["single_grad"] else builder.buffers[node.inputs[-1]]
    masked = dz(builder, node) if stores_dz(node) else None
    dgamma, dbeta = builder.output(node, 1), builder.output(node, 2)
    rows, channels = rows_and_channels(node, x)
    builder.launch(node, "batch_norm.cu",
                   builder.kernel("batch_norm_backward_reduce", relu, dy2 is not None, masked is not None),
                   builder.reduce_grid(rows, channels), REDUCE_BLOCK,
                   (x, dy, dy2, mask, masked, saved, gamma, beta, dgamma, dbeta, builder.partials,
                    builder.persistent.tickets, count(rows), ctypes.c_int(channels)),
                   (x, dy, dy2, mask, saved, gamma, beta), (masked, dgamma, dbeta),
                   in_place=(dy, masked) if masked else None)


def backward_apply(builder: Builder, node: Node, from_dz: bool) -> None:
    """The gradient of the input, from the sums and `dz`, or else the gradient of the output."""
    if len(batch_norm_pair.norms(builder, node)) == 2:
        batch_norm_pair.backward_apply(builder, node)
        return
    relu = "NO_RELU" if from_dz else _RELU[node.op]
    source = dz(builder, node) if from_dz else builder.input(node, 0)
    x, gamma, saved = (builder.input(node, index) for index in range(1, 4))
    beta = builder.input(node, 4) if relu == "RECOMPUTED" else None
    dx, dgamma, dbeta = (builder.output(node, index) for index in range(3))
    rows, channels = rows_and_channels(node, x)
    builder.launch(node, "batch_norm.cu", builder.kernel("batch_norm_backward_apply", relu),
                   builder.grid(rows, channels), APPLY_BLOCK,
                   (x, source, dx, saved, gamma, beta, dgamma, dbeta, count(rows), ctypes.c_int(channels)),
                   (x, source, saved, gamma, beta, dgamma, dbeta), (dx,), in_place=(source, dx))
