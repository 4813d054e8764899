"""The gradient of the weights of 3x3 convolutions, by a kernel of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph_passes.graph import Graph, Node
from graph_passes.passes.choice import Choose
from graph_passes.passes.conv3x3 import is_3x3

CHANNELS = 64  # of the data and of the output that a block works on: its part of the gradient fits into registers


def conv3x3_wgrad(graph: Graph, shapes: Mapping[str, Sequence[int]], choose: Choose) -> Graph:
    """Let the gradient of a 3x3 convolution's weights be computed by our own kernel, where that is faster than cuDNN.

        before    dy, data -> ConvolutionWgrad `dw`
        after     dy, data -> Conv3x3Wgrad `dw`

    For stride and padding of 1 over multiples of 64 channels, in 16-bit types and NHWC; the kernel is for GPUs of the
    Hopper generation. `shapes` are those of the graph's inputs.
    """
    sizes = graph.infer_shapes(shapes)

    def own(node: Node) -> Node | None:
        if node.op != "ConvolutionWgrad" or not is_3x3(node):
            return None
        if node["num_filter"] % CHANNELS or sizes[node.input("data")][3] % CHANNELS:
            return None
        ways = {"separate": [node], "conv3x3_weights": [node.replace(op="Conv3x3Wgrad")]}
        return ways[choose(graph, node, ways)][0]

    return graph.rewrite(own)
