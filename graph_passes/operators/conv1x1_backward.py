"""The fused backward passes of convolutions, 1x1 but for one operator, with the BatchNorms after and before them.

In the direction of the backward pass:

    DgradReduce       the gradient of the convolution's data, the residual's added to it, masked, and the sums of the
                      BatchNorm that produced that data (of a pair, both BatchNorms' sums)
    Conv3x3DgradReduce
                      the same of a 3x3 convolution, through the ReLU of a BatchNorm without an addend
    NormConvBackward  from those sums through a BatchNorm and the 1x1 convolution that it read: the gradients of the
                      weights and of the data; the wide gradient between them is not stored
    NormConvReduce    the same, and on through the ReLU of the BatchNorm before the convolution to that one's sums
    NormConvDgrad     likewise, but without the gradient of the weights: the wide gradient is stored for it

Where images are dropped after a BatchNorm, its gradient is multiplied by `factors`.
"""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.operators.base import (
    DATA_SHAPE,
    FALSE,
    GRAD_STRIDE,
    SECOND_GRAD,
    SINGLE_GRAD,
    TRUE,
    WAY,
    Array,
    NodeView,
    Operator,
    Shape,
    Shapes,
    second_grad,
    second_grad_shape,
    total,
)
from graph_passes.operators.batch_norm import ATTRIBUTES, data_gradient, gradient_sums, mask_shape, masked, scaled
from graph_passes.operators.convolution import (
    CONVOLUTION,
    convolution_dgrad,
    convolution_shapes,
    convolution_wgrad,
)
from graph_passes.operators.dropout import FACTORS, dropped, dropping, factors_shape
from graph_passes.operators.elementwise import relu, relu_backward

# --- shapes ---


