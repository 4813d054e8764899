"""Products and sums of two tensors, with NumPy's broadcasting, or of a tensor and a number; and means over dimensions.

Squeeze-and-excitation (arXiv:1709.01507) is a mean over the pixels and a broadcast_mul with one factor for each image
and channel. SiLU is an elemwise_mul with the sigmoid. Hard swish (arXiv:1905.02244) is `x * clip(x + 3, 0, 6) / 6`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.operators.base import (
    FALSE,
    OPTIONAL_SIZES,
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
    number,
)
from graph_passes.operators.elementwise import elementwise

# --- shapes ---


def _broadcast(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    one, other = (known(node, shapes, index) for index in (0, 1))
    try:
        return [one, other], [np.broadcast_shapes(one, other)]
    except ValueError:
        raise GraphError(f"{node.op} '{node.name}' has inputs of the shapes {one} and {other}, which do not fit each "
                         "other: each dimension must be equal, or 1 in one of them") from None


def _product_backward(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    (one, other), (output,) = _broadcast(node, shapes[1:])
    return [output, one, other], [one, other]


def _sum_to(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    return [known(node, shapes)], [node["shape"]]


def _mean(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    axes = mean_axes(node, len(data))
    kept = [1 if axis in axes else size for axis, size in enumerate(data)]
    return [data], [tuple(size for axis, size in enumerate(kept) if node["keepdims"] or axis not in axes) or (1,)]


def mean_axes(node: NodeView, ndim: int) -> tuple[int, ...]:
    """The dimensions of a mean, counted from 0. Raises GraphError for a dimension that the data does not have."""
    axes = node["axis"] or tuple(range(ndim))
    if node["exclude"] or not all(-ndim <= axis < ndim for axis in axes):
        raise GraphError(f"{node.op} '{node.name}' has axis={node['axis']}, exclude={node['exclude']}: leave out "
                         f"exclude, and give only axes of its data, which has {ndim} dimensions")
    return tuple(sorted(axis % ndim for axis in axes))


def _mean_backward(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    return [known(node, shapes)], [node["data_shape"]]


# --- NumPy ---


def summed_to(x: Array, shape: Shape) -> Array:
    """The gradient `x`, summed to the shape of a tensor that was broadcast to the shape of x."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    return x.sum(axis=tuple(axis for axis, size in enumerate(shape) if size != x.shape[axis]), keepdims=True)


def _product_gradients(node: NodeView, dy: Array, one: Array, other: Array) -> list[Array]:
    return [summed_to(dy * other, one.shape), summed_to(dy * one, other.shape)]


def _compute_mean(node: NodeView, x: Array) -> list[Array]:
    return [x.mean(axis=mean_axes(node, x.ndim), dtype=x.dtype).reshape(_mean(node, [x.shape])[1][0])]


def _compute_mean_backward(node: NodeView, dy: Array) -> list[Array]:
    shape = node["data_shape"]
    axes = mean_axes(node, len(shape))
    dy = dy.reshape([1 if axis in axes else size for axis, size in enumerate(shape)])
    return [np.broadcast_to(dy / dy.dtype.type(math.prod(shape[axis] for axis in axes)), shape).copy()]


# --- gradients in the graph ---


def _product_gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    backward = node.replace(op="ProductBackward", name=f"{node.name}_backward", inputs=(dy, *node.inputs), attrs={},
                            num_outputs=0)
    return Gradient([backward], {"lhs": Ref(backward.name, 0), "rhs": Ref(backward.name, 1)})


def _sum_gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    """The gradient of a summand; if it was broadcast, summed over the broadcast dimensions."""
    nodes, gradients = [], {}
    for role, ref in zip(("lhs", "rhs"), node.inputs, strict=True):
        gradients[role] = dy
        if shapes[ref] != shapes[Ref(node.name)]:
            summed = node.replace(op="SumTo", name=f"{node.name}_{role}_grad", inputs=(dy,),
                                  attrs={"shape": shapes[ref]})
            nodes.append(summed)
            gradients[role] = Ref(summed.name)
    return Gradient(nodes, gradients)


def _mean_gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    backward = node.derive("MeanBackward", f"{node.name}_backward", (dy,), data_shape=shapes[node.inputs[0]])
    return Gradient([backward], {"data": Ref(backward.name)})


# --- the descriptions ---

SCALAR = {"scalar": Attribute(number)}
MEAN = {"axis": OPTIONAL_SIZES, "keepdims": FALSE, "exclude": FALSE}


def _of_two(name: str, compute: Callable[[Array, Array], Array], is_product: bool) -> Operator:
    def numpy_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                       training: bool) -> list[Array | None]:
        if is_product:
            return [*_product_gradients(node, dy, *inputs)]
        return [summed_to(dy, each.shape) for each in inputs]

    return Operator(name, ("lhs", "rhs"), elementwise if name.startswith("elemwise") else _broadcast,
                    lambda node, one, other: [compute(one, other)],
                    gradient=_product_gradient if is_product else _sum_gradient, numpy_gradient=numpy_gradient)


def _with_scalar(name: str, compute: Callable[[Array, float], Array], slope: Callable[[float], float]) -> Operator:
    """`slope`: the derivative, which is constant."""
    def gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
        if slope(node["scalar"]) == 1:
            return Gradient([], {"data": dy})
        backward = node.replace(op="_mul_scalar", name=f"{node.name}_backward", inputs=(dy,),
                                attrs={"scalar": slope(node["scalar"])})
        return Gradient([backward], {"data": Ref(backward.name)})

    return Operator(name, ("data",), elementwise,
                    lambda node, x: [compute(x, x.dtype.type(node["scalar"]))], SCALAR,
                    in_place={"output": ("data",)}, gradient=gradient,
                    numpy_gradient=lambda node, x, y, dy, training: [dy * dy.dtype.type(slope(node["scalar"]))])


OPERATORS = (
    _of_two("elemwise_mul", np.multiply, is_product=True),
    _of_two("broadcast_mul", np.multiply, is_product=True),
    _of_two("broadcast_add", np.add, is_product=False),
    _with_scalar("_plus_scalar", lambda x, a: x + a, lambda a: 1),
    _with_scalar("_minus_scalar", lambda x, a: x - a, lambda a: 1),
    _with_scalar("_mul_scalar", lambda x, a: x * a, lambda a: a),
    _with_scalar("_div_scalar", lambda x, a: x / a, lambda a: 1 / a),
    Operator("ProductBackward", ("out_grad", "lhs", "rhs"), _product_backward, _product_gradients, {},
             ("lhs_grad", "rhs_grad"), forward="elemwise_mul"),
    # The sum over the dimensions along which a tensor of `shape` was broadcast.
    Operator("SumTo", ("out_grad",), _sum_to, lambda node, dy: [summed_to(dy, node["shape"])],
             {"shape": Attribute(integers)}, ("data_grad",), forward="broadcast_add"),
    Operator("mean", ("data",), _mean, _compute_mean, MEAN, gradient=_mean_gradient,
             numpy_gradient=lambda node, x, y, dy, training: [*_compute_mean_backward(
                 node.derive("MeanBackward", node.name, (), data_shape=x[0].shape), dy)]),
    Operator("MeanBackward", ("out_grad",), _mean_backward, _compute_mean_backward,
             {**MEAN, "data_shape": Attribute(integers)}, ("data_grad",), forward="mean"),
)
