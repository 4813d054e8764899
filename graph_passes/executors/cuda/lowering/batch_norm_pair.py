"""A BatchNormAddRelu and the BatchNorm that it adds, a projection shortcut's, as one."""

from __future__ import annotations

import ctypes

from graph_passes.executors.cuda.kernels import count
from graph_passes.executors.cuda.lowering.builder import APPLY_BLOCK, REDUCE_BLOCK, Builder, rows_and_channels
from graph_passes.graph import Node, Ref


def added_by(builder: Builder, node: Node) -> Node | None:
    """The BatchNormAddRelu in training that alone reads this BatchNorm, as its addend."""
    readers = builder.readers(node)
    if node.op != "BatchNormTrain" or [reader.op for reader in readers] != ["BatchNormAddReluTrain"]:
        return None
    same = all(readers[0][name] == node[name] for name in ("eps", "momentum"))
    return readers[0] if same and readers[0].inputs[5] == Ref(node.name) else None


def shortcut_of(builder: Builder, node: Node) -> Node | None:
    """The BatchNorm that this BatchNormAddRelu adds and makes one launch with."""
    if node.op != "BatchNormAddReluTrain":
        return None
    addend = builder.graph[node.inputs[5].node]
    return addend if added_by(builder, addend) else None


def norms(builder: Builder, node: Node) -> list[Node]:
    """A BatchNorm backward itself, and that of the shortcut where both are made in one."""
    paired = node.inputs[3].node in builder.fusions.paired
    return [node, *(builder.readers(node, 3) if paired else ())]


def apply(builder: Builder, node: Node, shortcut: Node) -> None:
    """The output, from both inputs, whose sums are there: neither BatchNorm's own output is written."""
    builder.fusions.paired |= {node.name, shortcut.name}
    x, *pairs = ((builder.input(node, index), builder.input(shortcut, index)) for index in range(5))
    gamma, beta, running_mean, running_var = pairs
    sums = (builder.fusions.sums[node.inputs[0]], builder.fusions.sums[shortcut.inputs[0]])
    saved = (builder.output(node, 1), builder.output(shortcut, 1))
    y, mask = builder.output(node), builder.output(node, 4)
    rows, channels = rows_and_channels(node, x[0])
    builder.launch(node, "batch_norm_pair.cu", builder.kernel("batch_norm_pair_apply"), builder.grid(rows, channels),
                   APPLY_BLOCK,
                   (*x, *sums, *gamma, *beta, y, mask, *saved, *running_mean, *running_var,
                    ctypes.c_float(node["eps"]), ctypes.c_float(node["momentum"]), count(rows), ctypes.c_int(channels)),
                   (*x, *sums, *gamma, *beta), (y, mask, *saved))


def backward_reduce(builder: Builder, node: Node) -> None:
    """The sums of both, and dz; `node` is the BatchNormAddReluBackward."""
    _, shortcut = norms(builder, node)
    dy, mask = builder.input(node, 0), builder.input(node, 4)
    dy2 = None if node["single_grad"] else builder.input(node, 5)
    x, saved = ((builder.input(node, index), builder.input(shortcut, index)) for index in (1, 3))
    dgamma, dbeta = ((builder.output(node, index), builder.output(shortcut, index)) for index in (1, 2))
    dz = builder.output(node, 3)
    rows, channels = rows_and_channels(node, x[0])
    builder.launch(node, "batch_norm_pair.cu", builder.kernel("batch_norm_pair_backward_reduce", dy2 is not None),
                   builder.reduce_grid(rows, channels, num_sums=3), REDUCE_BLOCK,
                   (*x, dy, dy2, mask, dz, *saved, *dgamma, *dbeta, builder.partials, builder.persistent.tickets,
                    count(rows), ctypes.c_int(channels)),
                   (*x, dy, dy2, mask, *saved), (dz, *dgamma, *dbeta), in_place=(dy, dz))


def backward_apply(builder: Builder, node: Node) -> None:
    """The gradients of both inputs, from dz and the sums."""
    _, shortcut = norms(builder, node)
    x, gamma, saved = ((builder.input(node, index), builder.input(shortcut, index)) for index in (1, 2, 3))
    dx, dgamma, (dbeta, _) = ((builder.output(node, index), builder.output(shortcut, index)) for index in range(3))
    dz, (rows, channels) = builder.output(node, 3), rows_and_channels(node, x[0])
    builder.launch(node, "batch_norm_pair.cu", builder.kernel("batch_norm_pair_backward_apply"),
                   builder.grid(rows, channels, blocks_per_multiprocessor=2), APPLY_BLOCK,
                   (*x, dz, *dx, *saved, *gamma, *dgamma, dbeta, count(rows), ctypes.c_int(channels)),
                   (*x, dz, *saved, *gamma, *dgamma, dbeta), dx, in_place=(dz, dx[0]))
