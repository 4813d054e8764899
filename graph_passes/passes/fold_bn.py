"""Inference: fold a BatchNorm into the preceding convolution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from graph_passes.graph import VARIABLE, Graph, Node, Ref
from graph_passes.operators import BATCH_NORMS, channel_axis
from graph_passes.roles import RATE_FACTOR

Arrays = Mapping[str, np.ndarray]


def fold_bn(graph: Graph) -> Graph:
    """Replace a convolution and its BatchNorm by a convolution with bias that computes the same output in inference.

        before    x, weight -> Convolution `conv` -> BatchNorm (gamma, beta, mean, var)
        after     x, weight, bias -> Convolution `conv_folded`

    If the BatchNorm is fused with ReLU (and addition), these remain. In training only frozen layers can be folded:
    `fold_frozen`. The folded graph needs other values of the weights and biases: `fold_bn_params`.
    """
    return _fold(graph, frozen_only=False)


def fold_frozen(graph: Graph) -> Graph:
    """`fold_bn` for the frozen layers of a training graph (`freeze`): these BatchNorms compute the same output in
    training and in inference. A graph without frozen layers does not change.
    """
    return _fold(graph, frozen_only=True)


def _fold(graph: Graph, frozen_only: bool) -> Graph:
    folded_convolutions = {folding.norm.name: folding.convolution for folding in foldings(graph, frozen_only)}

    def fold(node: Node) -> Sequence[Node] | None:
        conv = folded_convolutions.get(node.name)
        if conv is None:
            return None
        weight = graph[conv.inputs[1].node]
        # the folded bias is frozen if the weight is frozen
        own = {key: weight.attrs[key] for key in (RATE_FACTOR,) if key in weight.attrs}
        bias = [] if len(conv.inputs) == 3 else [Node(VARIABLE, _bias_name(graph, conv), attrs=own)]
        inputs = (*conv.inputs[:2], Ref(_bias_name(graph, conv)))
        folded = conv.replace(name=graph.unused_name(f"{conv.name}_folded"), inputs=inputs)
        result = [*bias, folded.with_attrs(no_bias=False)]
        if node.op == "BatchNormRelu":
            result.append(Node("Activation", node.name, (Ref(folded.name),), {"act_type": "relu"}))
        elif node.op == "BatchNormAddRelu":
            result.append(Node("AddRelu", node.name, (Ref(folded.name), node.inputs[5])))
        return result

    return graph.rewrite(fold)


class Folding(NamedTuple):
    """A BatchNorm that `fold_bn` folds, the convolution before it, and the name of the folded convolution's bias."""

    norm: Node
    convolution: Node
    bias: str


def foldings(graph: Graph, frozen_only: bool = False) -> Iterator[Folding]:
    """The BatchNorms that `fold_bn(graph)` folds, in the graph's order. With `frozen_only`, the BatchNorms that
    `fold_frozen(graph)` folds.
    """
    for node in graph:
        if (conv := _convolution_before(graph, node)) and (node["use_global_stats"] or not frozen_only):
            yield Folding(node, conv, _bias_name(graph, conv))


def fold_bn_params(graph: Graph, params: Arrays, aux: Arrays, frozen_only: bool = False) -> dict[str, np.ndarray]:
    """The parameters of `fold_bn(graph)`, or with `frozen_only` of `fold_frozen(graph)`, from the parameters of `graph`
    (weights OIHW or OHWI).

    weight' = weight * scale, bias' = (bias - mean) * scale + beta, scale = gamma / sqrt(var + eps), in float64.
    """
    values = dict(params)
    for node, conv, bias in foldings(graph, frozen_only):
        gamma, beta = (params[ref.node].astype(np.float64) for ref in node.inputs[1:3])
        mean, var = (aux[ref.node].astype(np.float64) for ref in node.inputs[3:5])
        scale = (1.0 if node["fix_gamma"] else gamma) / np.sqrt(var + node["eps"])
        weight = conv.inputs[1].node
        dtype = params[weight].dtype
        old_bias = params[bias] if len(conv.inputs) == 3 else 0.0
        values[weight] = (params[weight] * scale[:, None, None, None]).astype(dtype)
        values[bias] = ((old_bias - mean) * scale + beta).astype(dtype)
    kept = set(_fold(graph, frozen_only).variables)
    return {name: value for name, value in values.items() if name in kept}


def _convolution_before(graph: Graph, node: Node) -> Node | None:
    """The convolution that can absorb this node: the node is a BatchNorm over the channels of a convolution whose only
    reader it is."""
    if node.op not in BATCH_NORMS or _reads_statistics(graph, node):
        return None
    conv = graph.only_used_by_one(node.inputs[0], "Convolution")
    if conv is None or node["axis"] % 4 != channel_axis(conv["layout"]):
        return None
    shared = any(len(graph.consumers[ref]) > 1 or not graph[ref.node].is_variable for ref in conv.inputs[1:])
    return None if shared else conv


def _reads_statistics(graph: Graph, node: Node) -> bool:
    statistics = [Ref(node.name, 1), Ref(node.name, 2)]
    return any(ref in graph.outputs or ref in graph.consumers for ref in statistics)


def _bias_name(graph: Graph, conv: Node) -> str:
    return conv.inputs[2].node if len(conv.inputs) == 3 else graph.unused_name(f"{conv.name}_bias")
