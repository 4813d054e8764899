"""Fuse a BatchNorm, the addition of a shortcut and ReLU into one operator."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import is_relu


def bn_add_relu(graph: Graph) -> Graph:
    """Fuse BatchNorm, addition and ReLU if nothing else reads the two tensors between them.

        before    x, gamma, beta, mean, var -> BatchNorm `bn` -+
                                             shortcut ---------+-> elemwise_add -> Activation(relu)
        after     x, gamma, beta, mean, var, shortcut -> BatchNormAddRelu `bn_add_relu`

    If both summands come from BatchNorms, the first is fused. An AddRelu from the pass `add_relu` is fused as well, so
    the order of the passes does not matter. With stochastic depth between BatchNorm and sum:

        before    x, gamma, beta, mean, var -> BatchNorm `bn`;  bn, factors -> DropoutImages -> elemwise_add -> ...
        after     x, gamma, beta, mean, var, shortcut, factors -> BatchNormAddRelu(no_factors=False) `bn_add_relu`

    If both summands come from BatchNorms, the BatchNorm with stochastic depth is the one that is fused.
    """

    def dropped(ref: Ref) -> Node | None:
        """The stochastic-depth node between the BatchNorm and the addition; None if there is none."""
        drop = graph.only_used_by_one(ref, "DropoutImages")
        bn = graph.only_used_by_one(drop.inputs[0], "BatchNorm") if drop else None
        return drop if bn and not bn["use_global_stats"] else None

    def sum_of(node: Node) -> Node | None:
        """The addition before `node`, if `node` is the ReLU of a sum; None otherwise."""
        if node.op == "AddRelu":
            return node
        return graph.only_used_by_one(node.inputs[0], "elemwise_add") if is_relu(node) else None

    def fuse(node: Node) -> Node | None:
        add = sum_of(node)
        if add is None:
            return None
        for ref, shortcut in (add.inputs, reversed(add.inputs)):
            if drop := dropped(ref):
                norm = graph[drop.inputs[0].node]
                return norm.derive("BatchNormAddRelu", graph.unused_name(f"{norm.name}_add_relu"),
                                   (*norm.inputs, shortcut, drop.inputs[1]), row=drop["row"], no_factors=False)
        for ref, shortcut in (add.inputs, reversed(add.inputs)):
            if bn := graph.only_used_by_one(ref, "BatchNorm"):
                name = graph.unused_name(f"{bn.name}_add_relu")
                return bn.replace(op="BatchNormAddRelu", name=name, inputs=(*bn.inputs, shortcut))
        return None

    return graph.rewrite(fuse)
