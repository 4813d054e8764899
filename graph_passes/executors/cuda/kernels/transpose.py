"""Launches the transposition of a tensor, also with reversed dimensions."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from graph_passes.executors.cuda.builder import Builder, Launches, require
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import count, instance, threads
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators import Shape
from graph_passes.passes.precision import ITEM_BYTES

TYPES = {2: "unsigned short", 4: "uint32", 8: "uint2", 16: "uint4"}  # number of bytes -> CUDA type


class Order(ctypes.Structure):
    """`Order` of kernels/transpose.cu."""

    _fields_ = Declarations("transpose.cu").fields("Order")

    @classmethod
    def of(cls, shape: Shape, axes: Sequence[int], backwards: Sequence[int] = ()) -> Order:
        """The order for a tensor of this shape, whose dimensions are written in the order `axes`. The dimensions
        `backwards` are read from the last element to the first.
        """
        strides = [math.prod(shape[axis + 1:]) for axis in range(len(shape))]
        steps = [-strides[axis] if axis in backwards else strides[axis] for axis in axes]
        first = sum((shape[axis] - 1) * strides[axis] for axis in backwards)
        ones = (1,) * (4 - len(shape))
        return cls((*ones, *(shape[axis] for axis in axes)), (*ones, *(step % 2**32 for step in steps)), first)


def transpose(builder: Builder, node: Node) -> None:
    x, y = builder.input(node, "data"), builder.output(node)
    _launch(builder, node, x, y, node["axes"] or tuple(reversed(range(len(x.shape)))))


def reverse(builder: Builder, node: Node) -> None:
    """Launch the reversal of dimensions. The network's images keep their padding channel."""
    x, y = builder.input(node, "data"), builder.output(node)
    dimensions = len(x.shape)
    _launch(builder, node, x, y, range(dimensions), sorted({axis % dimensions for axis in node["axis"]}))


def _launch(builder: Builder, node: Node, x: Buffer, y: Buffer, axes: Sequence[int],
            backwards: Sequence[int] = ()) -> None:
    dimensions = len(x.shape)
    require(dimensions <= 4, node, f"has {dimensions} dimensions: there is a kernel for four at most")
    shape, item_bytes = x.shape, ITEM_BYTES[x.dtype]
    # neighbouring elements of the last dimension stay neighbours
    if axes[-1] == dimensions - 1 and dimensions - 1 not in backwards:
        together = math.gcd(shape[-1], max(TYPES) // item_bytes)
        shape, item_bytes = (*shape[:-1], shape[-1] // together), item_bytes * together
    items = math.prod(shape)
    builder.launch(node, "transpose.cu", instance("transpose", TYPES[item_bytes]), *threads(items), In(x), Out(y),
                   Order.of(shape, axes, backwards), count(items))


LAUNCHES: Launches = {"transpose": transpose, "reverse": reverse}
