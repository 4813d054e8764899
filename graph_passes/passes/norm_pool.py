"""The BatchNorm + ReLU and the max pooling of ResNet's stem become one operator, forward and backward."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators.batch_norm_pool import WINDOW


def norm_pool(graph: Graph) -> Graph:
    """Fuse the halves of a BatchNorm + ReLU with the 3x3 max pooling with stride 2 that alone reads it, in NHWC.

        before    x, sums -> BatchNormReluApply `bn` -> MaxPoolingTrain -> y, winner
        after     x, sums -> BatchNormPoolApply `bn` -> y, saved, ..., winner, data_at_winner

        before    dy, winner -> MaxPoolingBackward -> BatchNormReluBackwardReduce, BatchNormReluBackwardApply -> dx
        after     dy, winner, data_at_winner -> BatchNormPoolBackwardReduce -> dgamma, dbeta
                  dy, winner, x, dgamma, dbeta -> BatchNormPoolBackwardApply -> dx

    What BatchNorm + ReLU gives, the network's largest activation, is not written, nor is its gradient.
    """
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    for norm in graph:
        pool = graph.sole_reader(Ref(norm.name), "MaxPoolingTrain") if norm.op == "BatchNormReluApply" else None
        if pool is None or not _fits(norm, pool):
            continue
        attrs = {**pool.attrs, **norm.attrs}
        apply = Node("BatchNormPoolApply", norm.name, norm.inputs, attrs)
        moved |= {pool.output(role): apply.output(role) for role in ("output", "winner")}
        nodes += [apply, *_backward(graph, norm, pool, apply)]
    return graph.replace(nodes, moved)


def _fits(norm: Node, pool: Node) -> bool:
    return (pool["layout"] == "NHWC" and norm["axis"] in (3, -1) and not pool["global_pool"]
            and all(pool[name] == value for name, value in WINDOW.items()))


def _backward(graph: Graph, norm: Node, pool: Node, apply: Node) -> list[Node]:
    """Both halves, under the names of those of the BatchNorm."""
    (back,) = (reader for reader in graph.consumers[pool.output("winner")] if reader.op == "MaxPoolingBackward")
    reduction, old_apply = (next(reader for reader in graph.consumers[norm.output("saved")] if reader.op.endswith(half))
                            for half in ("BackwardReduce", "BackwardApply"))
    dy, _, *second = back.inputs
    winner, at_winner, saved = (apply.output(role) for role in ("winner", "data_at_winner", "saved"))
    sums = Node("BatchNormPoolBackwardReduce", reduction.name, (dy, winner, at_winner, saved, *second),
                {**apply.attrs, "single_grad": back["single_grad"]})
    dgamma, dbeta, *dz = sums.refs()
    inputs = (*(dz or [dy]), winner, norm.input("data"), norm.input("gamma"), saved, dgamma, dbeta)
    return [sums, Node("BatchNormPoolBackwardApply", old_apply.name, inputs, apply.attrs)]
