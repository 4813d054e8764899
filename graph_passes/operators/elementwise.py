"""Elementwise operators: ReLU, sums, bias; and operators that only change a tensor's shape or order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.operators.base import (
    DATA_SHAPE,
    OPTIONAL_SIZES,
    SECOND_GRAD,
    SINGLE_GRAD,
    Array,
    Attribute,
    Gradient,
    NodeView,
    Operator,
    Ref,
    Shape,
    Shapes,
    integers,
    known,
    total,
)
from graph_passes.operators.body import Body


def is_relu(node: NodeView) -> bool:
    """Whether the node is a ReLU: the operator relu of `mx.sym.relu`, or an Activation, as in Gluon and Symbol."""
    return node.op == "relu" or (node.op == "Activation" and node["act_type"] == "relu")


# --- shapes ---


def elementwise(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    """One shape for all inputs and the output."""
    shape = next((shape for shape in shapes if shape is not None), None) or known(node, shapes)
    return [shape] * len(shapes), [shape]


def _with_bias(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    return [data, data[-1:], *[data] * (len(shapes) - 2)], [data]


def _flatten(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    return [data], [(data[0], math.prod(data[1:]))]


def _reshape(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    """The new shape. 0 copies the data's size in this position; -1, once, stands for the remaining size."""
    data, wanted = known(node, shapes), list(node["shape"])
    sizes = [data[place] if size == 0 and place < len(data) else size for place, size in enumerate(wanted)]
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = math.prod(data) // max(1, -math.prod(sizes))
    if min(sizes, default=0) < 1 or math.prod(sizes) != math.prod(data):
        raise GraphError(f"Reshape '{node.name}' cannot bring data of the shape {data} to shape={tuple(wanted)}: give "
                         "sizes with the same product; 0 keeps a size, and one of them may be -1")
    return [data], [tuple(sizes)]


