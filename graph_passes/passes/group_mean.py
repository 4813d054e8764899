"""BatchNorm statistics shared by the GPUs of a group: each GPU's sums are replaced by the sums of the group."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import OPERATORS

_GRADIENTS = ("gamma_grad", "gamma_grad_2", "beta_grad", "beta_grad_2")


def group_mean(graph: Graph) -> Graph:
    """Insert an exchange after every sum over the batch, forward and backward, before any reader.

        before    x -> BatchNormStatistics `s` -> sums;  x, sums -> BatchNormApply
        after     x -> BatchNormStatistics `s` -> sums;  x, sums -> GroupStatistics `s_group` -> group's sums;
                  x, group's sums -> BatchNormApply

        before    dy, x -> BatchNormBackwardReduce `b` -> dgamma, dbeta
        after     dy, x -> BatchNormBackwardReduce `b` -> dgamma, dbeta -> GroupMean `b_group` -> their means

    This is the last pass, so that fusions need not handle exchanges.
    """
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    for node in graph:
        names = OPERATORS[node.op].output_names(node) if node.op in OPERATORS else ()
        if "sums" in names and node.output("sums") in graph.consumers:
            sums = node.output("sums")
            norm = graph.consumers[sums][0]
            data = norm.inputs[norm.inputs.index(sums) - 1]  # the data is the input before its sums
            nodes.append(norm.derive("GroupStatistics", graph.unused_name(f"{node.name}_group"), (data, sums),
                                     part_of=norm.name))
            moved[sums] = Ref(nodes[-1].name)
        elif "gamma_grad" in names and "data_grad" not in names and node.output("gamma_grad") in graph.consumers:
            gradients = tuple(node.output(name) for name in _GRADIENTS if name in names)
            part_of = node.attrs.get("part_of") or graph.consumers[gradients[0]][0].name
            attrs = {"at_most_2": len(gradients) == 2, "part_of": part_of}
            nodes.append(Node("GroupMean", graph.unused_name(f"{node.name}_group"), gradients, attrs))
            moved |= dict(zip(gradients, nodes[-1].refs(), strict=True))
    return graph.replace(nodes, moved)
