"""Which of cuDNN's algorithms a recurrent layer takes."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.graph import Graph, Node
from graph_passes.operators.rnn import ALGORITHMS
from graph_passes.passes.choice import Choose


def rnn_algorithm(graph: Graph, choose: Choose, algorithms: Sequence[str] = ALGORITHMS) -> Graph:
    """Let the device choose how recurrent layers are computed, among `algorithms` (`operators/rnn.py`).

        before    RNNTrain, RNNBackward
        after     RNNTrain(algorithm=persist_static), RNNBackward(algorithm=persist_static)

    A layer and its backward pass, which reads what that algorithm has left, have one; inference has its own. The
    persistent ones keep the weights on the chip, which is faster where they fit and few sequences share them.
    """
    nodes: list[Node] = []
    for node in graph:
        if node.op not in ("RNN", "RNNTrain"):
            continue
        backward = [reader for ref in node.refs() for reader in graph.consumers.get(ref, ())
                    if reader.op == "RNNBackward" and reader.input("reserve").node == node.name]
        layer = list(dict.fromkeys([node.name, *(reader.name for reader in backward)]))
        ways = {algorithm: [graph[name].with_attrs(algorithm=algorithm) for name in layer] for algorithm in algorithms}
        nodes += ways[choose(graph, node, ways)]
    return graph.replace(nodes, {})
