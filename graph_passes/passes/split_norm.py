"""A BatchNorm of a training step is two operators: the sums over the batch, and what is done with them."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref

_FORWARD = {"BatchNormTrain": "BatchNormApply", "BatchNormReluTrain": "BatchNormReluApply",
            "BatchNormAddReluTrain": "BatchNormAddReluApply"}
_BACKWARD = ("BatchNormBackward", "BatchNormReluBackward", "BatchNormAddReluBackward")


def split_norm(graph: Graph) -> Graph:
    """Write every BatchNorm, forward and backward, as its two halves: each can be fused with another neighbour.

        before    x, gamma, beta, mean, var -> BatchNormReluTrain `bn`
        after     x -> BatchNormStatistics `bn_sums`; x, sums, gamma, beta, mean, var -> BatchNormReluApply `bn`

        before    dy, x, gamma, saved, beta -> BatchNormReluBackward `b` -> dx, dgamma, dbeta
        after     dy, x, gamma, saved, beta -> BatchNormReluBackwardReduce `b_sums` -> dgamma, dbeta
                  dy, x, gamma, saved, beta, dgamma, dbeta -> BatchNormReluBackwardApply `b` -> dx

    Where the reduction keeps `masked_grad`, it is from there that the second half starts: BatchNormBackwardApply. Both
    halves read the factors of images that are dropped. Two BatchNorms of one tensor share its sums.
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
    """The two halves; the second has the name of the whole."""
    dy, data, gamma, saved, *_ = node.inputs
    reduction = node.derive(f"{node.op}Reduce", graph.unused_name(f"{node.name}_sums"), node.inputs, part_of=node.name)
    dgamma, dbeta, *dz = reduction.refs()
    if dz or node.op == "BatchNormBackward":
        factors = [] if node.get("no_factors", True) else [node.input("factors")]
        return reduction, node.derive("BatchNormBackwardApply", node.name,
                                      (*(dz or [dy]), data, gamma, saved, dgamma, dbeta, *factors))
    return reduction, node.derive("BatchNormReluBackwardApply", node.name,
                                  (dy, data, gamma, saved, node.input("beta"), dgamma, dbeta))
