"""The stem in INT8: the first convolution with its max pooling, by a kernel of our own."""

from __future__ import annotations

from graph_passes.graph import Graph, Node
from graph_passes.operators import window
from graph_passes.passes.choice import Choose
from graph_passes.passes.stem import FILTERS
from graph_passes.passes.stem_pool import POOLING

WINDOW = ((4, 4), (1, 1), (0, 0), (1, 1))  # of 7x7 with stride 2 and padding 3, in squares
WAY = "quantised_stem_pool"


def quantised_stem_pool(graph: Graph, choose: Choose) -> Graph:
    """Let the first convolution in INT8, of squares, also do the max pooling.

        before    squares, weight, multiplier, bias -> QuantisedConvolution -> QuantisedPooling `pool`
        after     squares, weight, multiplier, bias -> QuantisedStemPool `pool`

    The largest tensor of the network is not written; maxima of integers are the same integers. After `quantised_way`,
    so that the convolution by itself is timed in its fastest way.
    """
    nodes: list[Node] = []
    for pooling in graph:
        convolution = graph.only_used_by_one(pooling.inputs[0], "QuantisedConvolution") if _is_max(pooling) else None
        if convolution is None or not _fits(graph, convolution):
            continue
        stem = convolution.derive("QuantisedStemPool", pooling.name, convolution.inputs)
        if choose(graph, pooling, {"separate": [convolution, pooling], WAY: [stem]}) == WAY:
            nodes.append(stem)
    return graph.replace(nodes, {})


def _is_max(pooling: Node) -> bool:
    return (pooling.op == "QuantisedPooling" and pooling["pool_type"] == "max" and not pooling["global_pool"]
            and pooling["pooling_convention"] == "valid" and window(pooling) == POOLING)


def _fits(graph: Graph, convolution: Node) -> bool:
    return (graph[convolution.inputs[0].node].op == "QuantiseSquares" and window(convolution) == WINDOW
            and convolution["num_filter"] == FILTERS and convolution["num_group"] == 1 and convolution["no_addend"]
            and convolution["layout"] == "NHWC" and convolution["dtype"] == "int8")
