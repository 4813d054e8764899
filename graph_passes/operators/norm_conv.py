"""In a training step, a BatchNorm with the convolution that follows and the sums of its output. What ends a residual
block, BatchNorm + add + ReLU or two BatchNorms whose sum goes through ReLU, with the 1x1 convolution that begins the
next block; BatchNorm + ReLU within a block, with the 3x3 or 1x1 convolution that follows.

Inputs and outputs are those of the BatchNorm's half, then those of the convolution: `convolved`, with its `sums` about
their mean. Nothing may be dropped in between. With `no_output` nobody reads what the BatchNorm's half gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph_passes.operators.base import FALSE, Array, NodeView, Operator, Shape, Shapes, sums_about_mean
from graph_passes.operators.batch_norm import ATTRIBUTES
from graph_passes.operators.batch_norm_halves import OPERATORS as HALVES
from graph_passes.operators.batch_norm_pair import OPERATORS as OF_PAIRS
from graph_passes.operators.convolution import CONVOLUTION, convolution, convolution_shapes

_HALVES = {operator.name: operator for operator in (*HALVES, *OF_PAIRS)}
_NORMS = {f"{half.removesuffix('Apply')}Conv{kernel}": _HALVES[half] for half, kernel in (
    ("BatchNormAddReluApply", "1x1"), ("BatchNormPairApply", "1x1"), ("BatchNormReluApply", "1x1"),
    ("BatchNormReluApply", "3x3"))}


def _norm(node: NodeView) -> NodeView:
    """The BatchNorm's half, as a node of its own."""
    norm: NodeView = node.derive(_NORMS[node.op].name, node.name, node.inputs[:-1])
    return norm


def _infer(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    inputs, outputs = _NORMS[node.op].infer(_norm(node), shapes[:-1])
    weight, convolved = convolution_shapes(node, outputs[0])
    return [*inputs, weight], [*outputs, convolved, (3, node["num_filter"])]


def _compute(node: NodeView, *inputs: Array) -> Sequence[Array]:
    outputs = _NORMS[node.op].compute(_norm(node), *inputs[:-1])
    convolved = convolution(node, outputs[0], inputs[-1])
    return [*outputs, convolved, sums_about_mean(convolved, -1)]


def _in_place(norm: Operator) -> Mapping[str, tuple[str, ...]]:
    """Within a block other columns, or neighbours, are made of the same data: it is not written over."""
    return {} if norm.name == "BatchNormReluApply" else norm.in_place


# Of the passes `norm_conv1x1` and `norm_conv3x3`.
OPERATORS = tuple(
    Operator(name, (*(role for role in norm.inputs if role != "factors"), "weight"), _infer, _compute,
             CONVOLUTION | ATTRIBUTES | {"no_output": FALSE}, (*norm.outputs, "convolved", "sums"), aux=norm.aux,
             in_place=_in_place(norm), forward=norm.forward, fused=True)
    for name, norm in _NORMS.items())
