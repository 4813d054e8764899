"""Concat, which joins tensors along a dimension, and slice_axis, which takes a part. The gradient of each operator is
made of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.operators.base import (
    DATA_SHAPE,
    Array,
    Attribute,
    Gradient,
    NodeView,
    Operator,
    Ref,
    Shape,
    Shapes,
    known,
)

MOST_INPUTS = 64  # most inputs of a Concat; DenseNet and Inception join at most four

# --- shapes ---


def _concat(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    inputs = [known(node, shapes, index) for index in range(len(shapes))]
    first, axis = inputs[0], axis_of(node, "dim", len(inputs[0]))
    for other in inputs[1:]:
        if len(other) != len(first) or any(one != two for place, (one, two) in enumerate(zip(first, other, strict=True))
                                           if place != axis):
            raise GraphError(f"Concat '{node.name}' joins the shapes {first} and {other} along dimension {axis}: all "
                             "other dimensions must be equal")
    joined = list(first)
    joined[axis] = sum(shape[axis] for shape in inputs)
    return inputs, [tuple(joined)]


def _slice(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    begin, end = range_of(node, data)
    axis = axis_of(node, "axis", len(data))
    return [data], [(*data[:axis], end - begin, *data[axis + 1:])]


def _slice_backward(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    return [_slice(node, [node["data_shape"]])[1][0]], [node["data_shape"]]


def axis_of(node: NodeView, attribute: str, ndim: int) -> int:
    """A dimension of the data, counted from 0. Raises GraphError for a dimension that the data does not have."""
    axis = node[attribute]
    if not -ndim <= axis < ndim:
        raise GraphError(f"{node.op} '{node.name}' has {attribute}={axis}, but its data has {ndim} dimensions")
    return int(axis % ndim)


def range_of(node: NodeView, data: Shape) -> tuple[int, int]:
    """First and end index along the dimension. Raises GraphError for an empty part."""
    size = data[axis_of(node, "axis", len(data))]
    begin, end = node["begin"], size if node["end"] is None else node["end"]
    begin, end = (place + size if place < 0 else place for place in (begin, end))
    if not 0 <= begin < end <= size:
        raise GraphError(f"slice_axis '{node.name}' takes {node['begin']} to {node['end']} of {size} along dimension "
                         f"{node['axis']}: give a part within 0 to {size}")
    return begin, end


# --- NumPy ---


def _part(node: NodeView, data: Shape) -> tuple[slice, ...]:
    return (*[slice(None)] * axis_of(node, "axis", len(data)), slice(*range_of(node, data)))


def _compute_slice_backward(node: NodeView, dy: Array) -> list[Array]:
    dx = np.zeros(node["data_shape"], dy.dtype)
    dx[_part(node, dx.shape)] = dy
    return [dx]


def _concat_numpy_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                           training: bool) -> list[Array | None]:
    axis = axis_of(node, "dim", dy.ndim)
    return [*np.split(dy, np.cumsum([each.shape[axis] for each in inputs])[:-1], axis)]


# --- gradients in the graph ---


def _concat_gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    """The part of dy for each input."""
    nodes, gradients, begin = [], {}, 0
    axis = axis_of(node, "dim", len(shapes[node.inputs[0]]))
    for number, ref in enumerate(node.inputs):
        end = begin + shapes[ref][axis]
        nodes.append(node.replace(op="slice_axis", name=f"{node.name}_backward{number}", inputs=(dy,),
                                  attrs={"axis": axis, "begin": begin, "end": end}))
        gradients[f"arg{number}"], begin = Ref(nodes[-1].name), end
    return Gradient(nodes, gradients)


def _slice_gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    backward = node.derive("SliceAxisBackward", f"{node.name}_backward", (dy,), data_shape=shapes[node.inputs[0]])
    return Gradient([backward], {"data": Ref(backward.name)})


# --- the descriptions ---


def _place(value: Any) -> int | None:
    return None if str(value) == "None" else int(value)


SLICE = {"axis": Attribute(int), "begin": Attribute(int), "end": Attribute(_place)}

OPERATORS = (
    Operator("Concat", tuple(f"arg{number}" for number in range(MOST_INPUTS)), _concat,
             lambda node, *arrays: [np.concatenate(arrays, node["dim"])],
             {"num_args": Attribute(int), "dim": Attribute(int, 1)},
             optional={f"arg{number}": lambda node, number=number: number >= node["num_args"]  # type: ignore[misc]
                       for number in range(1, MOST_INPUTS)},
             gradient=_concat_gradient, numpy_gradient=_concat_numpy_gradient),
    Operator("slice_axis", ("data",), _slice, lambda node, x: [x[_part(node, x.shape)]], SLICE,
             gradient=_slice_gradient,
             numpy_gradient=lambda node, x, y, dy, training: [*_compute_slice_backward(
                 node.derive("SliceAxisBackward", node.name, (), data_shape=x[0].shape), dy)]),
    # The gradient of the part, at the part's position; 0 at all other positions.
    Operator("SliceAxisBackward", ("out_grad",), _slice_backward, _compute_slice_backward, SLICE | DATA_SHAPE,
             ("data_grad",), forward="slice_axis"),
)
