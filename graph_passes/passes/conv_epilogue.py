"""Bias, sum and ReLU in the epilogue of a convolution."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import is_relu
from graph_passes.passes.choice import Choose
from graph_passes.passes.conv1x1 import own_way
from graph_passes.passes.conv3x3 import own_way_3x3


def conv_epilogue(graph: Graph, choose: Choose, groups: bool = False) -> Graph:
    """Let a convolution with bias also add a tensor and apply ReLU, where that is faster than a launch of its own.

        before    x, weight, bias -> Convolution -> y;  y, shortcut -> AddRelu `r`
        after     x, weight, bias, shortcut -> ConvolutionAddRelu `r`
        or        x, weight -> Convolution -> product;  product, bias, shortcut -> BiasAddRelu `r`

    Likewise with ReLU alone: ConvolutionRelu or BiasRelu; and with neither: Convolution as it is, or BiasAdd. A 1x1
    convolution may be our own kernel's: Conv1x1AddRelu, Conv1x1Relu or Conv1x1; and a 3x3 one with ReLU: Conv3x3Relu.
    `groups`: also where the convolution is one in groups, into which cuDNN fuses nothing.
    """
    ends = {}  # name of a convolution -> the ReLU that reads it
    for node in graph:
        if convolution := _before_relu(graph, node):
            ends[convolution.name] = node
    chosen: dict[str, list[Node]] = {}  # name of a node -> those in its place
    for node in graph:
        if node.op == "Convolution" and not node["no_bias"]:
            end = ends.get(node.name)
            fused, separate = in_one_and_in_two(graph, node, end)
            names = {"Convolution": "fprop_bias", "ConvolutionRelu": "fprop_bias_relu",
                     "ConvolutionAddRelu": "fprop_bias_add_relu"}
            ways: dict[str, Sequence[Node]] = {"separate": separate, names[fused.op]: [fused], **own_way(fused),
                                               **own_way_3x3(fused)}
            way = separate if node["num_group"] > 1 and not groups else ways[choose(graph, node, ways)]
            chosen[end.name if end else node.name] = list(way)
    nodes = [node for way in chosen.values() for node in way]
    return graph.replace(nodes, {})


def _before_relu(graph: Graph, node: Node) -> Node | None:
    """The convolution with bias that this ReLU, or sum and ReLU, alone reads: the first, if there are two."""
    if not is_relu(node) and node.op != "AddRelu":
        return None
    found = (graph.only_used_by_one(ref, "Convolution") for ref in node.inputs)
    return next((each for each in found if each and not each["no_bias"]), None)


def in_one_and_in_two(graph: Graph, convolution: Node, end: Node | None) -> tuple[Node, list[Node]]:
    """In one node, and in two; the last has the name of what is replaced."""
    *inputs, bias = convolution.inputs
    addend = [ref for ref in end.inputs if ref != Ref(convolution.name)] if end else []
    kind = "AddRelu" if addend else "Relu" if end else ""
    name = end.name if end else convolution.name
    fused = convolution.derive(f"Convolution{kind}", name, (*convolution.inputs, *addend))
    plain = convolution.derive("Convolution", graph.unused_name(f"{convolution.name}_product"), inputs, no_bias=True)
    return fused, [plain, Node(f"Bias{kind or 'Add'}", name, (Ref(plain.name), bias, *addend),
                               {key: value for key, value in convolution.attrs.items() if key == "dtype"})]
