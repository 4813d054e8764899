"""Functions of single elements and their gradients, ReLU alone, and sums and products with a number."""

from __future__ import annotations

import ctypes
import math

import numpy as np

from graph_passes.executors.cuda.builder import Builder, Launches, no_lowering, padded_rows, reads_padded
from graph_passes.executors.cuda.kernel_library import count, threads
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators.activations import function_of


def whole_vectors(buffer: Buffer) -> int:
    """The number of vectors that cover a tensor. The last vector may reach into the padding behind the tensor."""
    return -(-math.prod(buffer.shape) // VECTOR)


def launch(builder: Builder, node: Node, kernel: str, *operands: object, of: Buffer) -> None:
    """Launch one thread for each vector of the tensor `of`. The number of vectors is the kernel's last argument."""
    vectors = whole_vectors(of)
    builder.launch(node, "pointwise.cu", kernel, *threads(vectors), *operands, count(vectors))


def activation(builder: Builder, node: Node) -> None:
    """Launch any function of operators/activations.py except PReLU."""
    function = function_of(node)
    if function is None:
        raise no_lowering(node)
    x, y = builder.input(node, "data"), builder.output(node)
    launch(builder, node, builder.kernel("activation", f"{function.name}_"), In(x), Out(y, over=x),
            ctypes.c_float(function.a), ctypes.c_float(function.b), of=y)


def activation_backward(builder: Builder, node: Node) -> None:
    function = function_of(node)
    assert function
    dy, x, dx = builder.input(node, "out_grad"), builder.input(node, "data"), builder.output(node)
    launch(builder, node, builder.kernel("activation_backward", f"{function.name}_"), In(dy), In(x), Out(dx, over=dy),
            ctypes.c_float(function.a), ctypes.c_float(function.b), of=dx)


def relu_backward(builder: Builder, node: Node) -> None:
    dy, y, dx = builder.input(node, "out_grad"), builder.input(node, "output"), builder.output(node)
    dy2 = builder.optional_input(node, "out_grad_2", "single_grad")
    launch(builder, node, builder.kernel("relu_backward", dy2 is not None), In(dy), In(dy2), In(y), Out(dx, over=dy),
            of=dx)


def add_relu(builder: Builder, node: Node) -> None:
    x, y, z = builder.input(node, "lhs"), builder.input(node, "rhs"), builder.output(node)
    launch(builder, node, builder.kernel("add_relu"), In(x), In(y), Out(z, over=x), of=z)


def with_number(builder: Builder, node: Node) -> None:
    number = node["scalar"]
    factor, shift = {"_plus_scalar": (1, number), "_minus_scalar": (1, -number), "_mul_scalar": (number, 0),
                     "_div_scalar": (1 / number if number else math.inf, 0)}[node.op]
    x, y = builder.input(node, "data"), builder.output(node)
    launch(builder, node, builder.kernel("scale_and_shift"), In(x), Out(y, over=x), ctypes.c_float(factor),
            ctypes.c_float(shift), of=y)


def _keeps_padding(builder: Builder, node: Node) -> bool:
    """Whether the data is padded and the function maps 0 to 0, so that the padding stays 0."""
    function = function_of(node)
    return reads_padded(builder, node) and function is not None and function.value(np.zeros(1))[0] == 0


LAUNCHES: Launches = {
    **dict.fromkeys(("relu", "Activation", "LeakyReLU", "clip", "hard_sigmoid", "sigmoid", "tanh", "softsign"),
                    padded_rows(activation, _keeps_padding)),
    "ActivationBackward": padded_rows(activation_backward, reads_padded),
    "ReluBackward": padded_rows(relu_backward, reads_padded),
    "AddRelu": padded_rows(add_relu, reads_padded),
    **dict.fromkeys(("_plus_scalar", "_minus_scalar"), with_number),
    **dict.fromkeys(("_mul_scalar", "_div_scalar"), padded_rows(with_number, reads_padded)),
}
