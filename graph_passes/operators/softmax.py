"""Softmax, and the loss of a network's scores: cross entropy with smoothed labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.operators.base import (
    FALSE,
    TRUE,
    Array,
    Attribute,
    NodeView,
    Operator,
    Shape,
    Shapes,
    known,
    numbers,
    one_of,
)
from graph_passes.operators.elementwise import elementwise

TOP_K = 5  # k of the second accuracy: top-5, as for ImageNet

# --- shapes ---


def scores_and_labels(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    """The shapes for an operator that computes probabilities from scores (N, classes)."""
    data = known(node, shapes)
    if len(data) != 2:
        raise GraphError(f"{node.op} '{node.name}' needs scores of shape (batch, classes), not {data}")
    return [data, data[:1], *_bias(node, data)], [data]


def loss_and_hits(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    """The shapes for an operator that computes loss and hits in a training step."""
    (data, *others), _ = scores_and_labels(node, shapes)
    loss_scale = [] if node["no_loss_scale"] else [(1,)]
    label, *bias = others
    return [data, label, *loss_scale, *bias], [data, (1,), (1,), (1,)]


def _softmax(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    if node["temperature"] != 1:
        raise GraphError(f"softmax '{node.name}' has temperature={node['temperature']:g}, which no executor here has: "
                         "divide its input by that number instead")
    return elementwise(node, shapes)


def _softmax_output(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    given, made = scores_and_labels(node, shapes)
    weights, classes = node["class_weights"], made[0][1]
    if weights and len(weights) != classes:
        raise GraphError(f"SoftmaxOutput '{node.name}' has class_weights of {len(weights)} classes, and scores of "
                         f"{classes}: give one weight for each")
    return given, made


def _bias(node: NodeView, data: Shape) -> list[Shape]:
    return [] if node["no_bias"] else [data[1:]]


# --- NumPy ---


def softmax(x: Array, axis: int = -1) -> Array:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def softmax_backward(dy: Array, y: Array, axis: int = -1) -> Array:
    return y * (dy - (dy * y).sum(axis=axis, keepdims=True))


def smoothed_targets(node: NodeView, label: Array, num_classes: int, dtype: np.dtype) -> Array:
    """Targets (N, classes): 1 - smooth_alpha for the label, smooth_alpha / (classes - 1) elsewhere, as MXNet smooths.

    (Szegedy et al., arXiv:1512.00567, spread smooth_alpha over all classes. Both forms agree after a rescaling of
    smooth_alpha.) As in MXNet, a label of shape (N, classes) is used directly as the targets.
    """
    if label.ndim == 2:
        return label.astype(dtype)
    smoothing = node["smooth_alpha"]
    elsewhere = smoothing / (num_classes - 1) if smoothing else 0.0
    targets = np.full((len(label), num_classes), elsewhere, dtype)
    targets[np.arange(len(label)), label.astype(int)] = 1 - smoothing
    return targets


def weighted_targets(node: NodeView, label: Array, num_classes: int, dtype: np.dtype) -> Array:
    """Targets (N, classes): `smoothed_targets`, each class times its weight, as in PyTorch's cross_entropy."""
    targets, weights = smoothed_targets(node, label, num_classes, dtype), node["class_weights"]
    return targets * np.asarray(weights, dtype) if weights else targets


def gradient_scale(node: NodeView, num_images: int) -> float:
    """The factor of the gradient of an image's loss."""
    return node["grad_scale"] / (1 if node["normalization"] == "null" else num_images)


def softmax_output_backward(node: NodeView, probabilities: Array, label: Array) -> Array:
    """Gradient of the cross entropy with respect to the scores: (p - target) * grad_scale, divided by N unless
    normalization is 'null'.

    With `class_weights` targets are `weighted_targets`, and p is multiplied by their sum.
    """
    if node["use_ignore"] or node["multi_output"]:
        raise GraphError(f"SoftmaxOutput '{node.name}' has use_ignore or multi_output: only plain labels are supported")
    targets = weighted_targets(node, label, probabilities.shape[1], probabilities.dtype)
    if node["class_weights"]:
        probabilities = probabilities * targets.sum(axis=1, keepdims=True)
    return (probabilities - targets) * probabilities.dtype.type(gradient_scale(node, len(label)))


