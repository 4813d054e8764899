"""The fully connected layer, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

from graph_passes.operators.base import (
    DATA_SHAPE,
    FALSE,
    TRUE,
    Array,
    Attribute,
    NodeView,
    Operator,
    Shape,
    Shapes,
    known,
    sum_over_others,
)
from graph_passes.operators.convolution import weighted_gradient


def fully_connected_shapes(node: NodeView, data: Shape) -> tuple[Shape, Shape]:
    """Shapes of weight and output, from the data's shape."""
    flat = (data[0], math.prod(data[1:])) if node["flatten"] else data
    return (node["num_hidden"], flat[-1]), (*flat[:-1], node["num_hidden"])


def _fully_connected(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    weight, output = fully_connected_shapes(node, data)
    return [data, weight] if node["no_bias"] else [data, weight, (node["num_hidden"],)], [output]


def _wgrad(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes, 1)
    weight, output = fully_connected_shapes(node, data)
    return [output, data], [weight]


def _dgrad(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    weight, output = fully_connected_shapes(node, node["data_shape"])
    return [output, weight], [node["data_shape"]]


def fully_connected(node: NodeView, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x (N, ...), flattened if the node's attribute `flatten` is set, times weight (hidden, features)."""
    y = (x.reshape(len(x), -1) if node["flatten"] else x) @ weight.T
    return y if bias is None else y + bias


def fully_connected_dgrad(dy: Array, weight: Array, data_shape: Shape) -> Array:
    return (dy @ weight).reshape(data_shape)


def fully_connected_wgrad(node: NodeView, dy: Array, x: Array) -> Array:
    x = x.reshape(len(x), -1) if node["flatten"] else x
    return dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])


def _numpy_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                    training: bool) -> list[Array | None]:
    x, weight, *bias = inputs
    dbias = [sum_over_others(dy, -1)] if bias else []
    return [fully_connected_dgrad(dy, weight, x.shape), fully_connected_wgrad(node, dy, x), *dbias]


FULLY_CONNECTED = {"num_hidden": Attribute(int), "no_bias": FALSE, "flatten": TRUE}

OPERATORS = (
    Operator(
        "FullyConnected",
        ("data", "weight", "bias"),
        _fully_connected,
        lambda node, *inputs: [fully_connected(node, *inputs)],
        FULLY_CONNECTED,
        optional={"bias": "no_bias"},
        gradient=weighted_gradient,
        numpy_gradient=_numpy_gradient,
    ),
    Operator(
        "FullyConnectedWgrad",
        ("out_grad", "data"),
        _wgrad,
        lambda node, dy, x: [fully_connected_wgrad(node, dy, x)],
        FULLY_CONNECTED,
        ("weight_grad",),
        forward="FullyConnected",
    ),
    Operator(
        "FullyConnectedDgrad",
        ("out_grad", "weight"),
        _dgrad,
        lambda node, dy, weight: [fully_connected_dgrad(dy, weight, node["data_shape"])],
        FULLY_CONNECTED | DATA_SHAPE,
        ("data_grad",),
        forward="FullyConnected",
    ),
)
