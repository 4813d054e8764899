"""BatchNorm statistics over the batches of several GPUs instead of one GPU."""

from __future__ import annotations

import math

from graph_passes.executors.cuda.builder import Builder, Launches, padded_rows, require
from graph_passes.executors.cuda.kernel_library import count
from graph_passes.executors.cuda.kernels.batch_norm import about_mean
from graph_passes.executors.cuda.operands import In, InOut, Out
from graph_passes.executors.cuda.statistics_group import MAX_ARRAYS, MAX_VALUES, THREADS
from graph_passes.graph import Node


def group_statistics(builder: Builder, node: Node) -> None:
    """Launch the sums over the rows of the whole group, from the sums of this GPU."""
    sums, result = builder.input(node, "sums"), builder.output(node)
    channels = sums.shape[1]
    _require_shared(node, channels)
    assert builder.group
    rows = math.prod(builder.shapes[node.input("data")][:-1])
    builder.launch(node, "batch_norm_group.cu", "group_statistics", (-(-channels // THREADS), 1, 1), (THREADS, 1, 1),
                   In(sums), about_mean(sums), Out(result), count(rows), *builder.group.arguments(channels))


def _require_shared(node: Node, channels: int) -> None:
    require(channels <= MAX_VALUES, node, f"has {channels} channels: a group shares {MAX_VALUES} at most")


def group_mean(builder: Builder, node: Node) -> None:
    """Launch the exchange that replaces this GPU's sums by their means over the group, in place."""
    arrays = [builder.buffers[ref] for ref in node.inputs]
    builder.buffers |= dict(zip(node.refs(), arrays, strict=True))
    values = math.prod(arrays[0].shape)
    _require_shared(node, values)
    assert builder.group
    missing = [In(None)] * (MAX_ARRAYS - len(arrays))
    builder.launch(node, "batch_norm_group.cu", "group_mean", (-(-values // THREADS), 1, 1), (THREADS, 1, 1),
                   *map(InOut, arrays), *missing, *builder.group.arguments(values))


LAUNCHES: Launches = {"GroupStatistics": padded_rows(group_statistics), "GroupMean": group_mean}
