"""Loss functions other than the cross entropy of a softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graph_passes.errors import GraphError
from graph_passes.graph import Graph, Node
from graph_passes.operators import formula


def binary_cross_entropy(graph: Graph, threshold: float = 0.0) -> Graph:
    """Predict each class independently, and train with binary cross entropy (arXiv:2110.00476, section 2.1).

        before    scores, label -> SoftmaxOutput
        after     scores, label -> SigmoidOutput(threshold)

    Label smoothing and normalisation stay. The loss of an image is the mean over the classes. With a `threshold`,
    targets above the threshold become 1 and all others 0, after smoothing and mixing. With 0, targets do not change.

    Raises GraphError for a network that does not end in SoftmaxOutput.
    """
    return _another(graph, "SigmoidOutput", threshold=threshold)


def custom_loss(graph: Graph, loss: str, probabilities: str = "softmax") -> Graph:
    """Learn another loss of scores and targets.

        before    scores, label -> SoftmaxOutput
        after     scores, label -> CustomOutput(loss, probabilities)

    Label smoothing and normalisation stay. `loss`: the JSON of a Symbol that gives the loss (N,) of each image. The
    Symbol may contain the variables scores and targets, (N, C) each, and the operators of `operators/formula.py`.
    `probabilities`: the function of the scores in inference, "softmax" or "sigmoid".

    Raises GraphError for a network that does not end in SoftmaxOutput, and for a Symbol that is not a loss of this
    form.
    """
    formula.read(loss, probabilities)
    return _another(graph, "CustomOutput", loss=loss, probabilities=probabilities)


def weigh_classes(graph: Graph, weights: Sequence[float]) -> Graph:
    """Multiply the targets of each class by its weight, in training only.

        before    scores, label -> SoftmaxOutput
        after     scores, label -> SoftmaxOutput(class_weights)
    """
    return _replace(graph, graph[graph.outputs[0].node].with_attrs(class_weights=tuple(weights)))


def stock_loss(graph: Graph) -> Graph:
    """Replace a loss of this project by MXNet's own operator, for files that MXNet must read. The outputs are equal.

        before    scores, label -> SigmoidOutput, or CustomOutput
        after     scores, label -> LogisticRegressionOutput, or SoftmaxOutput
    """
    end = graph[graph.outputs[0].node]
    if end.op not in ("SigmoidOutput", "CustomOutput"):
        return graph
    stock = "SoftmaxOutput" if end.get("probabilities") == "softmax" else "LogisticRegressionOutput"
    return _replace(graph, end.replace(op=stock, attrs={}))


def _another(graph: Graph, op: str, **attrs: Any) -> Graph:
    """Replace the SoftmaxOutput by another loss, with the same label smoothing and normalisation."""
    end = graph[graph.outputs[0].node]
    if end.op != "SoftmaxOutput":
        raise GraphError(f"the graph ends in {end.op} '{end.name}', not in a SoftmaxOutput, "
                         "which another loss replaces: end it in one")
    kept = {name: end[name] for name in ("grad_scale", "normalization", "smooth_alpha")}
    return _replace(graph, end.replace(op=op, attrs=kept | attrs))


def _replace(graph: Graph, changed: Node) -> Graph:
    return graph.rewrite(lambda node: changed if node.name == changed.name else None)
