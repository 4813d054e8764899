"""ONNX models from our graphs: one row per operator.

MXNet's own exporter (`mx.onnx`) needs a module that onnx removed in release 1.16, before its first wheels for Python
3.12, so it cannot be used here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from graph_passes import Graph, Node, Ref
from graph_passes.errors import GraphError
from graph_passes.operators import LOSSES, window

if TYPE_CHECKING:
    import onnx

OPSET = 17  # of early 2022: current runtimes all read it
IR_VERSION = 8  # that opset's

Arrays = Mapping[str, np.ndarray]
OnnxOperator = tuple[str, dict[str, Any]]  # operator type and attributes


def to_onnx(graph: Graph, arrays: Arrays, input_shape: tuple[int, int, int]) -> onnx.ModelProto:
    """The inference model of a graph, checked by onnx.

    Args:
        graph: in NCHW, without operators that only our executors know. A SoftmaxOutput becomes a Softmax, a
            SigmoidOutput a Sigmoid.
        arrays: parameters and running statistics by variable name, in the graph's layout, fp32.
        input_shape: (C, H, W) of an image.

    Returns:
        A model with input `data`, float32 (N, C, H, W) for any N, and output `probabilities`, float32 (N, classes).

    Raises:
        GraphError: an operator or an attribute that has no ONNX form here, with its node.
    """
    from onnx import TensorProto, checker, helper, numpy_helper

    nodes, weights = [], {}
    names: dict[Ref, str] = {}  # what an output is called in the ONNX graph
    labels = {node.inputs[1].node for node in graph if node.op in LOSSES}
    for node in graph:
        names[Ref(node.name)] = node.name
        if node.is_variable:
            if node.name in arrays:
                weights[node.name] = np.asarray(arrays[node.name], np.float32)
            elif node.name not in {"data", *labels}:
                raise GraphError(f"the parameter '{node.name}' is missing: export from a complete checkpoint")
            continue
        if node.op == "BatchNorm" and node["fix_gamma"]:
            weights[node.inputs[1].node] = np.ones_like(weights[node.inputs[1].node])
        if node.op not in OPERATORS:
            raise GraphError(f"operator {node.op} of node '{node.name}' has no ONNX form; those that have one are "
                             f"{', '.join(OPERATORS)}")
        op_type, attributes = OPERATORS[node.op](node)
        inputs = [names[ref] for ref in node.inputs]
        if node.op in LOSSES:
            del inputs[1]  # the label
        elif node.op == "FullyConnected" and node["flatten"] and graph[node.inputs[0].node].op != "Flatten":
            flat = f"{node.name}_flatten"  # Gemm does not flatten its input
            nodes.append(helper.make_node("Flatten", inputs[:1], [flat], flat, axis=1))
            inputs[0] = flat
        nodes.append(helper.make_node(op_type, inputs, [node.name], node.name, **attributes))
    (output,) = graph.outputs
    nodes[-1].output[0] = "probabilities"
    assert nodes[-1].name == output.node, "the graph's output is its last node"
    used = {name for node in nodes for name in node.input}
    onnx_graph = helper.make_graph(
        nodes,
        "resnet",
        [helper.make_tensor_value_info("data", TensorProto.FLOAT, ["N", *input_shape])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", None])],
        [numpy_helper.from_array(weight, name) for name, weight in weights.items() if name in used],
    )
    model = helper.make_model(onnx_graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    checker.check_model(model, full_check=True)
    return model


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
