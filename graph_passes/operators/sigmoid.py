"""Sigmoids of the scores, an independent yes or no for each class, and their loss: binary cross entropy (BCE)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.operators.base import TRUE, Array, Attribute, NodeView, Operator, Shape, Shapes
from graph_passes.operators.softmax import (
    LOSS_ATTRIBUTES,
    count_hits,
    gradient_scale,
    loss_and_hits,
    scores_and_labels,
    smoothed_targets,
    with_bias,
)

# --- shapes ---


def _output(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    given, made = scores_and_labels(node, shapes)
    _check(node, made[0][1])
    return given, made


def _check(node: NodeView, classes: int) -> None:
    """Raise GraphError for a threshold that makes all targets equal."""
    smoothing, threshold = node["smooth_alpha"], node["threshold"]
    smallest, largest = smoothing / max(1, classes - 1), 1 - smoothing
    if threshold and not smallest <= threshold < largest:
        raise GraphError(f"the threshold {threshold:g} makes all targets equal: with {classes} classes and label "
                         f"smoothing {smoothing:g}, targets range from {smallest:g} to {largest:g}; give a threshold "
                         "between these values")


# --- NumPy ---


def sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))  # the argument is never large
    return np.where(x >= 0, 1, e) / (1 + e)


def binary_targets(node: NodeView, label: Array, num_classes: int, dtype: np.dtype) -> Array:
    """Targets (N, classes), like `smoothed_targets`. With a threshold, targets above the threshold become 1, all others
    0.
    """
    targets = smoothed_targets(node, label, num_classes, dtype)
    return (targets > node["threshold"]).astype(dtype) if node["threshold"] else targets


def binary_cross_entropy(scores: Array, targets: Array) -> Array:
    """-target * log(p) - (1 - target) * log(1 - p) with p = sigmoid(score), elementwise. The formula used avoids the
    logarithm of a probability that was rounded to 0 or 1.
    """
    return np.maximum(scores, 0) - scores * targets + np.log1p(np.exp(-np.abs(scores)))


def _gradient(node: NodeView, probabilities: Array, label: Array) -> Array:
    targets = binary_targets(node, label, probabilities.shape[1], probabilities.dtype)
    return (probabilities - targets) * probabilities.dtype.type(gradient_scale(node, len(label)) / targets.shape[1])


def _compute_output(node: NodeView, scores: Array, label: Array, bias: Array | None = None) -> list[Array]:
    return [sigmoid(scores if bias is None else scores + bias)]


def _compute_cross_entropy(node: NodeView, scores: Array, label: Array, *others: Array) -> list[Array]:
    scores, loss_scale = with_bias(node, scores, others)
    costs = binary_cross_entropy(scores, binary_targets(node, label, scores.shape[1], scores.dtype))
    loss = costs.mean(axis=1).sum(dtype=scores.dtype).reshape(1)
    return [_gradient(node, sigmoid(scores), label) * loss_scale, loss, *count_hits(scores, label)]


def _output_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                     training: bool) -> list[Array | None]:
    return [_gradient(node, outputs[0], inputs[1]), None]


# --- the descriptions ---

_OUTPUT = LOSS_ATTRIBUTES | {
    "threshold": Attribute(float, 0.0),  # targets above it are 1, others 0; 0: targets are not changed
}

# MXNet has LogisticRegressionOutput. That operator accepts only targets, and neither smooths them nor divides by the
# batch size.
OPERATORS = (
    Operator("SigmoidOutput", ("data", "label", "bias"), _output, _compute_output, _OUTPUT,
             optional={"bias": "no_bias"}, numpy_gradient=_output_gradient,
             training=lambda node: "SigmoidCrossEntropy"),
    # Outputs as in SoftmaxCrossEntropy. The loss of an image is the mean over the classes (timm's BinaryCrossEntropy).
    Operator("SigmoidCrossEntropy", ("data", "label", "loss_scale", "bias"), loss_and_hits, _compute_cross_entropy,
             _OUTPUT | {"no_loss_scale": TRUE}, ("data_grad", "loss", "top1", "top5"),
             {"loss_scale": "no_loss_scale", "bias": "no_bias"}, forward="SigmoidOutput"),
)
