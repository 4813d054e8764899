"""The BatchNorm + ReLU and the 3x3 max pooling with stride 2 of ResNet's stem as one: the halves of both, forward and
backward, and the gradient of the stem's weights with the last half in it. The network's largest activation and its
gradient are not written.

`winner` is the place of the maximum in its window (row * 3 + column), or NOBODY where no value is above 0: ReLU then
lets no gradient through. `data_at_winner` is the data there, so that the sums of the backward pass need not look for
it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graph_passes.operators.base import (
    SECOND_GRAD,
    SINGLE_GRAD,
    Array,
    Attribute,
    NodeView,
    Operator,
    Shape,
    Shapes,
    known,
    total,
)
from graph_passes.operators.batch_norm import (
    ATTRIBUTES,
    RUNNING,
    Statistics,
    channels_of,
    data_gradient,
    gradient_sums,
    running_statistics,
    scaled,
    to_saved,
)
from graph_passes.operators.batch_norm_halves import statistics_of, sums_shape
from graph_passes.operators.convolution import CONVOLUTION, convolution_shapes, convolution_wgrad
from graph_passes.operators.pooling import POOLING, max_pooling, max_pooling_backward, pooled_shape
from graph_passes.operators.windows import Places

NOBODY = 255  # of batch_norm_pool.cuh
WINDOW = {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1)}  # of the pooling

# --- shapes ---


def _apply(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    channels, pooled = channels_of(node, data), pooled_shape(node, data)
    kept = [(2, *channels), channels, channels]
    return [data, sums_shape(shapes[1], channels), *[channels] * 4], [pooled, *kept, pooled, pooled]


def _backward_reduce(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    pooled = known(node, shapes)
    channels = channels_of(node, pooled)
    second = [] if node["single_grad"] else [pooled]
    return [pooled, pooled, pooled, (2, *channels), *second], [channels, channels, *second]


def _backward_apply(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes, 2)
    channels, pooled = channels_of(node, data), pooled_shape(node, data)
    return [pooled, pooled, data, channels, (2, *channels), channels, channels], [data]


def _stem_wgrad(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    image = known(node, shapes, 7)
    weight, data = convolution_shapes(node, image)
    inputs, _ = _backward_apply(_pooling_of(node), [None, None, data, *[None] * 4])
    return [*inputs, image], [weight]


def _pooling_of(node: NodeView) -> NodeView:
    """The node of the gradient that a StemWgrad makes on its way, without its inputs."""
    attrs = {**WINDOW, "layout": node["layout"], **{name: node[name] for name in ATTRIBUTES}}
    pooling: NodeView = node.replace(op="BatchNormPoolBackwardApply", attrs=attrs)
    return pooling


# --- NumPy ---


def _compute_apply(node: NodeView, x: Array, sums: Array, gamma: Array, beta: Array, mean: Array,
                   var: Array) -> list[Array]:
    batch = statistics_of(sums, x)
    saved = to_saved(node, batch)
    largest, winner = max_pooling(node, scaled(node, x, gamma, beta, saved))
    windows = np.stack([Places(node, x.shape).padded(x)[region] for _, region in Places(node, x.shape)])
    at_winner = np.take_along_axis(windows, winner[None], axis=0)[0]
    winner = np.where(largest > 0, winner, NOBODY).astype(np.uint8)
    moving = running_statistics(node, Statistics(mean, var), batch)
    return [np.maximum(largest, 0), saved, *moving, winner, at_winner]


def _compute_reduce(node: NodeView, dy: Array, winner: Array, at_winner: Array, saved: Array,
                    dy2: Array | None = None) -> Sequence[Array]:
    dz = np.where(winner == NOBODY, 0, total(dy, dy2))
    sums = gradient_sums(node, dz, at_winner, saved)
    return sums if node["single_grad"] else [*sums, dz]


def _compute_backward_apply(node: NodeView, dz: Array, winner: Array, x: Array, gamma: Array, saved: Array,
                            dgamma: Array, dbeta: Array) -> list[Array]:
    return [data_gradient(node, max_pooling_backward(node, dz, winner, x.shape), x, gamma, saved, (dgamma, dbeta))]


def _compute_stem_wgrad(node: NodeView, *inputs: Array) -> list[Array]:
    *of_norm, image = inputs
    (dy,) = _compute_backward_apply(_pooling_of(node), *of_norm)
    return [convolution_wgrad(node, dy, image)]


# --- the descriptions ---

_SUMS = ("gamma_grad", "beta_grad")
_BACKWARD = ("out_grad", "winner", "data", "gamma", "saved", *_SUMS)

OPERATORS = (
    Operator("BatchNormPoolApply", ("data", "sums", "gamma", "beta", *RUNNING), _apply, _compute_apply,
             POOLING | ATTRIBUTES, ("output", "saved", *RUNNING, "winner", "data_at_winner"), aux=RUNNING,
             forward="BatchNormRelu", fused=True),
    Operator("BatchNormPoolBackwardReduce", ("out_grad", "winner", "data_at_winner", "saved", "out_grad_2"),
             _backward_reduce, _compute_reduce, POOLING | ATTRIBUTES | SINGLE_GRAD, (*_SUMS, "masked_grad"),
             {**SECOND_GRAD, "masked_grad": "single_grad"}, in_place={"masked_grad": ("out_grad",)},
             forward="BatchNormRelu", fused=True),
    # `out_grad` is `masked_grad` where there is one: the winners say where ReLU let it through.
    Operator("BatchNormPoolBackwardApply", _BACKWARD, _backward_apply, _compute_backward_apply,
             POOLING | ATTRIBUTES, ("data_grad",), forward="BatchNormRelu", fused=True),
    # BatchNormPoolBackwardApply, and the gradient of the weights of the convolution before it.
    # `way`: by which kernel a device computes it (passes/stem.py).
    Operator("StemWgrad", (*_BACKWARD, "image"), _stem_wgrad, _compute_stem_wgrad,
             CONVOLUTION | ATTRIBUTES | {"way": Attribute(str, "stem_wgrad")}, ("weight_grad",), forward="Convolution",
             fused=True),
)
