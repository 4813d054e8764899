"""The operators of `operators_backward.py` in NumPy, made of the reference executor's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from graph_passes.executors import reference_operators as ops
from graph_passes.executors.base import TOP_K
from graph_passes.executors.reference import OPERATIONS
from graph_passes.executors.reference_operators import Array, Statistics
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators_backward import FORWARD_OF, forward_node
from graph_passes.passes.gradient import output_names


def run(graph: Graph, variables: Mapping[str, Array]) -> dict[str, Array]:
    """Run a graph of the pass `gradient`, in the dtype of the variables; its outputs by name."""
    values = {Ref(name): array for name, array in variables.items()}
    for node in graph:
        if not node.is_variable:
            outputs = evaluate(node, [values[ref] for ref in node.inputs])
            values.update({Ref(node.name, index): output for index, output in enumerate(outputs)})
    return {name: values[ref] for name, ref in output_names(graph).items()}


def evaluate(node: Node, inputs: Sequence[Array]) -> Sequence[Array]:
    """The outputs of one node of a training step."""
    if node.op in OPERATIONS:
        return OPERATIONS[node.op].forward(node, inputs, True)
    return _FUNCTIONS[node.op](forward_node(node) if node.op in FORWARD_OF else node, node, *inputs)


# --- forward, keeping what the gradient needs ---


def _saved(node: Node, statistics: Statistics) -> Array:
    return np.stack([statistics.mean, 1 / np.sqrt(statistics.var + node["eps"])])


def _statistics(node: Node, saved: Array) -> Statistics:
    return Statistics(saved[0], saved[1] ** -2 - node["eps"])


def _batch_norm_train(node: Node, _: Node, x: Array, gamma: Array, beta: Array, mean: Array, var: Array,
                      addend: Array | None = None) -> tuple[Array, ...]:
    batch = ops.batch_statistics(node, x)
    saved = _saved(node, batch)
    moving = ops.running_statistics(node, Statistics(mean, var), batch)
    # Normalised with what is saved, so that the gradient finds the same elements positive.
    y = ops.batch_norm(node, x, gamma, beta, _statistics(node, saved))
    if node.op == "BatchNorm":
        return y, saved, *moving
    if addend is None:
        return ops.relu(y), saved, *moving
    y = ops.relu(y + addend)
    return y, saved, *moving, np.packbits(y > 0, axis=-1, bitorder="little")


def _max_pooling_train(node: Node, _: Node, x: Array) -> tuple[Array, ...]:
    y, winner = ops.max_pooling(node, x)
    return y, winner.astype(np.uint8)


def _softmax_cross_entropy(node: Node, _: Node, scores: Array, label: Array,
                           loss_scale: Array | None = None) -> tuple[Array, ...]:
    p = ops.softmax(scores)
    gradient = ops.softmax_output_backward(node, p, label)
    targets = ops.smoothed_targets(node, label, scores.shape[1], scores.dtype)
    log_p = scores - scores.max(axis=1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(axis=1, keepdims=True))
    # Classes that come before the label: better ones, and equal ones with a smaller number.
    own = np.take_along_axis(scores, label.astype(int)[:, None], axis=1)
    earlier = np.arange(scores.shape[1]) < label[:, None]
    rank = ((scores > own) | ((scores == own) & earlier)).sum(axis=1)
    counts = [np.array([(rank < k).sum()], np.int32) for k in (1, TOP_K)]
    loss = -(targets * log_p).sum(dtype=log_p.dtype).reshape(1)
    return gradient if loss_scale is None else gradient * loss_scale.astype(gradient.dtype), loss, *counts


# --- backward ---


def _convolution_dgrad(node: Node, own: Node, dy: Array, weight: Array) -> tuple[Array]:
    return (ops.convolution_dgrad(node, dy, weight, own["data_shape"]),)


def _convolution_wgrad(node: Node, _: Node, dy: Array, x: Array) -> tuple[Array]:
    return (ops.convolution_wgrad(node, dy, x),)


def _fully_connected_dgrad(_: Node, own: Node, dy: Array, weight: Array) -> tuple[Array]:
    return (ops.fully_connected_dgrad(dy, weight, own["data_shape"]),)


def _fully_connected_wgrad(node: Node, _: Node, dy: Array, x: Array) -> tuple[Array]:
    return (ops.fully_connected_wgrad(node, dy, x),)


def _bias_grad(_: Node, own: Node, dy: Array) -> tuple[Array]:
    return (ops.bias_grad(dy, own["axis"]),)


def _batch_norm_backward(node: Node, _: Node, dy: Array, x: Array, gamma: Array, saved: Array,
                         dy2: Array | None = None) -> tuple[Array, ...]:
    return ops.batch_norm_backward(node, _sum(dy, dy2), x, gamma, _statistics(node, saved))


def _batch_norm_relu_backward(node: Node, own: Node, dy: Array, x: Array, gamma: Array, saved: Array, beta: Array,
                              dy2: Array | None = None) -> tuple[Array, ...]:
    y = ops.batch_norm(node, x, gamma, beta, _statistics(node, saved))
    return _batch_norm_backward(node, own, ops.relu_backward(_sum(dy, dy2), y), x, gamma, saved)


def _batch_norm_add_relu_backward(node: Node, own: Node, dy: Array, x: Array, gamma: Array, saved: Array, mask: Array,
                                  dy2: Array | None = None) -> tuple[Array, ...]:
    positive = np.unpackbits(mask, axis=-1, count=x.shape[-1], bitorder="little")
    dz = ops.relu_backward(_sum(dy, dy2), positive)
    return *_batch_norm_backward(node, own, dz, x, gamma, saved), dz


def _relu_backward(_: Node, __: Node, dy: Array, y: Array, dy2: Array | None = None) -> tuple[Array]:
    return (ops.relu_backward(_sum(dy, dy2), y),)


def _max_pooling_backward(node: Node, own: Node, dy: Array, winner: Array, dy2: Array | None = None) -> tuple[Array]:
    return (ops.max_pooling_backward(node, _sum(dy, dy2), winner, own["data_shape"]),)


def _avg_pooling_backward(node: Node, own: Node, dy: Array) -> tuple[Array]:
    return (ops.avg_pooling_backward(node, dy, own["data_shape"]),)


def _flatten_backward(_: Node, own: Node, dy: Array) -> tuple[Array]:
    return (dy.reshape(own["data_shape"]),)


def _sum(dy: Array, dy2: Array | None) -> Array:
    return dy if dy2 is None else dy + dy2


# Each function takes the forward operator's attributes, the node itself, and the inputs.
_FUNCTIONS: dict[str, Callable[..., tuple[Array, ...]]] = {
    "BatchNormTrain": _batch_norm_train,
    "BatchNormReluTrain": _batch_norm_train,
    "BatchNormAddReluTrain": _batch_norm_train,
    "MaxPoolingTrain": _max_pooling_train,
    "SoftmaxCrossEntropy": _softmax_cross_entropy,
    "ConvolutionDgrad": _convolution_dgrad,
    "ConvolutionWgrad": _convolution_wgrad,
    "FullyConnectedDgrad": _fully_connected_dgrad,
    "FullyConnectedWgrad": _fully_connected_wgrad,
    "BiasGrad": _bias_grad,
    "BatchNormBackward": _batch_norm_backward,
    "BatchNormReluBackward": _batch_norm_relu_backward,
    "BatchNormAddReluBackward": _batch_norm_add_relu_backward,
    "ReluBackward": _relu_backward,
    "MaxPoolingBackward": _max_pooling_backward,
    "AvgPoolingBackward": _avg_pooling_backward,
    "FlattenBackward": _flatten_backward,
}
