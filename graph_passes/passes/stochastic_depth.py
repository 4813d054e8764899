"""Stochastic depth: training skips residual branches at random."""

from __future__ import annotations

from typing import Literal

from graph_passes import roles
from graph_passes.errors import GraphError
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators.dropout import PER_BATCH, PER_IMAGE


def stochastic_depth(graph: Graph, rate: float, mode: Literal["image", "block"] = "image") -> Graph:
    """Put a Dropout of whole images at the end of each residual branch (Huang et al., arXiv:1603.09382).

        before    x -> BatchNorm `bn` -> elemwise_add (with shortcut)
        after     x -> BatchNorm `bn` -> Dropout(p, axes=(1, 2, 3)) `bn_drop` -> elemwise_add (with shortcut)

    The rates rise linearly from 0 at the first block to `rate` at the last, as in timm: branch i of n has rate * i / (n
    - 1). A rate of 0 leaves no node. `mode` "image": each image is dropped or not; "block": all images of a batch are
      dropped together.
    Kept branches are divided by 1 - p, as in timm and torchvision. A frozen branch (`freeze`) computes the same output
    in training and in inference: it counts as a branch but is never dropped. The network must not be fused yet.

    Raises GraphError unless 0 <= rate < 1, or if there is no branch to drop.
    """
    if not 0 <= rate < 1:
        raise GraphError(f"branches cannot be dropped at a rate of {rate:g}: give at least 0 and less than 1")
    branches, trained = roles.branches(graph), roles.trained(graph)
    if not branches:
        raise GraphError("the network has no residual branches to drop: use another network, or leave out "
                         "stochastic depth")
    if not any(end.node in trained for end in branches.values()):
        raise GraphError("all residual branches are frozen, so none can be dropped: freeze fewer layers, or leave out "
                         "stochastic depth")
    axes = PER_IMAGE if mode == "image" else PER_BATCH
    nodes: list[Node] = []
    for number, (name, end) in enumerate(branches.items()):
        p = rate * number / max(len(branches) - 1, 1)
        if p and end.node in trained:
            drop = Node("Dropout", graph.unused_name(f"{end.node}_drop"), (end,), {"p": p, "axes": axes})
            inputs = tuple(Ref(drop.name) if ref == end else ref for ref in graph[name].inputs)
            nodes += [drop, graph[name].replace(inputs=inputs)]
    return graph.replace(nodes, {})
