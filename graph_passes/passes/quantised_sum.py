"""The last convolution of a residual block in INT8, and that of its projection shortcut, by one kernel of our own."""

from __future__ import annotations

from graph_passes.graph import Graph, Node
from graph_passes.operators import window
from graph_passes.passes.choice import Choose
from graph_passes.passes.quantised_way import STREAMS

STRIDES = ((1, 1), (2, 2))  # of the shortcut


def quantised_sum(graph: Graph, choose: Choose) -> Graph:
    """Let one kernel compute both 1x1 convolutions whose sum is a block's output.

        before    x, weight, multiplier, bias -> QuantisedConvolution -> s
                  y, weight_2, multiplier_2, bias_2, s -> QuantisedConvolution `r`
        after     x, weight, multiplier, bias, y, weight_2, multiplier_2, bias_2 -> QuantisedConvolutionSum `r`

    The integers of s are the same, but neither written nor read. After `quantised_way`, so that the two by themselves
    are timed in their fastest ways.
    """
    nodes: list[Node] = []
    for last in graph:
        if not is_product(last) or last["no_addend"]:
            continue
        shortcut = graph.only_used_by_one(last.input("addend"), "QuantisedConvolution")
        if shortcut is None or not any(is_product(shortcut, stride) for stride in STRIDES) or (
                not shortcut["no_addend"] or shortcut["relu"]):
            continue
        inputs = (*shortcut.inputs, *last.inputs[:4])
        fused = shortcut.derive("QuantisedConvolutionSum", last.name, inputs, scale=last["scale"],
                                addend_scale=last["addend_scale"], relu=last["relu"])
        ways = {"separate": [shortcut, last], **{way: [fused.with_attrs(way=way)] for way in STREAMS}}
        way = choose(graph, last, ways)
        if way != "separate":
            nodes.extend(ways[way])
    return graph.replace(nodes, {})


def is_product(node: Node, stride: tuple[int, int] = (1, 1)) -> bool:
    """Is it a convolution from int8 to int8 that is a product of matrices?"""
    return (node.op == "QuantisedConvolution" and window(node) == ((1, 1), stride, (0, 0), (1, 1))
            and node["layout"] == "NHWC" and node["num_group"] == 1 and node["dtype"] == "int8")
