"""A tensor with its dimensions in another order."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from graph_passes.executors.cuda.builder import Builder, Launches, require
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import count, threads
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.graph import Node
from graph_passes.operators import Shape


class Order(ctypes.Structure):
    """`Order` of kernels/transpose.cu."""

    _fields_ = Declarations("transpose.cu").fields("Order")

    @classmethod
    def of(cls, shape: Shape, axes: Sequence[int]) -> Order:
        """The order for a tensor of this shape, whose dimensions are written in the order `axes`."""
        steps = [math.prod(shape[axis + 1:]) for axis in range(len(shape))]
        ones = (1,) * (4 - len(shape))
        return cls((*ones, *(shape[axis] for axis in axes)), (*ones, *(steps[axis] for axis in axes)))


def transpose(builder: Builder, node: Node) -> None:
    x, y = builder.input(node, "data"), builder.output(node)
    require(len(x.shape) <= 4, node, f"has {len(x.shape)} dimensions: there is a kernel for four at most")
    axes = node["axes"] or tuple(reversed(range(len(x.shape))))
    items = math.prod(x.shape)
    builder.launch(node, "transpose.cu", builder.kernel("transpose"), *threads(items), In(x), Out(y),
                   Order.of(x.shape, axes), count(items))


LAUNCHES: Launches = {"transpose": transpose}
