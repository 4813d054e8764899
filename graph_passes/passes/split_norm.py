"""Split a BatchNorm of a training step into two operators: the sums over the batch, and the elementwise part."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref

_FORWARD = {"BatchNormTrain": "BatchNormApply", "BatchNormReluTrain": "BatchNormReluApply",
            "BatchNormAddReluTrain": "BatchNormAddReluApply"}
_BACKWARD = ("BatchNormBackward", "BatchNormReluBackward", "BatchNormAddReluBackward")


def split_norm(graph: Graph) -> Graph:
    """Replace every BatchNorm, forward and backward, by its two halves. Each half can be fused with another neighbour.

        before    x, gamma, beta, mean, var -> BatchNormReluTrain `bn`
        after     x -> BatchNormStatistics `bn_sums`; x, sums, gamma, beta, mean, var -> BatchNormReluApply `bn`

        before    dy, x, gamma, saved, beta -> BatchNormReluBackward `b` -> dx, dgamma, dbeta
        after     dy, x, gamma, saved, beta -> BatchNormReluBackwardReduce `b_sums` -> dgamma, dbeta
                  dy, x, gamma, saved, beta, dgamma, dbeta -> BatchNormReluBackwardApply `b` -> dx

    If the reduction keeps `masked_grad`, the second half reads `masked_grad`: BatchNormBackwardApply. With stochastic
    depth both halves read the factors. Two BatchNorms of one tensor share its sums.
    """
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    sums: dict[Ref, Ref] = {}  # tensor -> its sums
    for node in graph:
        if node.op in _FORWARD:
            data, *others = node.inputs
            if data not in sums:
                nodes.append(node.derive("BatchNormStatistics", graph.unused_name(f"{node.name}_sums"), (data,),
                                         part_of=node.name))
                sums[data] = Ref(nodes[-1].name)
            nodes.append(node.derive(_FORWARD[node.op], node.name, (data, sums[data], *others)))
        elif node.op in _BACKWARD:
            reduction, apply = _backward(graph, node)
            nodes += [reduction, apply]
            moved |= dict(zip(node.refs()[1:], reduction.refs(), strict=False))
    return graph.replace(nodes, moved)


def _backward(graph: Graph, node: Node) -> tuple[Node, Node]:
    """The two halves; the second has the name of the replaced node."""
    dy, data, gamma, saved, *_ = node.inputs
    reduction = node.derive(f"{node.op}Reduce", graph.unused_name(f"{node.name}_sums"), node.inputs, part_of=node.name)
    dgamma, dbeta, *dz = reduction.refs()
    if dz or node.op == "BatchNormBackward":
        factors = [] if node.get("no_factors", True) else [node.input("factors")]
        return reduction, node.derive("BatchNormBackwardApply", node.name,
                                      (*(dz or [dy]), data, gamma, saved, dgamma, dbeta, *factors))
    return reduction, node.derive("BatchNormReluBackwardApply", node.name,
                                  (dy, data, gamma, saved, node.input("beta"), dgamma, dbeta))
