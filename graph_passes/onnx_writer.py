"""ONNX models from our graphs: one row per operator.

MXNet's own exporter (`mx.onnx`) needs a module that onnx removed in release 1.16, before its first wheels for Python
3.12, so it cannot be used here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graph_passes import Graph, Node, Ref
from graph_passes.errors import GraphError
from graph_passes.operators import LOSSES, is_relu, window
from graph_passes.passes.quantise import Layer, layers

if TYPE_CHECKING:
    import onnx

OPSET = 17  # of early 2022: current runtimes all read it
IR_VERSION = 8  # that opset's

Arrays = Mapping[str, np.ndarray]
OnnxOperator = tuple[str, dict[str, Any]]  # operator type and attributes


@dataclass(frozen=True)
class Qdq:
    """How INT8 is written in the QDQ form: QuantizeLinear and DequantizeLinear around what is to be integers.

    graph: the same network, quantised (`passes/quantise.py`), and `params` its parameters, weights in the layout of the
    graph that is written. `unsigned`: tensors are uint8 in the same scale, with the zero point 0 after a ReLU and 128
    elsewhere, and what is added is rounded before the sum too, by its scale of `scales`: so ONNX Runtime computes on
    CPUs with integers, where it leaves ReLU and sums of int8 with the zero point 0 in floats. TensorRT takes the latter
    alone. A convolution of what may be negative, as the first one is, then reads floats: with the zero point 128 the
    integers reach 255, and without VNNI ONNX Runtime cuts off sums of two such products, at 16 bits. That cost a
    ResNet-18 5 points of top-1.
    """

    graph: Graph
    params: Arrays
    scales: Mapping[str, float]
    unsigned: bool


def to_onnx(graph: Graph, arrays: Arrays, input_shape: tuple[int, int, int], qdq: Qdq | None = None,
            output_name: str = "probabilities") -> onnx.ModelProto:
    """The inference model of a graph, checked by onnx.

    Args:
        graph: in NCHW, without operators that only our executors know. A SoftmaxOutput becomes a Softmax, a
            SigmoidOutput a Sigmoid.
        arrays: parameters and running statistics by variable name, in the graph's layout, fp32.
        input_shape: (C, H, W) of an image.
        qdq: what of it is to be INT8, by the names of its nodes; None: nothing.
        output_name: what the output is called.

    Returns:
        A model with input `data`, float32 (N, C, H, W) for any N, and one output, float32 (N, values): of a whole
        network `probabilities` (N, classes).

    Raises:
        GraphError: an operator or an attribute that has no ONNX form here, with its node.
    """
    from onnx import TensorProto, checker, helper, numpy_helper

    nodes: list[Any] = []
    weights: dict[str, np.ndarray] = {}
    names: dict[Ref, str] = {}  # what an output is called in the ONNX graph
    integers = _Integers(graph, qdq, nodes, weights) if qdq else None
    labels = {node.inputs[1].node for node in graph if node.op in LOSSES}
    for node in graph:
        names[Ref(node.name)] = node.name
        if node.is_variable:
            if node.name in arrays:
                weights[node.name] = np.asarray(arrays[node.name], np.float32)  # INT8 replaces it where it is read
            elif node.name not in {"data", *labels}:
                raise GraphError(f"the parameter '{node.name}' is missing: export from a complete checkpoint")
            elif integers and node.name == "data":
                integers.add(node)
            continue
        if node.op == "BatchNorm" and node["fix_gamma"]:
            weights[node.inputs[1].node] = np.ones_like(weights[node.inputs[1].node])
        if node.op not in OPERATORS:
            raise GraphError(f"operator {node.op} of node '{node.name}' has no ONNX form; those that have one are "
                             f"{', '.join(OPERATORS)}")
        op_type, attributes = OPERATORS[node.op](node)
        inputs = integers.inputs(node) if integers else [names[ref] for ref in node.inputs]
        if node.op in LOSSES:
            del inputs[1]  # the label
        elif node.op == "FullyConnected" and node["flatten"] and graph[node.inputs[0].node].op != "Flatten":
            flat = f"{node.name}_flatten"  # Gemm does not flatten its input
            nodes.append(helper.make_node("Flatten", inputs[:1], [flat], flat, axis=1))
            inputs[0] = flat
        nodes.append(helper.make_node(op_type, inputs, [node.name], node.name, **attributes))
        if integers:
            integers.add(node)
    (output,) = graph.outputs
    nodes[-1].output[0] = output_name
    assert nodes[-1].name == output.node, "the graph's output is its last node"
    used = {name for node in nodes for name in node.input}
    onnx_graph = helper.make_graph(
        nodes,
        "resnet",
        [helper.make_tensor_value_info("data", TensorProto.FLOAT, ["N", *input_shape])],
        [helper.make_tensor_value_info(output_name, TensorProto.FLOAT, ["N", None])],
        [numpy_helper.from_array(weight, name) for name, weight in weights.items() if name in used],
    )
    model = helper.make_model(onnx_graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    checker.check_model(model, full_check=True)
    return model


class _Integers:
    """The QuantizeLinear and DequantizeLinear of a graph that is being written."""

    def __init__(self, graph: Graph, qdq: Qdq, nodes: list[Any], weights: dict[str, np.ndarray]) -> None:
        self._graph, self._qdq, self._nodes, self._weights = graph, qdq, nodes, weights
        self._layers: dict[str, Layer] = {layer.weight: layer for layer in layers(qdq.graph)}
        self._scales: dict[str, float] = {}  # of the tensors that become integers
        for node in qdq.graph:
            if node.op == "Quantise":
                self._scales[node.inputs[0].node] = node["scale"]
            elif node.op.startswith("Quantised") and node["dtype"] == "int8":
                self._scales[node.name] = node["scale"]
        self._computed = {node.name for node in graph if self._is_computed(node)}
        if qdq.unsigned:
            for node in graph:
                if node.op == "elemwise_add" and node.name in self._computed:
                    summands = (ref.node for ref in node.inputs)
                    self._scales |= {name: self._scales.get(name, qdq.scales[name]) for name in summands}
        self._not_negative: set[str] = set()
        for node in graph:
            if is_relu(node) or (node.op in ("Pooling", "Flatten") and node.inputs[0].node in self._not_negative):
                self._not_negative.add(node.name)
            elif qdq.unsigned and any(each.op == "Convolution" for each in graph.consumers.get(Ref(node.name), ())):
                self._scales.pop(node.name, None)
        self._dequantised: dict[str, str] = {}  # tensor -> its name in floats again

    def _is_computed(self, node: Node) -> bool:
        """Is it a part of a node in INT8?"""
        if node.op in ("Convolution", "FullyConnected"):
            return node.inputs[1].node in self._layers
        if node.op == "elemwise_add":
            (reader, *others) = self._graph.consumers[Ref(node.name)]
            return not others and is_relu(reader) and self._is_computed(reader)
        return node.name in self._qdq.graph.nodes and self._qdq.graph[node.name].op.startswith("Quantised")

    def inputs(self, node: Node) -> list[str]:
        """What a node of the graph reads."""
        if node.op in ("Convolution", "FullyConnected") and node.name in self._computed:
            return [self._of(node, node.inputs[0]), *self._parameters(node)]
        return [self._of(node, ref) for ref in node.inputs]

    def _of(self, reader: Node, ref: Ref) -> str:
        is_integer = reader.name in self._computed or ref.node in self._computed
        return self._dequantised.get(ref.node, ref.node) if is_integer else ref.node

    def add(self, node: Node) -> None:
        """What follows a node: if its tensor is to be integers, to these and back."""
        if node.name not in self._scales:
            return
        if self._qdq.unsigned:
            zero_point = np.array(0 if node.name in self._not_negative else 128, np.uint8)
        else:
            zero_point = np.array(0, np.int8)
        constants = self._constants(node.name, self._scales[node.name], zero_point)
        self._emit("QuantizeLinear", [node.name, *constants], f"{node.name}_quantized")
        self._dequantised[node.name] = self._back(f"{node.name}_quantized", constants)

    def _parameters(self, node: Node) -> list[str]:
        """Of a convolution or the classifier: integer weight and bias, each with its scale, in floats again."""
        layer = self._layers[node.inputs[1].node]
        scale = self._qdq.params[layer.multiplier].astype(np.float64) * layer.node["scale"] / layer.data_scale
        parameters = {layer.weight: scale} | ({layer.bias: scale * layer.data_scale} if layer.bias else {})
        result = []
        for name, scales in parameters.items():
            integers = self._weights[name] = self._qdq.params[name]
            constants = self._constants(name, scales, np.zeros(len(scales), integers.dtype))
            result.append(self._back(name, constants, axis=0))
        return [*result, *(ref.node for ref in node.inputs[2:] if not layer.bias)]

    def _constants(self, name: str, scale: Any, zero_point: np.ndarray) -> list[str]:
        self._weights |= {f"{name}_scale": np.asarray(scale, np.float32), f"{name}_zero_point": zero_point}
        return [f"{name}_scale", f"{name}_zero_point"]

    def _back(self, name: str, constants: list[str], **attributes: Any) -> str:
        return self._emit("DequantizeLinear", [name, *constants], f"{name}_dequantized", **attributes)

    def _emit(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        from onnx import helper

        self._nodes.append(helper.make_node(op, inputs, [output], output, **attributes))
        return output


def _convolution(node: Node) -> OnnxOperator:
    _require(node, "layout", "NCHW")
    kernel, stride, pad, dilate = window(node)
    return "Conv", {
        "kernel_shape": kernel,
        "strides": stride,
        "pads": (*pad, *pad),  # top, left, bottom, right
        "dilations": dilate,
        "group": node["num_group"],
    }


def _batch_norm(node: Node) -> OnnxOperator:
    _require(node, "axis", 1)
    return "BatchNormalization", {"epsilon": node["eps"]}


def _activation(node: Node) -> OnnxOperator:
    _require(node, "act_type", "relu")
    return "Relu", {}


def _pooling(node: Node) -> OnnxOperator:
    _require(node, "layout", "NCHW")
    _require(node, "pool_type", "max", "avg")
    name = {"max": "MaxPool", "avg": "AveragePool"}[node["pool_type"]]
    if node["global_pool"]:
        return f"Global{name}", {}
    _require(node, "pooling_convention", "valid", "full")
    kernel, stride, pad, _ = window(node)
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": stride, "pads": (*pad, *pad)}
    attributes["ceil_mode"] = int(node["pooling_convention"] == "full")
    if name == "AveragePool":
        attributes["count_include_pad"] = int(node["count_include_pad"])
    return name, attributes


# MXNet's operator -> ONNX's
OPERATORS: dict[str, Callable[[Node], OnnxOperator]] = {
    "Convolution": _convolution,
    "BatchNorm": _batch_norm,
    "Activation": _activation,
    "relu": lambda node: ("Relu", {}),
    "elemwise_add": lambda node: ("Add", {}),
    "Pooling": _pooling,
    "Flatten": lambda node: ("Flatten", {"axis": 1}),
    "FullyConnected": lambda node: ("Gemm", {"transB": 1}),
    "softmax": lambda node: ("Softmax", {"axis": node["axis"]}),
    "SoftmaxOutput": lambda node: ("Softmax", {"axis": 1}),
    "SigmoidOutput": lambda node: ("Sigmoid", {}),
}


def _require(node: Node, attribute: str, *allowed: Any) -> None:
    if node[attribute] not in allowed:
        raise GraphError(
            f"{node.op} '{node.name}' has {attribute}={node[attribute]}, which has no ONNX form here: "
            f"it must be {' or '.join(map(str, allowed))}"
        )
