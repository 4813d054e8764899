"""A convolution that leaves the sums of its output for the BatchNorm that reads it."""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import channel_axis
from graph_passes.passes.choice import Choose
from graph_passes.passes.conv1x1 import own_way
from graph_passes.passes.conv3x3 import own_way_3x3


def conv_statistics(graph: Graph, choose: Choose) -> Graph:
    """Let convolutions compute the sums over their own output, where that is faster than to read it again.

        before    x, weight -> Convolution `conv` -> y -> BatchNormStatistics -> sums
        after     x, weight -> ConvolutionStatistics `conv` -> y, sums
        or        x, weight -> Conv1x1Statistics or Conv3x3Statistics `conv` -> y, sums

    cuDNN adds these sums up in a varying order, which its notes on plans do not say (cuDNN 9.19 on an H200: other bits
    in each of 20 runs). So this is not for runs that are to be repeatable. The last two are our own kernels', whose
    order is fixed, and whose sums are about the mean.
    """
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    for convolution, sums in with_statistics(graph):
        fused = convolution.derive("ConvolutionStatistics", convolution.name, convolution.inputs)
        ways = {"separate": [convolution, sums], "fprop_stats": [fused], **own_way(fused),
                **own_way_3x3(fused)}
        way = choose(graph, convolution, ways)
        if way != "separate":
            nodes += ways[way]
            moved[Ref(sums.name)] = fused.output("sums")
    return graph.replace(nodes, moved)


def with_statistics(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Convolutions without bias, and the BatchNormStatistics over the channels of their output. In groups there are
    none: cuDNN fuses nothing into these."""
    for sums in graph:
        if sums.op != "BatchNormStatistics":
            continue
        convolution = graph[sums.inputs[0].node]
        if (convolution.op == "Convolution" and convolution["no_bias"] and convolution["num_group"] == 1
                and sums["axis"] % 4 == channel_axis(convolution["layout"])):
            yield convolution, sums
