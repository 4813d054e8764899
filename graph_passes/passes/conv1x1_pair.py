"""The last convolution of a residual block in inference, and the first of the next block, by one kernel of our own."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref
from graph_passes.passes.choice import Choose
from graph_passes.passes.conv1x1 import is_product

FIRST, SECOND = ("ConvolutionAddRelu", "Conv1x1AddRelu"), ("ConvolutionRelu", "Conv1x1Relu")


def conv1x1_pair(graph: Graph, choose: Choose) -> Graph:
    """Let the 1x1 convolution that ends a block also compute the one that begins the next, in 16-bit types.

        before    x, weight, bias, shortcut -> ConvolutionAddRelu `r` -> y;  y, weight_2, bias_2 -> ConvolutionRelu -> z
        after     x, weight, bias, shortcut, weight_2, bias_2 -> Conv1x1Pair `r` -> y, z

    Likewise with Conv1x1AddRelu and Conv1x1Relu. y is written, for the next sum reads it too, but z is made of what is
    still on the chip.
    """
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    for first in graph:
        if first.op not in FIRST or not is_product(first):
            continue
        second = next((reader for reader in graph.consumers.get(Ref(first.name), ())
                       if reader.op in SECOND and reader.inputs[0] == Ref(first.name) and is_product(reader)), None)
        if second is None:
            continue
        pair = first.derive("Conv1x1Pair", first.name, (*first.inputs, *second.inputs[1:]),
                            num_filter_2=second["num_filter"])
        if choose(graph, first, {"separate": [first, second], "conv1x1_pair": [pair]}) == "conv1x1_pair":
            nodes.append(pair)
            moved[Ref(second.name)] = pair.output("output_2")
    return graph.replace(nodes, moved)