def _flatten_backward(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    return [known(node, shapes)], [node["data_shape"]]


def _transpose(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    axes = _axes(node, len(data))
    if sorted(axes) != list(range(len(data))):
        raise GraphError(f"transpose '{node.name}' has axes={axes}, but its input has the shape {data}")
    return [data], [tuple(data[axis] for axis in axes)]


def _zeros(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    return [], [node["shape"]]


# --- NumPy ---


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def relu_backward(dy: Array, y: Array) -> Array:
    """dy where y > 0, otherwise 0."""
    return np.where(y > 0, dy, 0)


def relu_numpy_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                    training: bool) -> list[Array | None]:
    return [relu_backward(dy, outputs[0])] * len(inputs)


def _axes(node: NodeView, ndim: int) -> tuple[int, ...]:
    return node["axes"] or tuple(reversed(range(ndim)))


# --- bodies ---


def _bias_body(b: Body) -> list[Any]:
    return [b.epilogue(b["data"], b.node.op.endswith("Relu"))]


# --- gradients in the graph ---


def relu_gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    attrs: dict[str, Any] = {}
    backward = node.replace(op="ReluBackward", name=f"{node.name}_backward", inputs=(dy, Ref(node.name)), attrs=attrs)
    names = ("lhs", "rhs") if node.op == "AddRelu" else ("data",)
    return Gradient([backward], dict.fromkeys(names, Ref(backward.name)))


def _flatten_gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    attrs = {"data_shape": shapes[node.inputs[0]]}
    backward = node.replace(op="FlattenBackward", name=f"{node.name}_backward", inputs=(dy,), attrs=attrs)
    return Gradient([backward], {"data": Ref(backward.name)})


def _transpose_gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    axes = _axes(node, len(shapes[node.inputs[0]]))
    inverse = tuple(axes.index(axis) for axis in range(len(axes)))
    backward = node.replace(name=f"{node.name}_backward", inputs=(dy,), attrs={"axes": inverse})
    return Gradient([backward], {"data": Ref(backward.name)})


def _reverse_gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    backward = node.replace(name=f"{node.name}_backward", inputs=(dy,))
    return Gradient([backward], {"data": Ref(backward.name)})


# --- the descriptions ---

OPERATORS = (
    Operator("relu", ("data",), elementwise, lambda node, x: [relu(x)], in_place={"output": ("data",)},
             gradient=relu_gradient, numpy_gradient=relu_numpy_gradient, body=lambda b: [b.relu(b["data"])]),
    # This is also the gradient of both summands of an AddRelu.
    Operator("ReluBackward", ("out_grad", "output", "out_grad_2"), elementwise,
             lambda node, dy, y, dy2=None: [relu_backward(total(dy, dy2), y)], SINGLE_GRAD, ("data_grad",), SECOND_GRAD,
             in_place={"data_grad": ("out_grad", "out_grad_2", "output")},
             body=lambda b: [b.gate(b.total(b["out_grad"]), b.mask(b["output"]))]),
    Operator("elemwise_add", ("lhs", "rhs"), elementwise, lambda node, a, b: [a + b],
             in_place={"output": ("lhs", "rhs")},
             gradient=lambda node, dy, shapes: Gradient([], {"lhs": dy, "rhs": dy}),
             numpy_gradient=lambda node, x, y, dy, training: [dy, dy], body=lambda b: [b.add(*b.inputs)]),
    Operator("AddRelu", ("lhs", "rhs"), elementwise, lambda node, a, b: [relu(a + b)],
             in_place={"output": ("lhs", "rhs")}, gradient=relu_gradient, numpy_gradient=relu_numpy_gradient,
             fused=True, body=lambda b: [b.relu(b.add(*b.inputs))]),
    # A bias along the channels (the last dimension), for a convolution that is computed without it; optionally with
    # addition before it and ReLU after it.
    Operator("BiasAdd", ("data", "bias"), _with_bias, lambda node, x, bias: [x + bias],
             in_place={"output": ("data",)}, forward="Convolution", plain=True, body=_bias_body),
    Operator("BiasRelu", ("data", "bias"), _with_bias, lambda node, x, bias: [relu(x + bias)],
             in_place={"output": ("data",)}, forward="Convolution", fused=True, plain=True, body=_bias_body),
    Operator("BiasAddRelu", ("data", "bias", "addend"), _with_bias,
             lambda node, x, bias, addend: [relu(x + bias + addend)], in_place={"output": ("data",)},
             forward="Convolution", fused=True, plain=True, body=_bias_body),
    Operator("Flatten", ("data",), _flatten, lambda node, x: [x.reshape(len(x), -1)], in_place={"output": ("data",)},
             gradient=_flatten_gradient, numpy_gradient=lambda node, x, y, dy, training: [dy.reshape(x[0].shape)]),
    Operator("Reshape", ("data",), _reshape, lambda node, x: [x.reshape(_reshape(node, [x.shape])[1][0])],
             {"shape": Attribute(integers)}, in_place={"output": ("data",)}, gradient=_flatten_gradient,
             numpy_gradient=lambda node, x, y, dy, training: [dy.reshape(x[0].shape)]),
    # Gradient of flattening: the bytes are unchanged, with another shape.
    Operator("FlattenBackward", ("out_grad",), _flatten_backward, lambda node, dy: [dy.reshape(node["data_shape"])],
             DATA_SHAPE, ("data_grad",), in_place={"data_grad": ("out_grad",)}, forward="Flatten"),
    Operator("transpose", ("data",), _transpose, lambda node, x: [x.transpose(_axes(node, x.ndim))],
             {"axes": OPTIONAL_SIZES}, gradient=_transpose_gradient,
             numpy_gradient=lambda node, x, y, dy, training: [dy.transpose(np.argsort(_axes(node, x[0].ndim)))]),
    # Reverses these dimensions: the last element comes first.
    Operator("reverse", ("data",), elementwise, lambda node, x: [np.flip(x, node["axis"])],
             {"axis": Attribute(integers)}, gradient=_reverse_gradient,
             numpy_gradient=lambda node, x, y, dy, training: [np.flip(dy, node["axis"])]),
    # MXNet's operator for initial states.
    Operator("_zeros", (), _zeros, lambda node: [np.zeros(node["shape"], np.float32)], {"shape": Attribute(integers)},
             numpy_gradient=lambda node, x, y, dy, training: []),
    # A gradient that is known to be 0.
    Operator("Zeros", (), _zeros, lambda node: [np.zeros(node["shape"])], {"shape": OPTIONAL_SIZES}, ("bias_grad",)),
)
