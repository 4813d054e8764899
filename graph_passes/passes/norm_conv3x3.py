"""The BatchNorm + ReLU of a training step, and the 3x3 convolution that reads its output."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref
from graph_passes.passes.choice import Choose


def norm_conv3x3(graph: Graph, choose: Choose) -> Graph:
    """Let BatchNorm + ReLU also compute the 3x3 convolution over 64 channels that reads its output, with the sums of
    that one's output, where a kernel of our own computes it.

        before    x, sums, ... -> BatchNormReluApply `bn` -> y, saved, ...
                  y, weight -> Conv3x3Statistics -> z, sums of z
        after     x, sums, ..., weight -> BatchNormReluConv3x3 `bn` -> y, saved, ..., z, sums of z

    y is written, for the gradient of the weights reads it, but z is made of what is still on the chip. The kernel is
    for GPUs of the Hopper generation.
    """
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    for norm in graph:
        convolution = _convolution(graph, norm)
        if convolution is None:
            continue
        fused = Node("BatchNormReluConv3x3", norm.name, (*norm.inputs, convolution.inputs[1]),
                     {**convolution.attrs, **norm.attrs})
        ways = {"separate": [norm, convolution], "norm_conv3x3": [fused]}
        if choose(graph, norm, ways) == "norm_conv3x3":
            nodes.append(fused)
            moved |= {Ref(convolution.name): fused.output("convolved"),
                      convolution.output("sums"): fused.output("sums")}
    return graph.replace(nodes, moved)


def _convolution(graph: Graph, norm: Node) -> Node | None:
    """The first that reads what `norm` gives, if both can be one."""
    if norm.op != "BatchNormReluApply":
        return None
    output = Ref(norm.name)
    return next((node for node in graph.consumers.get(output, ())
                 if node.op == "Conv3x3Statistics" and node.inputs[0] == output), None)
