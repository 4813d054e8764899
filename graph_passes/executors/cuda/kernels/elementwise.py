"""Elementwise launches: sums, bias and ReLU; flattening, which needs no launch; and the epilogue of a convolution as a
launch of its own.

    before    x, weight, bias, shortcut -> ConvolutionAddRelu `r`
    or        x, weight -> Convolution -> product;  product, bias, shortcut -> BiasAddRelu `r`
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches, padded_rows, reads_padded
from graph_passes.executors.cuda.kernel_library import count, threads
from graph_passes.executors.cuda.kernels.pointwise import whole_vectors
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.graph import Node
from graph_passes.passes.conv_epilogue import in_two


def bias_alone(table: Candidates, fused: Candidate) -> Iterator[Node]:
    """Yield a convolution without bias, and a node of its own for the bias and the operations fused with it."""
    if not fused["no_bias"]:
        product, end = in_two(fused.node, f"{fused.node.name}_product")
        yield end.replace(inputs=(table.add(product).output("output"), *end.inputs[1:]))


def add(builder: Builder, node: Node) -> None:
    a, b = builder.input(node, "lhs"), builder.input(node, "rhs")
    # the operands may be parts of a gradient
    y = builder.output(node, shape=a.shape if builder.has_one_form(node.inputs[0]) else None)
    vectors = whole_vectors(y)
    builder.launch(node, "elementwise.cu", builder.kernel("add"), *threads(vectors), In(a), In(b), Out(y, over=a),
                   count(vectors))


def bias(builder: Builder, node: Node) -> None:
    """Launch x + bias, optionally plus another tensor, optionally with ReLU."""
    x, y = builder.input(node, "data"), builder.output(node)
    adds, relu = node.op == "BiasAddRelu", node.op != "BiasAdd"
    vectors = builder.vectors(y)
    builder.launch(node, "elementwise.cu", builder.kernel("bias_add_relu", adds, relu), *threads(vectors),
                   In(x), In(builder.input(node, "bias")), In(builder.input(node, "addend") if adds else None),
                   Out(y, over=x), count(vectors), count(y.shape[-1] // VECTOR))


def same_memory(builder: Builder, node: Node) -> None:
    """Launch nothing: the output is the input's memory, read with the other shape."""
    builder.share(node)


def zeros(builder: Builder, node: Node) -> None:
    """Launch the clearing of a gradient, which starts as zeros."""


def initial_zeros(builder: Builder, node: Node) -> None:
    y = builder.output(node)

    def fill(address: int, workspace: int) -> None:
        builder.gpu.fill(address, 0, y.num_bytes)

    builder.call(node, "zeros", fill, Out(y), workspace_bytes=0, flops=0)


RULES = tuple((op, bias_alone) for op in ("Convolution", "ConvolutionRelu", "ConvolutionAddRelu"))
LAUNCHES: Launches = {
    "elemwise_add": padded_rows(add, reads_padded),
    **dict.fromkeys(("BiasAdd", "BiasRelu", "BiasAddRelu"), padded_rows(bias)),
    **dict.fromkeys(("Flatten", "FlattenBackward", "Reshape"), same_memory),
    "Zeros": zeros,
    "_zeros": initial_zeros,
}
