"""The last convolution of a residual block in inference, and that of its shortcut, by one kernel of our own."""

from __future__ import annotations

from graph_passes.graph import Graph, Node
from graph_passes.passes.choice import Choose
from graph_passes.passes.conv1x1 import is_product

SUMS, ADDENDS = ("ConvolutionAddRelu", "Conv1x1AddRelu"), ("Convolution", "Conv1x1")


def conv1x1_sum(graph: Graph, choose: Choose) -> Graph:
    """Let one kernel compute both 1x1 convolutions whose sum is a block's output, in 16-bit types.

        before    x, weight, bias -> Convolution -> s;  y, weight_2, bias_2, s -> ConvolutionAddRelu `r`
        after     x, weight, bias, y, weight_2, bias_2 -> Conv1x1SumRelu `r`

    Likewise with Conv1x1 and Conv1x1AddRelu. One of the two, the first in the new node, may have stride 2. Their sum is
    one product over the channels of both: s is neither written nor read, nor is it rounded. Where `conv1x1_pair` could
    begin with `r`, it would only save reading as many bytes once, so it comes after this pass.
    """
    nodes: list[Node] = []
    for last in graph:
        if last.op not in SUMS:
            continue
        addend = graph.only_used_by_one(last.input("addend"), *ADDENDS)
        if addend is None or addend["no_bias"]:
            continue
        both = (last, addend) if is_product(addend) else (addend, last)
        first, second = both
        if not is_product(second) or not (is_product(first) or is_product(first, stride=(2, 2))):
            continue
        fused = first.derive("Conv1x1SumRelu", last.name, (*first.inputs[:3], *second.inputs[:3]))
        if choose(graph, last, {"separate": [addend, last], "conv1x1_sum": [fused]}) == "conv1x1_sum":
            nodes.append(fused)
    return graph.replace(nodes, {})
