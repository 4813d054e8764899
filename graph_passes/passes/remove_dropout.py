"""Inference: remove Dropout."""

from __future__ import annotations

from graph_passes.graph import Graph, Ref

_OPERATORS = ("Dropout", "DropoutImages", "DropoutElements")


def remove_dropout(graph: Graph) -> Graph:
    """Remove every Dropout, including the products of `draw_masks`.

        before    x -> Dropout -> FullyConnected
        after     x -> FullyConnected
    """
    return graph.replace([], {Ref(node.name): node.inputs[0] for node in graph if node.op in _OPERATORS})