def _compute_output(node: NodeView, scores: Array, label: Array, bias: Array | None = None) -> list[Array]:
    return [softmax(scores if bias is None else scores + bias)]


def _compute_cross_entropy(node: NodeView, scores: Array, label: Array, *others: Array) -> list[Array]:
    scores, loss_scale = with_bias(node, scores, others)
    gradient = softmax_output_backward(node, softmax(scores), label) * loss_scale
    targets = weighted_targets(node, label, scores.shape[1], scores.dtype)
    log_p = scores - scores.max(axis=1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(axis=1, keepdims=True))
    return [gradient, -(targets * log_p).sum(dtype=log_p.dtype).reshape(1), *count_hits(scores, label)]


def with_bias(node: NodeView, scores: Array, others: Sequence[Array]) -> tuple[Array, Array]:
    """The scores plus bias, and the loss scale in the scores' dtype, of a loss whose `others` may include both."""
    names = [name for name, absent in _OPTIONAL.items() if not node[absent]]
    given = dict(zip(names, others, strict=True))
    loss_scale = given.get("loss_scale", np.ones(1)).astype(scores.dtype)
    return scores + given["bias"] if "bias" in given else scores, loss_scale


def count_hits(scores: Array, label: Array) -> list[Array]:
    """Two counts, (1,) each: the images whose label is the most likely class, and the images whose label is among the
    `TOP_K` most likely classes. With targets (N, classes) instead of labels, an image's largest target counts as its
    label.
    """
    # Classes that rank before the label: classes with higher scores, and classes with equal scores and a smaller
    # number.
    own_class = (label.argmax(axis=1) if label.ndim == 2 else label.astype(int))[:, None]
    own = np.take_along_axis(scores, own_class, axis=1)
    rank = ((scores > own) | ((scores == own) & (np.arange(scores.shape[1]) < own_class))).sum(axis=1)
    return [np.array([(rank < k).sum()], np.int32) for k in (1, TOP_K)]


def _output_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                     training: bool) -> list[Array | None]:
    return [softmax_output_backward(node, outputs[0], inputs[1]), None]


def _training(node: NodeView) -> str:
    if node["use_ignore"] or node["multi_output"] or node["normalization"] == "valid":
        raise GraphError(f"SoftmaxOutput '{node.name}' has use_ignore, multi_output or normalization='valid', which "
                         "have no gradient here: leave them out")
    return "SoftmaxCrossEntropy"


# --- the descriptions ---

_OPTIONAL = {"loss_scale": "no_loss_scale", "bias": "no_bias"}
LOSS_ATTRIBUTES = {
    "grad_scale": Attribute(float, 1.0),
    "normalization": Attribute(one_of("null", "batch"), "null"),
    "smooth_alpha": Attribute(float, 0.0),
    "no_bias": TRUE,  # ours: the classifier's bias, if the pass `softmax_bias` has moved it here
}
_OUTPUT = LOSS_ATTRIBUTES | {
    "normalization": Attribute(one_of("null", "batch", "valid"), "null"),
    "use_ignore": FALSE,
    "multi_output": FALSE,
    "class_weights": Attribute(numbers, ()),  # ours: factors of each class's targets in training; empty: all 1
}

OPERATORS = (
    Operator("softmax", ("data",), _softmax, lambda node, x: [softmax(x, node["axis"])],
             {"axis": Attribute(int, -1),
              "temperature": Attribute(lambda value: 1.0 if str(value) == "None" else float(value), 1.0)},
             numpy_gradient=lambda node, x, y, dy, training: [softmax_backward(dy, y[0], node["axis"])]),
    Operator("SoftmaxOutput", ("data", "label", "bias"), _softmax_output, _compute_output, _OUTPUT,
             optional={"bias": "no_bias"}, numpy_gradient=_output_gradient, training=_training),
    # The gradient of the data (times loss_scale), and sums over the batch: the loss, top-1 and top-5 hits.
    Operator("SoftmaxCrossEntropy", ("data", "label", "loss_scale", "bias"), loss_and_hits, _compute_cross_entropy,
             _OUTPUT | {"no_loss_scale": TRUE}, ("data_grad", "loss", "top1", "top5"),
             _OPTIONAL, forward="SoftmaxOutput"),
)
