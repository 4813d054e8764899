"""The last convolution of a residual block in INT8, and the first of the next block, by one kernel of our own."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref
from graph_passes.passes.choice import Choose
from graph_passes.passes.quantised_sum import is_product

PAIR = "quantised_pair"


def quantised_pair(graph: Graph, choose: Choose) -> Graph:
    """Let the 1x1 convolution that ends a block also compute the one that begins the next.

        before    x, weight, multiplier, bias, shortcut -> QuantisedConvolution `r` -> y
                  y, weight_2, multiplier_2, bias_2 -> QuantisedConvolution -> z
        after     x, weight, multiplier, bias, shortcut, weight_2, multiplier_2, bias_2
                  -> QuantisedConvolutionPair `r` -> y, z

    Both with ReLU. Likewise a QuantisedConvolutionSum begins a QuantisedConvolutionSumPair. y is written, for the next
    sum reads it too, but z is made of what is still on the chip. After `quantised_way` and `quantised_sum`, so that the
    two by themselves are timed in their fastest ways.
    """
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    for first in graph:
        if not _begins(first):
            continue
        second = next((reader for reader in graph.consumers.get(Ref(first.name), ())
                       if _is_rectified(reader) and reader["no_addend"]), None)
        if second is None:
            continue
        pair = first.derive(f"{first.op}Pair", first.name, (*first.inputs, *second.inputs[1:]),
                            num_filter_2=second["num_filter"], scale_2=second["scale"])
        if choose(graph, first, {"separate": [first, second], PAIR: [pair]}) == PAIR:
            nodes.append(pair)
            moved[Ref(second.name)] = pair.output("output_2")
    return graph.replace(nodes, moved)


def _begins(first: Node) -> bool:
    if first.op == "QuantisedConvolutionSum":
        return bool(first["relu"])
    return _is_rectified(first) and not first["no_addend"]


def _is_rectified(node: Node) -> bool:
    return is_product(node) and bool(node["relu"])
