"""LayerNorm (arXiv:1607.06450) along one dimension: for images the channels of each pixel, as in ConvNeXt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from graph_passes.operators.base import (
    FALSE,
    Array,
    Attribute,
    Gradient,
    NodeView,
    Operator,
    Ref,
    Shape,
    Shapes,
    along_axis,
    known,
    sum_over_others,
)
from graph_passes.operators.joining import axis_of

# --- shapes ---


def _layer_norm(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    axis = axis_of(node, "axis", len(data))
    size, kept = data[axis:axis + 1], (*data[:axis], 1, *data[axis + 1:])
    return [data, size, size], [data, kept, kept]


def _backward(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes, 1)
    size = data[axis_of(node, "axis", len(data))]
    return [data, data, (size,)], [data, (size,), (size,)]


# --- NumPy ---


def _normalised(node: NodeView, x: Array) -> tuple[Array, Array, Array]:
    """(x - mean) / deviation, the mean, and the deviation, which includes eps."""
    mean = x.mean(axis=node["axis"], keepdims=True)
    deviation = np.sqrt(x.var(axis=node["axis"], keepdims=True) + x.dtype.type(node["eps"]))
    return (x - mean) / deviation, mean, deviation


def _compute(node: NodeView, x: Array, gamma: Array, beta: Array) -> list[Array]:
    normal, mean, deviation = _normalised(node, x)
    gamma, beta = (along_axis(each, node["axis"], x.ndim) for each in (gamma, beta))
    return [normal * gamma + beta, mean, deviation]


def _compute_backward(node: NodeView, dy: Array, x: Array, gamma: Array) -> list[Array]:
    axis = node["axis"]
    normal, _, deviation = _normalised(node, x)
    dz = dy * along_axis(gamma, axis, x.ndim)
    means = dz.mean(axis=axis, keepdims=True), (dz * normal).mean(axis=axis, keepdims=True)
    return [(dz - means[0] - normal * means[1]) / deviation, sum_over_others(dy * normal, axis),
            sum_over_others(dy, axis)]


def _numpy_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                    training: bool) -> list[Array | None]:
    return [*_compute_backward(node, dy, *inputs[:2])]


# --- the gradient in the graph ---


def _gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    backward = node.derive("LayerNormBackward", f"{node.name}_backward", (dy, *node.inputs[:2]))
    gradients = {role: Ref(backward.name, index) for index, role in enumerate(("data", "gamma", "beta"))}
    return Gradient([backward], gradients)


# --- the descriptions ---

LAYER_NORM = {"axis": Attribute(int, -1), "eps": Attribute(float, 1e-5), "output_mean_var": FALSE}

OPERATORS = (
    Operator("LayerNorm", ("data", "gamma", "beta"), _layer_norm, _compute, LAYER_NORM, ("output", "mean", "std"),
             gradient=_gradient, numpy_gradient=_numpy_gradient),
    Operator("LayerNormBackward", ("out_grad", "data", "gamma"), _backward, _compute_backward, LAYER_NORM,
             ("data_grad", "gamma_grad", "beta_grad"), forward="LayerNorm"),
)
