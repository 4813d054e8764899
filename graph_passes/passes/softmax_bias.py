"""Move the classifier's bias into the softmax or sigmoid that reads the scores."""

from __future__ import annotations

from graph_passes.graph import Graph, Node
from graph_passes.operators import LOSSES


def softmax_bias(graph: Graph) -> Graph:
    """Move a bias into the softmax or sigmoid that is its only reader.

        before    x, weight, bias -> FullyConnected `fc` -> SoftmaxCrossEntropy (data, label)
        after     x, weight -> FullyConnected(no_bias) `fc` -> SoftmaxCrossEntropy (data, label, bias)

    The sum is then computed in fp32 and needs no separate launch.
    """
    nodes: list[Node] = []
    for node in graph:
        if node.op in {*LOSSES, *LOSSES.values()} and node["no_bias"]:
            classifier = graph.only_used_by_one(node.inputs[0], "FullyConnected")
            if classifier and not classifier["no_bias"]:
                *inputs, bias = classifier.inputs
                nodes += [classifier.with_attrs(no_bias=True).replace(inputs=tuple(inputs)),
                          node.with_attrs(no_bias=False).replace(inputs=(*node.inputs, bias))]
    changed = {node.name: node for node in nodes}
    return graph.rewrite(lambda node: changed.get(node.name))
