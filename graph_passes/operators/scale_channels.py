"""The product of images with one trained factor for each channel, which is their last dimension: layer scale (Touvron
et al., arXiv:2103.17239, section 2). The pass `layer_scale` makes this operator from a Reshape and a product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph_passes.operators.base import Array, Gradient, NodeView, Operator, Ref, Shape, Shapes, known, sum_over_others


def _forward(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    return [data, data[-1:]], [data]


def _backward(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes, 1)
    return [data, data, data[-1:]], [data, data[-1:]]


def _gradients(node: NodeView, dy: Array, x: Array, gamma: Array) -> list[Array]:
    return [dy * gamma, sum_over_others(dy * x, -1)]


def _numpy_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                    training: bool) -> list[Array | None]:
    return [*_gradients(node, dy, *inputs)]


def _gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    backward = node.replace(op="ScaleChannelsBackward", name=f"{node.name}_backward", inputs=(dy, *node.inputs),
                            num_outputs=0)
    return Gradient([backward], {"data": Ref(backward.name, 0), "gamma": Ref(backward.name, 1)})


OPERATORS = (
    Operator("ScaleChannels", ("data", "gamma"), _forward, lambda node, x, gamma: [x * gamma],
             in_place={"output": ("data",)}, gradient=_gradient, numpy_gradient=_numpy_gradient, fused=True,
             forward="broadcast_mul"),
    Operator("ScaleChannelsBackward", ("out_grad", "data", "gamma"), _backward, _gradients,
             outputs=("data_grad", "gamma_grad"), in_place={"data_grad": ("out_grad",)}, fused=True,
             forward="broadcast_mul"),
)
