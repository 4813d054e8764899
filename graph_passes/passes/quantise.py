"""INT8: tensors between layers are int8, and convolutions compute with integers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators.quantised import LARGEST, saturated
from graph_passes.passes.fold_bn import Arrays, foldings

CONVOLUTIONS = ("Convolution", "ConvolutionRelu", "ConvolutionAddRelu")
QUANTISED = ("Quantise", "Dequantise", "QuantisedConvolution", "QuantisedPooling", "QuantisedFullyConnected")
Scales = Mapping[str, float]  # node name -> the real value of the integer 1 in its output
# A bias is an int32 in units of its channel's accumulator. Half of the range is left for the sum of products.
_LARGEST_BIAS = 2.0**30


class Kept(NamedTuple):
    """The parts that stay in floats although they have an INT8 form."""

    first: bool = False  # whether the convolution that reads the images is kept
    classifier: bool = True


CLASSIFIER_KEPT = Kept()


def quantise(graph: Graph, scales: Scales, kept: Kept = CLASSIFIER_KEPT) -> Graph:
    """Make a folded inference graph compute in INT8 wherever possible.

        before    x, weight, bias, shortcut -> ConvolutionAddRelu `r`
        after     x (int8), weight (int8), multiplier, bias (int32), shortcut (int8) -> QuantisedConvolution `r` (int8)

    Likewise with ReLU alone or neither; pooling between such convolutions and after the last; and the classifier, if it
    is not kept. An operator without an INT8 form stays in floats (`in_floats` lists these), with Quantise and
    Dequantise between this operator and operators in INT8. If only operators in floats read a tensor, the tensor's
    producer writes floats.

    Run this pass after `conv_epilogue`. The new graph needs other parameter values: `quantise_params`.

    Args:
        graph: an inference graph, from the preceding passes of `pipeline.quantised_passes`.
        scales: the scales of the tensors that become int8: limit / 127, where the limit is the largest absolute value
            that is not clipped (`graph_passes/calibration.py`).
        kept: the parts that stay in floats.

    Raises:
        GraphError: BatchNorms are not folded, or a scale is missing.
    """
    for folding in foldings(graph):
        raise GraphError(f"the graph is not folded: BatchNorm '{folding.norm.name}' could be a part of Convolution "
                         f"'{folding.convolution.name}': run fold_bn before quantise")
    return _Quantiser(graph, scales, kept).run()


def quantise_params(graph: Graph, params: Arrays, scales: Scales,
                    kept: Kept = CLASSIFIER_KEPT) -> dict[str, np.ndarray]:
    """The values of the parameters of `quantise(graph, scales, kept)`, from the parameters of `graph`.

        weight_scale[k] = max |weight[k]| / 127           weight'     = weight / weight_scale, to the nearest integer
        multiplier[k]   = data_scale * weight_scale[k] / scale        fp32
        bias'[k]        = bias[k] / (data_scale * weight_scale[k]), to the nearest integer, int32

    A channel whose weights are so small that its bias would overflow int32 gets a larger scale. All values are computed
    in float64.
    """
    values = dict(params)
    result = quantise(graph, scales, kept)
    for layer in layers(result):
        weight, bias = params[layer.weight].astype(np.float64), None
        if layer.bias:
            bias = params[layer.bias].astype(np.float64)
        scale = weight_scales(weight, bias, layer.data_scale)
        values[layer.weight] = saturated(weight / _rows(scale, weight.ndim))
        values[layer.multiplier] = (layer.data_scale * scale / layer.node["scale"]).astype(np.float32)
        if bias is not None:
            values[layer.bias] = np.rint(bias / (layer.data_scale * scale)).astype(np.int32)
    kept_names = set(result.variables)
    return {name: value for name, value in values.items() if name in kept_names}


def weight_scales(weight: np.ndarray, bias: np.ndarray | None, data_scale: float) -> np.ndarray:
    """The weight scale of each output channel (the first dimension), float64, by the formula in `quantise_params`."""
    limits = np.abs(weight).reshape(len(weight), -1).max(axis=1) / LARGEST
    if bias is not None:
        limits = np.maximum(limits, np.abs(bias) / (data_scale * _LARGEST_BIAS))
    return np.where(limits > 0, limits, 1.0)  # scale of a channel that is 0 throughout


class Layer(NamedTuple):
    """A node with integer weights, and the names of its parameters."""

    node: Node
    data_scale: float
    weight: str
    multiplier: str
    bias: str  # "" without a bias


def layers(graph: Graph) -> Iterator[Layer]:
    """The layers of a quantised graph with integer weights, in order."""
    for node in graph:
        if node.op in ("QuantisedConvolution", "QuantisedFullyConnected"):
            data, weight, multiplier, *rest = node.inputs
            bias = rest[0].node if node.op == "QuantisedConvolution" else ""
            yield Layer(node, graph[data.node]["scale"], weight.node, multiplier.node, bias)


def in_floats(graph: Graph) -> list[Node]:
    """The operators of a quantised graph that stay in floats, in order."""
    return [node for node in graph if not node.is_variable and node.op not in QUANTISED]


class _Quantiser:
    """One run of the pass: the nodes of the result, and for each tensor of the graph its forms in the result."""

    def __init__(self, graph: Graph, scales: Scales, kept: Kept) -> None:
        self._graph, self._scales = graph, scales
        self._nodes: dict[str, Node] = {}
        self._floats: dict[Ref, Ref] = {}
        self._integers: dict[Ref, Ref] = {}
        self._chosen: set[str] = set()  # nodes that compute in INT8
        for node in graph:
            if self._has_form(node) and not self._is_kept(node, kept):
                self._chosen.add(node.name)

    def run(self) -> Graph:
        for node in self._graph:
            if node.is_variable:
                self._nodes[node.name] = node
                self._floats[Ref(node.name)] = Ref(node.name)
            elif node.name not in self._chosen:
                self._add(node.replace(inputs=tuple(self._as_float(ref) for ref in node.inputs)))
            elif node.op == "Pooling":
                self._pooling(node)
            elif node.op == "FullyConnected":
                self._fully_connected(node)
            else:
                self._convolution(node)
        outputs = [self._as_float(ref) for ref in self._graph.outputs]
        return Graph(self._nodes.values(), outputs, self._graph.attrs)

    def _has_form(self, node: Node) -> bool:
        if node.op == "Pooling":  # operators that compute in INT8 if their data is int8
            return node["pool_type"] in ("max", "avg", "sum") and node.inputs[0].node in self._chosen
        if node.op == "FullyConnected":
            return node["no_bias"] and self._has_own_weight(node)
        return node.op in CONVOLUTIONS and not node["no_bias"] and self._has_own_weight(node)

    def _has_own_weight(self, node: Node) -> bool:
        return all(self._graph[ref.node].is_variable and len(self._graph.consumers[ref]) == 1
                   for ref in node.inputs[1:3])

    def _is_kept(self, node: Node, kept: Kept) -> bool:
        if node.op == "FullyConnected":
            return kept.classifier
        return node.op in CONVOLUTIONS and kept.first and self._graph[node.inputs[0].node].is_variable

    # --- the nodes in INT8 ---

    def _convolution(self, node: Node) -> None:
        data, weight, bias, *addend = node.inputs
        integers = [self._as_integers(ref) for ref in (data, *addend)]
        inputs = [integers[0], *self._parameters(node, weight, bias), *integers[1:]]
        own = {"addend_scale": self._nodes[integers[1].node]["scale"]} if addend else {}
        self._add(node.derive("QuantisedConvolution", node.name, inputs, relu=node.op != "Convolution",
                              no_addend=not addend, **own, **self._output(node)))

    def _fully_connected(self, node: Node) -> None:
        data, weight = node.inputs
        inputs = [self._as_integers(data), *self._parameters(node, weight)]
        self._add(node.derive("QuantisedFullyConnected", node.name, inputs, **self._output(node)))

    def _pooling(self, node: Node) -> None:
        data = self._as_integers(node.inputs[0])
        scale = self._nodes[data.node]["scale"]
        output = {"scale": scale, "dtype": "int8"} if node["pool_type"] == "max" else self._output(node)
        self._add(node.derive("QuantisedPooling", node.name, [data], **{"data_scale": scale, **output}))

    def _parameters(self, node: Node, weight: Ref, *bias: Ref) -> list[Ref]:
        """The integer weight, the multiplier and the integer bias, as variables of the result."""
        multiplier = Node("null", self._graph.unused_name(f"{node.name}_multiplier"), (), {"dtype": "float32"})
        self._nodes[multiplier.name] = multiplier
        for ref, dtype in zip((weight, *bias), ("int8", "int32"), strict=False):
            self._nodes[ref.node] = self._graph[ref.node].with_attrs(dtype=dtype)
        return [weight, Ref(multiplier.name), *bias]

    def _output(self, node: Node) -> dict[str, object]:
        """Type and scale of a node's output: floats if no node reads the output as integers."""
        ref = Ref(node.name)
        if any(reader.name in self._chosen for reader in self._graph.consumers.get(ref, ())):
            return {"dtype": "int8", "scale": self._scale(ref)}
        return {"dtype": node.attrs.get("dtype", "float32"), "scale": 1.0}

    # --- tensors ---

    def _add(self, node: Node) -> None:
        self._nodes[node.name] = node
        is_int8 = node.op in QUANTISED and node["dtype"] == "int8"
        (self._integers if is_int8 else self._floats).update({ref: ref for ref in node.refs()})

    def _as_integers(self, ref: Ref) -> Ref:
        if ref not in self._integers:
            name = self._graph.unused_name(f"{ref.node}_int8")
            self._nodes[name] = Node("Quantise", name, (self._floats[ref],),
                                     {"scale": self._scale(ref), "dtype": "int8"})
            self._integers[ref] = Ref(name)
        return self._integers[ref]

    def _as_float(self, ref: Ref) -> Ref:
        if ref not in self._floats:
            name, integers = self._graph.unused_name(f"{ref.node}_float"), self._nodes[self._integers[ref].node]
            dtype = self._graph[ref.node].attrs.get("dtype", "float32")
            attrs = {"data_scale": integers["scale"], "dtype": dtype}
            self._nodes[name] = Node("Dequantise", name, (self._integers[ref],), attrs)
            self._floats[ref] = Ref(name)
        return self._floats[ref]

    def _scale(self, ref: Ref) -> float:
        try:
            return self._scales[ref.node]
        except KeyError:
            raise GraphError(f"there is no scale for the tensor '{ref.node}', which is to be int8: calibrate this "
                             "network") from None


def _rows(values: np.ndarray, ndim: int) -> np.ndarray:
    """(K,) reshaped to broadcast along the first dimension."""
    return values.reshape(-1, *(1,) * (ndim - 1))
