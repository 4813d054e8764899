"""The gradient of a BatchNorm's input, with the sum with the gradient of whatever else reads that input."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref

_APPLIES = ("BatchNormBackwardApply", "BatchNormReluBackwardApply")


def norm_grad_add(graph: Graph) -> Graph:
    """Let the second half of a BatchNorm's backward pass add the other gradient of the tensor that it read.

        before    dy, x, ..., dgamma, dbeta -> BatchNormReluBackwardApply -> dx;  dx, other -> elemwise_add `s`
        after     dy, x, ..., dgamma, dbeta, other -> BatchNormReluBackwardApplyAdd `s`

    dx is neither written nor read: at the blocks of a network whose BatchNorms come first (ResNet v2), where a sum goes
    to a BatchNorm and past it. Of two such gradients the one that is computed last adds the other.
    """
    places = {node.name: place for place, node in enumerate(graph)}

    def fuse(node: Node) -> Node | None:
        if node.op != "elemwise_add":
            return None
        found = [apply for ref in node.inputs
                 if (apply := graph.only_used_by_one(ref, *_APPLIES)) and apply.get("no_factors", True)]
        if not found:
            return None
        apply = max(found, key=lambda each: places[each.name])
        other, = (ref for ref in node.inputs if ref != Ref(apply.name))
        return apply.derive(f"{apply.op}Add", node.name, (*apply.inputs, other))

    return graph.rewrite(fuse)
