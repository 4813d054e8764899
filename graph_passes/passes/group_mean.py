"""BatchNorm statistics shared by the GPUs of a group: the sums of each become their means over the group."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import OPERATORS

_GRADIENTS = ("gamma_grad", "gamma_grad_2", "beta_grad", "beta_grad_2")


def group_mean(graph: Graph) -> Graph:
    """Put a GroupMean after every sum over the batch, forward and backward, before anybody reads it.

        before    x -> BatchNormStatistics `s` -> sums -> BatchNormApply
        after     x -> BatchNormStatistics `s` -> sums -> GroupMean `s_mean` -> BatchNormApply

    The gradients of gamma and beta are such sums. The last of the passes: fusions need not know of it.
    """
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    for node in graph:
        sums = _sums(node)
        if sums:
            norm = node.attrs.get("part_of") or graph.consumers[sums[0]][0].name
            attrs = {"at_most_1": len(sums) == 1, "at_most_2": len(sums) <= 2, "part_of": norm}
            nodes.append(Node("GroupMean", graph.unused_name(f"{node.name}_mean"), sums, attrs))
            moved |= dict(zip(sums, nodes[-1].refs(), strict=True))
    return graph.replace(nodes, moved)


def _sums(node: Node) -> tuple[Ref, ...]:
    """What a node sums up over the batch."""
    names = OPERATORS[node.op].output_names(node) if node.op in OPERATORS else ()
    if "sums" in names and node.op != "GroupMean":
        return (node.output("sums"),)
    if "gamma_grad" in names and "data_grad" not in names:
        return tuple(node.output(name) for name in _GRADIENTS if name in names)
    return ()
