"""Layer scale: multiplies each channel of images by its own factor. Also the gradients of images and factors."""

from __future__ import annotations

import ctypes

from graph_passes.executors.cuda.builder import REDUCE_BLOCK, Builder, Launches, padded_rows, rows_and_channels
from graph_passes.executors.cuda.kernel_library import count, threads
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.graph import Node


def forward(builder: Builder, node: Node) -> None:
    x, y = builder.input(node, "data"), builder.output(node)
    vectors = builder.vectors(y)
    builder.launch(node, "scale_channels.cu", builder.kernel("scale_channels"), *threads(vectors), In(x),
                   In(builder.input(node, "gamma")), Out(y, over=x), count(vectors), count(y.shape[-1] // VECTOR))


def backward(builder: Builder, node: Node) -> None:
    """Launch both gradients, in one pass over the data."""
    dy, x = builder.input(node, "out_grad"), builder.input(node, "data")
    rows, channels = rows_and_channels(node, x)
    grid = builder.reduce_grid(rows, channels)
    builder.launch(node, "scale_channels.cu", builder.kernel("scale_channels_backward"), grid, REDUCE_BLOCK, In(dy),
                   In(x), In(builder.input(node, "gamma")), Out(builder.output(node), over=dy),
                   Out(builder.output(node, "gamma_grad")), builder.partials(channels * grid[1]), builder.tickets,
                   count(rows), ctypes.c_int(channels))


LAUNCHES: Launches = {"ScaleChannels": padded_rows(forward), "ScaleChannelsBackward": padded_rows(backward)}
