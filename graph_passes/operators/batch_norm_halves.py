"""The two halves of a BatchNorm in a training step, forward and backward: sums over the batch, and an elementwise
operation with these sums. The pass `split_norm` replaces a BatchNorm by its halves; a fusion with other operators
includes one half.

`sums` (fp32) are sums of the data over the batch, in one of two forms. (2, C): sum and sum of squares, as cuDNN
computes them beside a convolution; a variance computed from them loses digits if the mean is far above the deviation.
(3, C): sum of x - mean (which is 0), sum of (x - mean)^2, and the mean, as our own kernels compute them. The sums of
the backward pass are the gradients of gamma and beta. `masked_grad` is the gradient of ReLU's input: the sum of the
output's gradients where ReLU let it through. It is kept if an addend needs it, or if recomputing it would cost more
than one read. With stochastic depth, both halves of the backward pass multiply `masked_grad` by `factors` when they
read it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from graph_passes.operators.base import (
    GRAD_STRIDE,
    SECOND_GRAD,
    SINGLE_GRAD,
    TRUE,
    Array,
    NodeView,
    Operator,
    Shape,
    Shapes,
    known,
    sums_about_mean,
)
from graph_passes.operators.batch_norm import (
    ATTRIBUTES,
    RUNNING,
    Statistics,
    channels_of,
)
from graph_passes.operators.body import Body
from graph_passes.operators.dropout import FACTORS, dropping

# --- shapes ---


def _statistics(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    return [data], [(3, *channels_of(node, data))]


def sums_shape(shape: Shape | None, channels: Shape) -> Shape:
    """The shape of a BatchNorm's sums: the given shape, if it belongs to one of the two forms."""
    return shape if shape == (3, *channels) else (2, *channels)


def _group_statistics(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    channels = channels_of(node, known(node, shapes))
    return [known(node, shapes), sums_shape(shapes[1], channels)], [(3, *channels)]


def _same(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    inputs = [known(node, shapes, index) for index in range(len(shapes))]
    return inputs, inputs


# --- NumPy ---


def statistics_of(sums: Array, x: Array) -> Statistics:
    """Mean and variance of x, from its sums."""
    first, mean_square = sums[:2].astype(np.float64) / (x.size // sums.shape[1])
    mean = sums[2] if len(sums) == 3 else first
    return Statistics(mean.astype(x.dtype), (mean_square - first**2).astype(x.dtype))


def _compute_group_statistics(node: NodeView, x: Array, sums: Array) -> list[Array]:
    mean, var = statistics_of(sums, x)
    return [np.stack([np.zeros_like(mean), var * (x.size // len(mean)), mean])]


# --- bodies ---


def apply_body(b: Body, relu: bool) -> list[Any]:
    """The outputs of a BatchNorm's half, with the node's addend."""
    statistics = b.statistics()
    z = b.dropped(b.normalised(statistics[0]))
    z = b.add(z, b["addend"]) if b.has("addend") else z
    return [b.relu(z) if relu else z, *statistics, *([b.mask(z)] if b.has("addend") else [])]


def _reduce_body(b: Body) -> list[Any]:
    gradient, keeps = b.total(b["out_grad"]), b.has("mask") or b.has("out_grad_2")
    if b.has("mask"):
        gradient = b.gate(gradient, b["mask"])
    elif b.has("beta"):
        gradient = b.through_relu(gradient)
    return [*b.reduced(b.dropped(gradient)), *([gradient] if keeps else [])]


def backward_apply_body(b: Body) -> list[Any]:
    """The gradient of a BatchNorm's data, through its ReLU if the node includes it, plus the node's addend."""
    dx = b.norm_grad(b.through_relu(b["out_grad"]) if b.has("beta") else b.dropped(b["masked_grad"]))
    return [b.add(dx, b["addend"]) if b.has("addend") else dx]


# --- the descriptions ---

_APPLY = ("data", "sums", "gamma", "beta", *RUNNING)
_KEPT = ("output", "saved", *RUNNING)
_SUMS = ("gamma_grad", "beta_grad")
_ARRAYS = ("sums", "sums_2", "sums_3", "sums_4")


def _forward(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Operator:
    return Operator(name, inputs, attrs=ATTRIBUTES | dropping(inputs), outputs=outputs, optional=FACTORS, aux=RUNNING,
                    in_place={"output": ("data",)}, body=partial(apply_body, relu="Relu" in name),
                    fused="Relu" in name, forward=name.removesuffix("Apply"))


def _reduce(name: str, last: tuple[str, ...]) -> Operator:
    optional = FACTORS if "mask" in last else {"masked_grad": "single_grad"}
    return Operator(name, ("out_grad", "data", "gamma", "saved", *last, "out_grad_2"),
                    attrs=ATTRIBUTES | SINGLE_GRAD | GRAD_STRIDE | dropping(last), outputs=(*_SUMS, "masked_grad"),
                    optional={**SECOND_GRAD, **optional}, in_place={"masked_grad": ("out_grad",)}, body=_reduce_body,
                    fused="Relu" in name, forward=name.removesuffix("BackwardReduce"))


OPERATORS = (
    Operator("BatchNormStatistics", ("data",), _statistics, lambda node, x: [sums_about_mean(x, node["axis"])],
             ATTRIBUTES, ("sums",), body=lambda b: [b.sums(b["data"])], forward="BatchNorm"),
    _forward("BatchNormApply", _APPLY, _KEPT),
    _forward("BatchNormReluApply", _APPLY, _KEPT),
    _forward("BatchNormAddReluApply", (*_APPLY, "addend", "factors"), (*_KEPT, "mask")),
    _reduce("BatchNormBackwardReduce", ()),
    _reduce("BatchNormReluBackwardReduce", ("beta",)),
    _reduce("BatchNormAddReluBackwardReduce", ("mask", "factors")),
    # The gradient of the data, from `masked_grad`, for all three operators; for a BatchNorm alone also from the
    # gradient of its output.
    Operator("BatchNormBackwardApply", ("masked_grad", "data", "gamma", "saved", *_SUMS, "factors"),
             attrs=ATTRIBUTES | dropping(["factors"]), outputs=("data_grad",), optional=FACTORS,
             in_place={"data_grad": ("masked_grad",)}, body=backward_apply_body, forward="BatchNorm"),
    Operator("BatchNormReluBackwardApply", ("out_grad", "data", "gamma", "saved", "beta", *_SUMS), attrs=ATTRIBUTES,
             outputs=("data_grad",), in_place={"data_grad": ("out_grad",)}, body=backward_apply_body,
             forward="BatchNormRelu"),
    # Sums over one GPU's batch -> sums over all GPUs that share BatchNorm's statistics, scaled to one GPU's number of
    # rows; and sums of the backward pass -> their means over these GPUs. In NumPy the group has one member.
    Operator("GroupStatistics", ("data", "sums"), _group_statistics, _compute_group_statistics, ATTRIBUTES,
             ("sums",), forward="BatchNorm"),
    Operator("GroupMean", _ARRAYS, _same, lambda node, *sums: list(sums), {"at_most_2": TRUE}, _ARRAYS,
             {"sums_3": "at_most_2", "sums_4": "at_most_2"},
             in_place={name: (name,) for name in _ARRAYS}, forward="BatchNorm"),
)
