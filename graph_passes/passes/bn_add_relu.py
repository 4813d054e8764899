"""A BatchNorm, the addition of a shortcut and ReLU become one operator."""

from __future__ import annotations

from graph_passes.graph import Graph, Node
from graph_passes.operators import is_relu


def bn_add_relu(graph: Graph) -> Graph:
    """Fuse BatchNorm, add and ReLU where nothing else reads the two tensors between them.

        before    x, gamma, beta, mean, var -> BatchNorm `bn` -+
                                             shortcut ---------+-> elemwise_add -> Activation(relu)
        after     x, gamma, beta, mean, var, shortcut -> BatchNormAddRelu `bn_add_relu`

    Where a BatchNorm feeds each side of the sum, the first one is taken. Finds an AddRelu of the pass `add_relu` as
    well, so that the order of the passes does not matter.
    """

    def sum_of(node: Node) -> Node | None:
        """The node whose inputs are added up, if `node` is the ReLU of a sum."""
        if node.op == "AddRelu":
            return node
        return graph.only_used_by_one(node.inputs[0], "elemwise_add") if is_relu(node) else None

    def fuse(node: Node) -> Node | None:
        add = sum_of(node)
        if add is None:
            return None
        for ref, shortcut in (add.inputs, reversed(add.inputs)):
            if bn := graph.only_used_by_one(ref, "BatchNorm"):
                name = graph.unused_name(f"{bn.name}_add_relu")
                return bn.replace(op="BatchNormAddRelu", name=name, inputs=(*bn.inputs, shortcut))
        return None

    return graph.rewrite(fuse)
