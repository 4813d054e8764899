"""Embedding: rows of a matrix by number, the vectors of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from graph_passes.operators.base import Array, Attribute, Gradient, NodeView, Operator, Ref, Shape, Shapes, known


def _embedding(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    tokens = known(node, shapes)
    return [tokens, (node["input_dim"], node["output_dim"])], [(*tokens, node["output_dim"])]


def _gradient_shapes(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    tokens = known(node, shapes, 1)
    return [(*tokens, node["output_dim"]), tokens], [(node["input_dim"], node["output_dim"])]


def _rows(node: NodeView, tokens: Array) -> Array:
    """Row numbers. Invalid numbers are clamped to the nearest valid one, as in MXNet."""
    return np.clip(tokens.astype(np.int64), 0, node["input_dim"] - 1)


def _compute_gradient(node: NodeView, dy: Array, tokens: Array) -> list[Array]:
    gradient = np.zeros((node["input_dim"], node["output_dim"]), dy.dtype)
    np.add.at(gradient, _rows(node, tokens), dy)
    return [gradient]


def _numpy_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                    training: bool) -> list[Array | None]:
    return [None, *_compute_gradient(node, dy, inputs[0])]


def _gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    backward = node.derive("EmbeddingWgrad", f"{node.name}_wgrad", (dy, node.inputs[0]))
    return Gradient([backward], {"weight": Ref(backward.name)})


_ATTRIBUTES = {"input_dim": Attribute(int), "output_dim": Attribute(int)}

OPERATORS = (
    # MXNet calls the tokens data. Tokens are whole numbers in every precision of the network.
    Operator("Embedding", ("tokens", "weight"), _embedding, lambda node, tokens, weight: [weight[_rows(node, tokens)]],
             _ATTRIBUTES, gradient=_gradient, numpy_gradient=_numpy_gradient),
    Operator("EmbeddingWgrad", ("out_grad", "tokens"), _gradient_shapes, _compute_gradient, _ATTRIBUTES,
             ("weight_grad",), forward="Embedding"),
)
