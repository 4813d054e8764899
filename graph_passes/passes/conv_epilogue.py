"""Fuse bias, addition and ReLU into the epilogue of a convolution; in INT8 also ReLU6. Likewise for fully connected
layers, whose epilogue is a separate operator."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import is_relu

_WEIGHTED = ("Convolution", "FullyConnected")


def conv_epilogue(graph: Graph, groups: bool = False) -> Graph:
    """Fuse a convolution with bias and the ReLU, or addition and ReLU, that is its only reader.

        before    x, weight, bias -> Convolution -> y;  y, shortcut -> AddRelu `r`
        after     x, weight, bias, shortcut -> ConvolutionAddRelu `r`

    Likewise with ReLU alone: ConvolutionRelu. Grouped convolutions become two operators, because cuDNN fuses nothing
    into them; with `groups` they are fused like other convolutions. A FullyConnected with bias becomes two operators as
    well, a product and BiasAdd, BiasRelu or BiasAddRelu: its output is small compared with its weights. The classifier
    has no bias here, because `softmax_bias` has moved the bias to the loss.
    """
    ends = {}  # name of a convolution or fully connected layer -> the ReLU that reads it
    for node in graph:
        if weighted := _before_relu(graph, node):
            ends[weighted.name] = node
    nodes: dict[str, list[Node]] = {}  # name of the replaced node -> new nodes
    for node in graph:
        if node.op not in _WEIGHTED or node["no_bias"]:
            continue
        end, name = ends.get(node.name), graph.unused_name(f"{node.name}_product")
        if node.op == "FullyConnected":
            nodes[(end or node).name] = _in_two(node, end, name)
        else:
            fused = _fused(node, end)
            nodes[fused.name] = [fused] if groups or node["num_group"] == 1 else in_two(fused, name)
    return graph.replace([node for each in nodes.values() for node in each], {})


def saturate_clip(graph: Graph) -> Graph:
    """For INT8: replace a clip with the lower limit 0, such as ReLU6, by a ReLU, if it follows a convolution and its
    readers use integers.

        before    x -> Convolution -> clip(0, 6) `r` -> Convolution
        after     x -> Convolution -> Activation(relu) `r` -> Convolution

    The integers of `r` end at its limit of calibration, which is at most 6, because the tensor has no larger values.
    """
    def rule(node: Node) -> Node | None:
        if node.op != "clip" or node["a_min"] != 0 or not graph.only_used_by_one(node.inputs[0], "Convolution"):
            return None
        readers = graph.consumers.get(Ref(node.name), ())
        if not any(each.op in ("Convolution", "Pooling") for each in readers):
            return None
        return node.derive("Activation", node.name, node.inputs, act_type="relu")

    return graph.rewrite(rule)


def _before_relu(graph: Graph, node: Node) -> Node | None:
    """The convolution or fully connected layer with bias whose only reader is this ReLU, or this addition with ReLU. If
    two layers are added, the first.
    """
    if not is_relu(node) and node.op != "AddRelu":
        return None
    found = (graph.only_used_by_one(ref, *_WEIGHTED) for ref in node.inputs)
    return next((each for each in found if each and not each["no_bias"]), None)


def _fused(convolution: Node, end: Node | None) -> Node:
    """The fused node, with the name of the node that it replaces."""
    if end is None:
        return convolution
    addend = _addend(convolution, end)
    kind = "ConvolutionAddRelu" if addend else "ConvolutionRelu"
    return convolution.derive(kind, end.name, (*convolution.inputs, *addend))


def _addend(weighted: Node, end: Node) -> list[Ref]:
    """The tensor that the AddRelu `end` adds to a convolution or fully connected layer; empty for a plain ReLU."""
    return [ref for ref in end.inputs if ref != Ref(weighted.name)]


def in_two(fused: Node, name: str) -> list[Node]:
    """Split a fused convolution: the plain convolution under the name `name`, and a node for bias, addition and ReLU.
    """
    data, weight, bias, *addend = fused.inputs
    product = fused.derive("Convolution", name, (data, weight), no_bias=True)
    return [product, _rest(fused, product, bias, addend, fused.op.removeprefix("Convolution") or "Add")]


def _in_two(layer: Node, end: Node | None, name: str) -> list[Node]:
    """Split a fully connected layer: the layer without bias under the name `name`, and a node for the bias and the ReLU
    `end`, if any.
    """
    data, weight, bias = layer.inputs
    product = layer.with_attrs(no_bias=True).replace(name=name, inputs=(data, weight))
    addend = _addend(layer, end) if end else []
    kind = "Add" if end is None else "AddRelu" if addend else "Relu"
    return [product, _rest(end or layer, product, bias, addend, kind)]


def _rest(replaced: Node, product: Node, bias: Ref, addend: list[Ref], kind: str) -> Node:
    dtype = {key: value for key, value in replaced.attrs.items() if key == "dtype"}
    return Node(f"Bias{kind}", replaced.name, (Ref(product.name), bias, *addend), dtype)
