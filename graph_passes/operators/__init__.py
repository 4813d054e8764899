"""The operators that passes and executors know. Each operator is described once.

Operators of networks and of training steps are described here, in the module of their family. The operator of a fused
kernel is described beside that kernel (`executors/cuda/kernels/`) and enters the table at its first use. Passes leave
operators that are not in the table untouched.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from graph_passes.errors import GraphError
from graph_passes.operators import (
    activations,
    arithmetic,
    batch_norm,
    batch_norm_halves,
    convolution,
    custom_loss,
    dropout,
    elementwise,
    embedding,
    fully_connected,
    joining,
    layer_norm,
    pooling,
    quantised,
    rnn,
    scale_channels,
    sigmoid,
    softmax,
)
from graph_passes.operators.base import Attribute, NodeView, Operator, Ref, Shape, Shapes, channel_axis
from graph_passes.operators.batch_norm import BATCH_NORMS
from graph_passes.operators.domains import derived
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
             custom_loss, batch_norm_halves, quantised, rnn, embedding, activations, arithmetic, joining, layer_norm,
             scale_channels)

_KERNELS = "graph_passes.executors.cuda.kernels"


class _Table(Mapping[str, Operator]):
    """Operators by name. Operators of kernels are imported at the first lookup of a name that is not described here:
    the files of these operators import this package, and all modules that launches need.
    """

    def __init__(self, own: Mapping[str, Operator]) -> None:
        self._known, self._is_complete = dict(own), False

    def __getitem__(self, name: str) -> Operator:
        if name in self._known:
            return self._known[name]
        return self._all()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, Operator]:
        if not self._is_complete:
            fused = importlib.import_module(_KERNELS).OPERATORS
            self._known |= {operator.name: derived(operator) for operator in fused}
            self._is_complete = True
        return self._known


_OWN = {operator.name: derived(operator) for family in _FAMILIES for operator in family.OPERATORS}
OPERATORS: Mapping[str, Operator] = _Table(_OWN)

# The last operator of a network, which is its own loss -> the operator that replaces it in a training step.
LOSSES: Mapping[str, str] = MappingProxyType({
    operator.forward: operator.name for operator in _OWN.values() if "loss" in operator.outputs})


def infer_node_shapes(node: NodeView, inputs: list[Shape | None]) -> tuple[Shapes, Shapes]:
    """Infer missing shapes of a node's inputs, and return the shapes of its outputs. Raises GraphError, naming the
    node."""
    operator = OPERATORS.get(node.op)
    if operator is None:
        raise GraphError(f"operator {node.op} of node '{node.name}' has no shape rule in graph_passes/operators")
    names = operator.input_names(node)
    if len(inputs) != len(names):
        raise GraphError(f"{node.op} '{node.name}' has {len(inputs)} inputs, it needs {len(names)}: {', '.join(names)}")
    return operator.infer(node, inputs)


def shown_name(op: str) -> str:
    """The operator name that users know for `op`: Convolution for ConvolutionWgrad."""
    while op in OPERATORS and OPERATORS[op].forward:
        op = OPERATORS[op].forward
    return op
