"""A loss that a plug-in gives as a formula of scores and targets (`formula.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.operators import formula
from graph_passes.operators.base import TRUE, Array, Attribute, NodeView, Operator, Shape, Shapes, one_of
from graph_passes.operators.softmax import (
    LOSS_ATTRIBUTES,
    count_hits,
    gradient_scale,
    loss_and_hits,
    scores_and_labels,
    smoothed_targets,
    with_bias,
)


def formula_of(node: NodeView) -> formula.Formula:
    """The formula of a node's loss. Raises GraphError for a Symbol that is not a loss."""
    return formula.read(node["loss"], node["probabilities"])


def _output(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    formula_of(node)
    return scores_and_labels(node, shapes)


def _compute_output(node: NodeView, scores: Array, label: Array, bias: Array | None = None) -> list[Array]:
    scores = scores if bias is None else scores + bias
    return formula_of(node).compute(["probabilities"], scores, scores)  # probabilities do not depend on the targets


def _compute_loss(node: NodeView, scores: Array, label: Array, *others: Array) -> list[Array]:
    scores, loss_scale = with_bias(node, scores, others)
    loss, gradient = _loss_and_gradient(node, scores, label)
    return [gradient * loss_scale, loss.sum(dtype=scores.dtype).reshape(1), *count_hits(scores, label)]


def _loss_and_gradient(node: NodeView, scores: Array, label: Array) -> list[Array]:
    targets = smoothed_targets(node, label, scores.shape[1], scores.dtype)
    loss, gradient = formula_of(node).compute(["loss", "gradient"], scores, targets)
    return [loss, gradient * scores.dtype.type(gradient_scale(node, len(label)))]


def _output_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                     training: bool) -> list[Array | None]:
    return [_loss_and_gradient(node, inputs[0], inputs[1])[1], None]


_OUTPUT = LOSS_ATTRIBUTES | {
    "loss": Attribute(str),  # the JSON of a Symbol that reads scores and targets
    "probabilities": Attribute(one_of(*formula.PROBABILITIES), formula.PROBABILITIES[0]),
}

OPERATORS = (
    Operator("CustomOutput", ("data", "label", "bias"), _output, _compute_output, _OUTPUT,
             optional={"bias": "no_bias"}, numpy_gradient=_output_gradient, training=lambda node: "CustomLoss"),
    # Outputs as in SoftmaxCrossEntropy.
    Operator("CustomLoss", ("data", "label", "loss_scale", "bias"), loss_and_hits, _compute_loss,
             _OUTPUT | {"no_loss_scale": TRUE}, ("data_grad", "loss", "top1", "top5"),
             {"loss_scale": "no_loss_scale", "bias": "no_bias"}, forward="CustomOutput"),
)
