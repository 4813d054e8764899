"""What works on single elements: sums, bias and ReLU; and the flattening of a tensor, which is no launch."""

from __future__ import annotations

import math

from graph_passes.executors.cuda.kernels import count, threads
from graph_passes.executors.cuda.lowering.builder import Builder, require
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node, Ref


def add(builder: Builder, node: Node) -> None:
    a, b = builder.input(node, 0), builder.input(node, 1)
    total = builder.output(node)
    vectors = builder.vectors(total)
    builder.launch(node, "elementwise.cu", builder.kernel("add"), *threads(vectors), (a, b, total, count(vectors)),
                   (a, b), (total,), in_place=(a, total))


def bias_add_relu(builder: Builder, node: Node, x: Buffer, bias: Buffer, addend: tuple[Buffer, ...],
                  relu: bool) -> None:
    """x + bias (+ the one addend) (+ ReLU) as the output of a node."""
    y = builder.output(node)
    vectors = builder.vectors(y)
    builder.launch(node, "elementwise.cu", builder.kernel("bias_add_relu", bool(addend), relu), *threads(vectors),
                   (x, bias, addend[0] if addend else None, y, count(vectors), count(y.shape[3] // VECTOR)),
                   (x, bias, *addend), (y,), in_place=(x, y))


def flatten(builder: Builder, node: Node) -> None:
    """The same memory."""
    x = builder.input(node, 0)
    require(x.num_bytes == math.prod(builder.shapes[Ref(node.name)]) * builder.item_bytes, node,
            "changes its number of elements by padding, which has no GPU lowering")
    builder.buffers[Ref(node.name)] = x


def flatten_backward(builder: Builder, node: Node) -> None:
    """The same memory, from now on in the shape of what was flattened: what reads it looks at height and width."""
    dx = builder.input(node, 0)
    dx.shape = builder.shapes[Ref(node.name)]
    builder.buffers[Ref(node.name)] = dx
