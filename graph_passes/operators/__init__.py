"""The operators that passes and executors know: each is described once, in the module of its family.

Operators that are not in the table pass through every pass untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from graph_passes.errors import GraphError
from graph_passes.operators import (
    activations,
    arithmetic,
    batch_norm,
    batch_norm_halves,
    batch_norm_pair,
    batch_norm_pool,
    conv1x1_backward,
    convolution,
    dropout,
    elementwise,
    embedding,
    fully_connected,
    joining,
    layer_norm,
    norm_conv,
    pooling,
    quantised,
    rnn,
    sigmoid,
    softmax,
)
from graph_passes.operators.base import Attribute, NodeView, Operator, Ref, Shape, Shapes, channel_axis
from graph_passes.operators.batch_norm import BATCH_NORMS
from graph_passes.operators.elementwise import is_relu
from graph_passes.operators.windows import Window, output_size, window

__all__ = [
    "BATCH_NORMS",
    "LOSSES",
    "OPERATORS",
    "Attribute",
    "NodeView",
    "Operator",
    "Ref",
    "Shape",
    "Shapes",
    "Window",
    "channel_axis",
    "infer_node_shapes",
    "is_relu",
    "output_size",
    "shown_name",
    "window",
]

_FAMILIES = (convolution, batch_norm, elementwise, dropout, pooling, fully_connected, softmax, sigmoid,
             batch_norm_halves, batch_norm_pair, batch_norm_pool, norm_conv, conv1x1_backward, quantised, rnn,
             embedding, activations, arithmetic, joining, layer_norm)

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {operator.name: operator for family in _FAMILIES for operator in family.OPERATORS})

# What a network ends in, which is its own loss, and what takes its place in a training step.
LOSSES: Mapping[str, str] = MappingProxyType({
    operator.forward: operator.name for operator in OPERATORS.values() if "loss" in operator.outputs})


def infer_node_shapes(node: NodeView, inputs: list[Shape | None]) -> tuple[Shapes, Shapes]:
    """Complete the shapes of a node's inputs and give those of its outputs. Raises GraphError, naming the node."""
    operator = OPERATORS.get(node.op)
    if operator is None:
        raise GraphError(f"operator {node.op} of node '{node.name}' has no shape rule in graph_passes/operators")
    names = operator.input_names(node)
    if len(inputs) != len(names):
        raise GraphError(f"{node.op} '{node.name}' has {len(inputs)} inputs, it needs {len(names)}: {', '.join(names)}")
    return operator.infer(node, inputs)


def shown_name(op: str) -> str:
    """The operator under whose name users know `op`: Convolution for ConvolutionWgrad."""
    while op in OPERATORS and OPERATORS[op].forward:
        op = OPERATORS[op].forward
    return op
