"""ONNX models from our graphs: one row per operator.

MXNet's own exporter (`mx.onnx`) needs a module that onnx removed in release 1.16, before its first wheels for Python
3.12, so it cannot be used here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graph_passes import Graph, Node, Ref
from graph_passes.errors import GraphError
from graph_passes.operators import LOSSES, is_relu, window
from graph_passes.operators.activations import function_of
from graph_passes.passes.quantise import Layer, layers

if TYPE_CHECKING:
    import onnx

OPSET = 17  # opset of early 2022, which all current runtimes read
IR_VERSION = 8  # IR version of this opset

CONSTANT = "_constant"  # separates the name of a node from the number of one of its constants

Arrays = Mapping[str, np.ndarray]


def is_constant(name: str) -> bool:
    """Whether a tensor of a model that `to_onnx` has made is a constant of an operator, not a parameter."""
    return name.rpartition(CONSTANT)[2].isdecimal() and CONSTANT in name


class OnnxOperator(NamedTuple):
    """An ONNX operator. Its inputs are the node's inputs, or the inputs with the numbers `inputs`. If an ONNX operator
    precedes, its result comes before these inputs. The constants come last.
    """

    op_type: str
    attributes: Mapping[str, Any] = {}
    constants: Sequence[Any] = ()
    inputs: Sequence[int] | None = None



@dataclass(frozen=True)
class Qdq:
    """How INT8 is written in the QDQ form: QuantizeLinear and DequantizeLinear around the tensors that become integers.

    `graph`: the same network, quantised (`passes/quantise.py`). `params`: its parameters, with weights in the layout of
    the written graph. `unsigned` is for ONNX Runtime on CPUs, which computes ReLU and sums in floats if they are int8
    with zero point 0. With `unsigned`, tensors are uint8 with the same scale and zero point 0 after a ReLU and 128
    elsewhere, and addends are also rounded before a sum, by their entry of `scales`. TensorRT supports int8 with zero
    point 0 only. With `unsigned`, a convolution of possibly negative data, such as the first one, reads floats: with
    zero point 128 the integers reach 255, and without VNNI ONNX Runtime saturates sums of two products at 16 bits. This
    saturation cost a ResNet-18 5 points of top-1.
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
            SigmoidOutput a Sigmoid, a CustomOutput one of the two.
        arrays: parameters and running statistics by variable name, in the graph's layout, fp32.
        input_shape: (C, H, W) of an image.
        qdq: the part of the graph that becomes INT8, by node names; None: no part.
        output_name: name of the output.

    Returns:
        A model with input `data`, float32 (N, C, H, W) for any N, and one output, float32 (N, values). A whole network
        has the output `probabilities` (N, classes).

    Raises:
        GraphError: an operator or an attribute that has no ONNX form here, with its node.
    """
    from onnx import TensorProto, checker, helper, numpy_helper

    nodes: list[Any] = []
    weights: dict[str, np.ndarray] = {}
    names: dict[Ref, str] = {}  # name of an output in the ONNX graph
    integers = _Integers(graph, qdq, nodes, weights) if qdq else None
    labels = {node.inputs[1].node for node in graph if node.op in LOSSES}
    for node in graph:
        names[Ref(node.name)] = node.name
        if node.is_variable:
            if node.name in arrays:
                # readers in INT8 use the integer form instead
                weights[node.name] = np.asarray(arrays[node.name], np.float32)
            elif node.name not in {"data", *labels}:
                raise GraphError(f"the parameter '{node.name}' is missing: export from a complete checkpoint")
            elif integers and node.name == "data":
                integers.add(node)
            continue
        if node.op == "BatchNorm" and node["fix_gamma"]:
            weights[node.inputs[1].node] = np.ones_like(weights[node.inputs[1].node])
        if node.op == "LeakyReLU" and node["act_type"] == "prelu":  # the slopes of PReLU are along the channels
            slopes = node.inputs[1].node
            weights[slopes] = weights[slopes].reshape(-1, 1, 1)
        if node.op not in OPERATORS:
            raise GraphError(f"operator {node.op} of node '{node.name}' has no ONNX form; those that have one are "
                             f"{', '.join(OPERATORS)}")
        operators = OPERATORS[node.op](node)
        inputs = integers.inputs(node) if integers else [names[ref] for ref in node.inputs]
        if node.op in LOSSES:
            del inputs[1]  # removes the label
        elif node.op == "FullyConnected" and node["flatten"] and graph[node.inputs[0].node].op != "Flatten":
            flat = f"{node.name}_flatten"  # Gemm does not flatten its input
            nodes.append(helper.make_node("Flatten", inputs[:1], [flat], flat, axis=1))
            inputs[0] = flat
        before: list[str] = []
        for number, operator in enumerate(operators, start=1):
            name = node.name if number == len(operators) else f"{node.name}_{number}"
            constants = {f"{name}{CONSTANT}{index}": np.asarray(value)
                         for index, value in enumerate(operator.constants)}
            weights |= constants
            chosen = operator.inputs if operator.inputs is not None else range(len(inputs) if number == 1 else 0)
            read = [*before, *(inputs[index] for index in chosen), *constants]
            nodes.append(helper.make_node(operator.op_type, read, [name], name, **operator.attributes))
            before = [name]
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
    """The QuantizeLinear and DequantizeLinear nodes of a graph that is being written."""

    def __init__(self, graph: Graph, qdq: Qdq, nodes: list[Any], weights: dict[str, np.ndarray]) -> None:
        self._graph, self._qdq, self._nodes, self._weights = graph, qdq, nodes, weights
        self._layers: dict[str, Layer] = {layer.weight: layer for layer in layers(qdq.graph)}
        self._scales: dict[str, float] = {}  # scales of the tensors that become integers
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
            is_clipped = node.op == "clip" and node["a_min"] >= 0
            if is_relu(node) or is_clipped or (node.op in ("Pooling", "Flatten")
                                               and node.inputs[0].node in self._not_negative):
                self._not_negative.add(node.name)
            elif qdq.unsigned and any(each.op == "Convolution" for each in graph.consumers.get(Ref(node.name), ())):
                self._scales.pop(node.name, None)
        self._dequantised: dict[str, str] = {}  # tensor -> name of the tensor's dequantised form

    def _is_computed(self, node: Node) -> bool:
        """Whether the node's output stays inside a fused node in INT8."""
        if node.op in ("Convolution", "FullyConnected"):
            return node.inputs[1].node in self._layers
        if node.op == "elemwise_add":
            (reader, *others) = self._graph.consumers[Ref(node.name)]
            return not others and is_relu(reader) and self._is_computed(reader)
        return node.name in self._qdq.graph.nodes and self._qdq.graph[node.name].op.startswith("Quantised")

    def inputs(self, node: Node) -> list[str]:
        """The ONNX names of a node's inputs."""
        if node.op in ("Convolution", "FullyConnected") and node.name in self._computed:
            return [self._of(node, node.inputs[0]), *self._parameters(node)]
        return [self._of(node, ref) for ref in node.inputs]

    def _of(self, reader: Node, ref: Ref) -> str:
        is_integer = reader.name in self._computed or ref.node in self._computed
        return self._dequantised.get(ref.node, ref.node) if is_integer else ref.node

    def add(self, node: Node) -> None:
        """Add the nodes after a node: QuantizeLinear and DequantizeLinear, if the node's tensor becomes integers."""
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
        """Integer weight and bias of a convolution or the classifier, each with its scale, dequantised."""
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


