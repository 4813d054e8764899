"""Fuse a BatchNorm followed by ReLU into one operator."""

from __future__ import annotations

from graph_passes.graph import Graph, Node
from graph_passes.operators import is_relu


def bn_relu(graph: Graph) -> Graph:
    """Fuse BatchNorm and ReLU if nothing else reads the normalised tensor.

        before    x, gamma, beta, mean, var -> BatchNorm `bn` -> Activation(relu)
        after     x, gamma, beta, mean, var -> BatchNormRelu `bn_relu`

    In the backward pass, one operator masks the gradient and computes BatchNorm's two reductions of it.
    """

    def fuse(node: Node) -> Node | None:
        if not is_relu(node):
            return None
        bn = graph.only_used_by_one(node.inputs[0], "BatchNorm")
        return bn.replace(op="BatchNormRelu", name=graph.unused_name(f"{bn.name}_relu")) if bn else None

    return graph.rewrite(fuse)
