"""What ends a residual block in a training step, BatchNorm + add + ReLU or two BatchNorms whose sum goes through ReLU,
with the 1x1 convolution that begins the next block and the sums of its output; and BatchNorm + ReLU within a block,
with the 3x3 convolution that follows.

Inputs and outputs are those of the BatchNorm's half, then those of the convolution: `convolved`, with its `sums` about
their mean. Nothing may be dropped in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.operators.base import Array, NodeView, Operator, Shape, Shapes, sums_about_mean
from graph_passes.operators.batch_norm import ATTRIBUTES
from graph_passes.operators.batch_norm_halves import OPERATORS as HALVES
from graph_passes.operators.batch_norm_pair import OPERATORS as OF_PAIRS
from graph_passes.operators.convolution import CONVOLUTION, convolution, convolution_shapes

_KERNELS = {"BatchNormAddReluApply": "1x1", "BatchNormPairApply": "1x1", "BatchNormReluApply": "3x3"}
_NORMS = {f"{operator.name.removesuffix('Apply')}Conv{_KERNELS[operator.name]}": operator
          for operator in (*HALVES, *OF_PAIRS) if operator.name in _KERNELS}


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


# Of the passes `norm_conv1x1` and `norm_conv3x3`. As 3x3 convolutions read neighbours, their data is not written over.
OPERATORS = tuple(
    Operator(name, (*(role for role in norm.inputs if role != "factors"), "weight"), _infer, _compute,
             CONVOLUTION | ATTRIBUTES, (*norm.outputs, "convolved", "sums"), aux=norm.aux,
             in_place=norm.in_place if name.endswith("1x1") else {}, forward=norm.forward, fused=True)
    for name, norm in _NORMS.items())
