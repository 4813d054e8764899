"""The stem in inference: ResNet's first convolution up to its max pooling, by a kernel of our own."""

from __future__ import annotations

from graph_passes.graph import Graph, Node
from graph_passes.operators import is_relu, window
from graph_passes.passes.choice import Choose
from graph_passes.passes.conv_epilogue import in_one_and_in_two
from graph_passes.passes.stem import FILTERS, WINDOW

POOLING = ((3, 3), (2, 2), (1, 1), (1, 1))  # kernel, stride, pad, dilation


def stem_pool(graph: Graph, choose: Choose) -> Graph:
    """Let the first convolution, with its bias, also apply ReLU and max pooling, in 16-bit types.

        before    image, weight, bias -> Convolution -> relu -> Pooling `pool`
        after     image, weight, bias -> StemPool `pool`

    The largest tensor of the network is not written.
    """
    nodes: list[Node] = []
    for pooling in graph:
        relu = _relu_before(graph, pooling)
        convolution = graph.only_used_by_one(relu.inputs[0], "Convolution") if relu else None
        if relu is None or convolution is None or not _fits(convolution):
            continue
        _, separate = in_one_and_in_two(graph, convolution, relu)
        stem = convolution.derive("StemPool", pooling.name, convolution.inputs)
        if choose(graph, pooling, {"separate": [*separate, pooling], "stem_pool": [stem]}) == "stem_pool":
            nodes.append(stem)
    return graph.replace(nodes, {})


def _relu_before(graph: Graph, pooling: Node) -> Node | None:
    """The ReLU that only this max pooling reads, if it is the stem's."""
    if (pooling.op != "Pooling" or pooling["pool_type"] != "max" or pooling["global_pool"]
            or pooling["pooling_convention"] != "valid" or window(pooling) != POOLING):
        return None
    relu = graph.only_used_by_one(pooling.inputs[0], "relu", "Activation")
    return relu if relu and is_relu(relu) else None


def _fits(convolution: Node) -> bool:
    return (window(convolution) == WINDOW and convolution["num_filter"] == FILTERS and not convolution["no_bias"]
            and convolution["num_group"] == 1 and convolution["layout"] == "NHWC"
            and convolution.attrs.get("dtype") in ("float16", "bfloat16"))
