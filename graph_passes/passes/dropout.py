"""Dropout before the classifier."""

from __future__ import annotations

from graph_passes import roles
from graph_passes.errors import GraphError
from graph_passes.graph import Graph, Node, Ref


def dropout(graph: Graph, p: float) -> Graph:
    """Drop a fraction `p` of the classifier's input (Srivastava et al., JMLR 15, 2014).

        before    x -> FullyConnected `classifier`
        after     x -> Dropout(p) `classifier_drop` -> FullyConnected `classifier`

    Raises GraphError unless 0 <= p < 1.
    """
    if not 0 <= p < 1:
        raise GraphError(f"dropout cannot drop a share of {p:g}: give at least 0 and less than 1")
    classifier = roles.classifier(graph)
    data, *others = classifier.inputs
    drop = Node("Dropout", graph.unused_name(f"{classifier.name}_drop"), (data,), {"p": p})
    return graph.replace([drop, classifier.replace(inputs=(Ref(drop.name), *others))] if p else [], {})