def _dgrad_reduce(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = node["data_shape"]
    weight, output = convolution_shapes(node, data)
    norms = 1 if node["single_norm"] else 2
    factors = factors_shape(node, shapes, 3 + 2 * norms)
    inputs = [output, weight, mask_shape(data), *[data, (2, data[-1])] * norms, *factors,
              *second_grad_shape(node, data)]
    return inputs, [data[-1:], data[-1:], data, *[data[-1:]] * 2 * (norms - 1)]


def _conv3x3_dgrad_reduce(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = node["data_shape"]
    weight, output = convolution_shapes(node, data)
    channels = data[-1:]
    return [output, weight, data, channels, (2, *channels), channels], [channels, channels, data]


def _norm_conv(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = node["data_shape"]
    weight, output = convolution_shapes(node, data)
    channels = (node["num_filter"],)
    beta = [] if node["no_relu"] else [channels]
    inputs = [output, output, channels, (2, *channels), channels, channels, weight, data, *beta]
    factors = factors_shape(node, shapes, len(shapes) - 1)
    if node.op == "NormConvBackward":
        return [*inputs, *factors], [weight, data]
    before = data[-1:]
    return [*inputs, before, (2, *before), before, *factors], [weight, data, before, before]


def _norm_conv_dgrad(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = node["data_shape"]
    weight, output = convolution_shapes(node, data)
    channels, before = (node["num_filter"],), data[-1:]
    inputs = [output, output, channels, (2, *channels), channels, channels, weight, data, before, (2, *before), before]
    return inputs, [output, data, before, before]


# --- NumPy ---


def _compute_dgrad_reduce(node: NodeView, dy: Array, weight: Array, mask: Array, *others: Array) -> Sequence[Array]:
    addend = second_grad(node, others, node["data_shape"])
    dz = masked(total(convolution_dgrad(node, dy, weight, node["data_shape"]), addend), mask)
    norms = 1 if node["single_norm"] else 2
    factors = None if node["no_factors"] else others[2 * norms]
    sums = gradient_sums(node, dropped(node, dz, factors), *others[:2])
    return [*sums, dz] if norms == 1 else [*sums, dz, *gradient_sums(node, dz, *others[2:4])]


def _compute_conv3x3_dgrad_reduce(node: NodeView, dy: Array, weight: Array, x: Array, gamma: Array, saved: Array,
                                  beta: Array) -> Sequence[Array]:
    dz = relu_backward(convolution_dgrad(node, dy, weight, node["data_shape"]), scaled(node, x, gamma, beta, saved))
    return [*gradient_sums(node, dz, x, saved), dz]


def _compute_norm_conv(node: NodeView, dz: Array, x: Array, gamma: Array, saved: Array, dgamma: Array, dbeta: Array,
                       weight: Array, data: Array, *others: Array) -> list[Array]:
    more = list(others)
    dz = dropped(node, dz, None if node["no_factors"] else more.pop())
    if not node["no_relu"]:
        dz = relu_backward(dz, scaled(node, x, gamma, more.pop(0), saved))
    dy = data_gradient(node, dz, x, gamma, saved, (dgamma, dbeta))
    dx = convolution_dgrad(node, dy, weight, node["data_shape"])
    if node.op == "NormConvBackward":
        return [convolution_wgrad(node, dy, data), dx]
    gamma_2, saved_2, beta_2 = more
    y = scaled(node, data, gamma_2, beta_2, saved_2)
    dz_2 = relu_backward(dx, y)
    return [convolution_wgrad(node, dy, relu(y)), dz_2, *gradient_sums(node, dz_2, data, saved_2)]


def _compute_norm_conv_dgrad(node: NodeView, dz: Array, x: Array, gamma: Array, saved: Array, dgamma: Array,
                             dbeta: Array, weight: Array, data: Array, *before: Array) -> list[Array]:
    gamma_2, saved_2, beta_2 = before
    dy = data_gradient(node, dz, x, gamma, saved, (dgamma, dbeta))
    dz_2 = relu_backward(convolution_dgrad(node, dy, weight, node["data_shape"]),
                         scaled(node, data, gamma_2, beta_2, saved_2))
    return [dy, dz_2, *gradient_sums(node, dz_2, data, saved_2)]


# --- the descriptions ---

_SUMS = ("gamma_grad", "beta_grad")
_NORM_CONV = ("masked_grad", "data", "gamma", "saved", *_SUMS, "weight", "data_2", "beta")
_BEFORE = ("gamma_2", "saved_2", "beta_2")
_ATTRIBUTES = CONVOLUTION | ATTRIBUTES | DATA_SHAPE | dropping(["factors"])

OPERATORS = (
    Operator("DgradReduce",
             ("conv_grad", "weight", "mask", "data", "saved", "data_2", "saved_2", "factors", "out_grad_2"),
             _dgrad_reduce, _compute_dgrad_reduce,
             _ATTRIBUTES | SINGLE_GRAD | GRAD_STRIDE | WAY | {"single_norm": TRUE},
             (*_SUMS, "masked_grad", *(f"{name}_2" for name in _SUMS)),
             {**SECOND_GRAD, **FACTORS,
              **dict.fromkeys(("data_2", "saved_2", "gamma_grad_2", "beta_grad_2"), "single_norm")},
             in_place={"masked_grad": ("out_grad_2",)}, forward="Convolution", fused=True),
    Operator("Conv3x3DgradReduce", ("conv_grad", "weight", "data", "gamma", "saved", "beta"), _conv3x3_dgrad_reduce,
             _compute_conv3x3_dgrad_reduce, CONVOLUTION | ATTRIBUTES | DATA_SHAPE, (*_SUMS, "masked_grad"),
             forward="Convolution", fused=True),
    # `beta` where ReLU has still to be applied to the gradient. `data_2` is the data of the convolution ...
    Operator("NormConvBackward", (*_NORM_CONV, "factors"), _norm_conv, _compute_norm_conv,
             _ATTRIBUTES | {"no_relu": FALSE}, ("weight_grad", "data_grad"), {"beta": "no_relu", **FACTORS},
             forward="BatchNorm", fused=True),
    # ... and here that of the BatchNorm + ReLU before it, from which it is made again.
    Operator("NormConvReduce", (*_NORM_CONV, *_BEFORE, "factors"), _norm_conv, _compute_norm_conv,
             _ATTRIBUTES | {"no_relu": FALSE}, ("weight_grad", "masked_grad", *_SUMS), {"beta": "no_relu", **FACTORS},
             forward="BatchNorm", fused=True),
    Operator("NormConvDgrad", (*_NORM_CONV[:-1], *_BEFORE), _norm_conv_dgrad, _compute_norm_conv_dgrad,
             CONVOLUTION | ATTRIBUTES | DATA_SHAPE, ("conv_grad", "masked_grad", *_SUMS),
             in_place={"conv_grad": ("data",)}, forward="BatchNorm", fused=True),
)
