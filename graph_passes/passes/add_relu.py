"""Fuse an elementwise addition followed by ReLU into one operator."""

from __future__ import annotations

from graph_passes.graph import Graph, Node
from graph_passes.operators import is_relu


def add_relu(graph: Graph) -> Graph:
    """Fuse addition and ReLU if nothing else reads the sum.

        before    a, b -> elemwise_add `add` -> Activation(relu)
        after     a, b -> AddRelu `add_relu`

    The sum is never written to memory. This saves one write and one read, and the same for the gradient of the sum.
    """

    def fuse(node: Node) -> Node | None:
        if not is_relu(node):
            return None
        add = graph.only_used_by_one(node.inputs[0], "elemwise_add")
        return Node("AddRelu", graph.unused_name(f"{add.name}_relu"), add.inputs) if add else None

    return graph.rewrite(fuse)