OnnxOperators = Sequence[OnnxOperator]  # ONNX operators of one node, each reading the result of the previous operator
_IMAGES_LAST, _IMAGES_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)  # channels last, and first again


def _one(op_type: str, *constants: Any, **attributes: Any) -> Callable[[Node], OnnxOperators]:
    """A rule that gives every node the same ONNX operator."""
    return lambda node: [OnnxOperator(op_type, attributes, constants)]


def _convolution(node: Node) -> OnnxOperators:
    _require(node, "layout", "NCHW")
    kernel, stride, pad, dilate = window(node)
    return [OnnxOperator("Conv", {
        "kernel_shape": kernel,
        "strides": stride,
        "pads": (*pad, *pad),  # top, left, bottom, right
        "dilations": dilate,
        "group": node["num_group"],
    })]


def _batch_norm(node: Node) -> OnnxOperators:
    _require(node, "axis", 1)
    return [OnnxOperator("BatchNormalization", {"epsilon": node["eps"]})]


def _layer_norm(node: Node) -> OnnxOperators:
    """ONNX normalises the last dimensions, so images are transposed to channels-last and back."""
    _require(node, "axis", 1, 3, -1)
    attributes = {"axis": -1, "epsilon": node["eps"]}
    if node["axis"] in (3, -1):  # along the channels of images in NCHW, or along the last dimension of any tensor
        return [OnnxOperator("LayerNormalization", attributes)]
    return [OnnxOperator("Transpose", {"perm": _IMAGES_LAST}, inputs=(0,)),
            OnnxOperator("LayerNormalization", attributes, inputs=(1, 2)),
            OnnxOperator("Transpose", {"perm": _IMAGES_FIRST})]


