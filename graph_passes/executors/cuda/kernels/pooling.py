"""Max and average pooling, over windows and over the whole image."""

from __future__ import annotations

import ctypes

from graph_passes.errors import GraphError
from graph_passes.executors.cuda.builder import Builder, Launches, padded_rows
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import count, threads
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators import window


class Window(ctypes.Structure):
    """`Window` of window.cuh."""

    _fields_ = Declarations("window.cuh").fields("Window")

    @classmethod
    def of(cls, node: Node, x: Buffer, y: Buffer) -> Window:
        """The window of a Pooling from `x` to `y`."""
        size = window(node)
        return cls(*x.shape[1:3], *y.shape[1:3], *size.kernel, *size.stride, *size.pad)


def forward(builder: Builder, node: Node) -> None:
    """Launch pooling of any kind. The training variant of max pooling keeps the winners' positions."""
    x, y = builder.input(node, "data"), builder.output(node)
    vectors, (pixels, pitch) = builder.vectors(y), _pixels_and_pitch(x)
    if node["pool_type"] == "avg" and node["global_pool"]:
        builder.launch(node, "pooling.cu", builder.kernel("global_average_pool"), *threads(vectors),
                       In(x), Out(y), count(vectors), pixels, pitch)
    elif node["pool_type"] == "max" and not node["global_pool"]:
        winner = builder.output(node, "winner") if node.op == "MaxPoolingTrain" else None
        builder.launch(node, "pooling.cu", builder.kernel("max_pool"), *threads(vectors),
                       In(x), Out(y), Out(winner), Window.of(node, x, y), count(vectors), pitch)
    elif node["pool_type"] == "avg":
        builder.launch(node, "pooling.cu", builder.kernel("average_pool", node["count_include_pad"]),
                       *threads(vectors), In(x), Out(y), Window.of(node, x, y), count(vectors), pitch)
    else:
        raise GraphError(f"Pooling '{node.name}' ({node['pool_type']}, global_pool={node['global_pool']}) has no "
                         "GPU lowering: there are max pooling over windows and average pooling")


def max_backward(builder: Builder, node: Node) -> None:
    dy, dx = builder.input(node, "out_grad"), builder.output(node)
    dy2 = builder.optional_input(node, "out_grad_2", "single_grad")
    vectors, (_, pitch) = builder.vectors(dx), _pixels_and_pitch(dx)
    builder.launch(node, "pooling.cu", builder.kernel("max_pool_backward", dy2 is not None), *threads(vectors),
                   In(dy), In(dy2), In(builder.input(node, "winner")), Out(dx), Window.of(node, dx, dy),
                   count(vectors), pitch)


def average_backward(builder: Builder, node: Node) -> None:
    dy, dx = builder.input(node, "out_grad"), builder.output(node)
    vectors = builder.vectors(dx)
    pixels, pitch = _pixels_and_pitch(dx)
    if node["global_pool"]:
        builder.launch(node, "pooling.cu", builder.kernel("global_average_pool_backward"), *threads(vectors),
                       In(dy), Out(dx), count(vectors), pixels, pitch)
    else:
        builder.launch(node, "pooling.cu", builder.kernel("average_pool_backward", node["count_include_pad"]),
                       *threads(vectors), In(dy), Out(dx), Window.of(node, dx, dy), count(vectors), pitch)


def _pixels_and_pitch(x: Buffer) -> tuple[ctypes.c_int, ctypes.c_int]:
    """The number of pixels of an image, and the number of vectors of a pixel."""
    return ctypes.c_int(x.shape[1] * x.shape[2]), ctypes.c_int(x.shape[3] // VECTOR)


LAUNCHES: Launches = {
    "Pooling": padded_rows(forward),
    "MaxPoolingTrain": padded_rows(forward),
    "MaxPoolingBackward": padded_rows(max_backward),
    "AvgPoolingBackward": padded_rows(average_backward),
}