def _function(node: Node) -> OnnxOperators:
    """The ONNX operator of an elementwise function, by its name in operators/activations.py."""
    function = function_of(node)
    if function is None:
        return [OnnxOperator("PRelu")]
    name, a, b = function
    operators: dict[str, OnnxOperators] = {
        "leaky": [OnnxOperator("LeakyRelu", {"alpha": a})],
        "elu": [OnnxOperator("Elu", {"alpha": a})],
        "clip": [OnnxOperator("Clip", {}, [np.float32(a), np.float32(b)])],
        "hard_sigmoid": [OnnxOperator("HardSigmoid", {"alpha": a, "beta": b})],
        "gelu": [OnnxOperator("Div", {}, [np.float32(np.sqrt(2))]), OnnxOperator("Erf"),
                 OnnxOperator("Add", {}, [np.float32(1)]), OnnxOperator("Mul", {}, inputs=(0,)),
                 OnnxOperator("Mul", {}, [np.float32(0.5)])],
    }
    plain = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "softrelu": "Softplus", "softsign": "Softsign",
             "selu": "Selu"}
    return operators[name] if name in operators else [OnnxOperator(plain[name])]


def _pooling(node: Node) -> OnnxOperators:
    _require(node, "layout", "NCHW")
    _require(node, "pool_type", "max", "avg")
    name = {"max": "MaxPool", "avg": "AveragePool"}[node["pool_type"]]
    if node["global_pool"]:
        return [OnnxOperator(f"Global{name}")]
    _require(node, "pooling_convention", "valid", "full")
    kernel, stride, pad, _ = window(node)
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": stride, "pads": (*pad, *pad)}
    attributes["ceil_mode"] = int(node["pooling_convention"] == "full")
    if name == "AveragePool":
        attributes["count_include_pad"] = int(node["count_include_pad"])
    return [OnnxOperator(name, attributes)]


def _slice(node: Node) -> OnnxOperators:
    end = np.iinfo(np.int64).max if node["end"] is None else node["end"]
    return [OnnxOperator("Slice", {}, [np.array([value], np.int64) for value in (node["begin"], end, node["axis"])])]


def _reverse(node: Node) -> OnnxOperators:
    """A slice from the last element to the first, with the step -1."""
    axes = np.array(node["axis"], np.int64)
    constants = [np.full_like(axes, -1), np.full_like(axes, np.iinfo(np.int64).min), axes, np.full_like(axes, -1)]
    return [OnnxOperator("Slice", {}, constants)]


def _with_number(op_type: str) -> Callable[[Node], OnnxOperators]:
    return lambda node: [OnnxOperator(op_type, {}, [np.float32(node["scalar"])])]


# MXNet's operator -> ONNX's
OPERATORS: dict[str, Callable[[Node], OnnxOperators]] = {
    "Convolution": _convolution,
    "BatchNorm": _batch_norm,
    "LayerNorm": _layer_norm,
    **dict.fromkeys(("relu", "Activation", "LeakyReLU", "clip", "hard_sigmoid", "sigmoid", "tanh", "softsign"),
                    _function),
    **dict.fromkeys(("elemwise_add", "broadcast_add"), _one("Add")),
    **dict.fromkeys(("elemwise_mul", "broadcast_mul"), _one("Mul")),
    "_plus_scalar": _with_number("Add"),
    "_minus_scalar": _with_number("Sub"),
    "_mul_scalar": _with_number("Mul"),
    "_div_scalar": _with_number("Div"),
    "mean": lambda node: [OnnxOperator("ReduceMean", {"keepdims": int(node["keepdims"])}
                                       | ({"axes": node["axis"]} if node["axis"] else {}))],
    "Concat": lambda node: [OnnxOperator("Concat", {"axis": node["dim"]})],
    "slice_axis": _slice,
    "reverse": _reverse,
    "Reshape": lambda node: [OnnxOperator("Reshape", {}, [np.array(node["shape"], np.int64)])],
    "transpose": lambda node: [OnnxOperator("Transpose", {"perm": node["axes"]} if node["axes"] else {})],
    "Pooling": _pooling,
    "Flatten": _one("Flatten", axis=1),
    "FullyConnected": _one("Gemm", transB=1),
    "softmax": lambda node: [OnnxOperator("Softmax", {"axis": node["axis"]})],
    "SoftmaxOutput": _one("Softmax", axis=1),
    "SigmoidOutput": _one("Sigmoid"),
    "CustomOutput": lambda node: [OnnxOperator("Softmax", {"axis": 1}) if node["probabilities"] == "softmax"
                                  else OnnxOperator("Sigmoid")],
}


def _require(node: Node, attribute: str, *allowed: Any) -> None:
    if node[attribute] not in allowed:
        raise GraphError(
            f"{node.op} '{node.name}' has {attribute}={node[attribute]}, which has no ONNX form here: "
            f"it must be {' or '.join(map(str, allowed))}"
        )
