"""A BatchNormAddRelu and the BatchNorm that it adds, a projection shortcut's, as one: the halves of both, forward and
backward. Neither BatchNorm's own output is written. What belongs to the shortcut's has names that end in `_2`."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.operators.base import SECOND_GRAD, SINGLE_GRAD, Array, NodeView, Operator, Shape, Shapes, known, total
from graph_passes.operators.batch_norm import (
    ATTRIBUTES,
    RUNNING,
    channels_of,
    data_gradient,
    gradient_sums,
    mask_shape,
    masked,
    positive_bits,
)
from graph_passes.operators.batch_norm_halves import apply, sums_shape
from graph_passes.operators.elementwise import relu

# --- shapes ---


def _apply(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    channels = channels_of(node, data)
    one, other = ([data, sums_shape(shapes[index], channels), *[channels] * 4] for index in (1, 7))
    kept = [(2, *channels), channels, channels]
    return [*one, *other], [data, *kept, mask_shape(data), *kept]


def _backward_reduce(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    channels = channels_of(node, data)
    second = [] if node["single_grad"] else [data]
    inputs = [data, mask_shape(data), *[data, (2, *channels)] * 2, *second]
    return inputs, [channels, channels, data, channels, channels]


def _backward_apply(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    channels = channels_of(node, data)
    return [data, *[data, channels, (2, *channels), channels, channels] * 2], [data, data]


# --- NumPy ---


def _compute_apply(node: NodeView, *inputs: Array) -> list[Array]:
    y, saved, moving = apply(node, *inputs[:6])
    shortcut, saved_2, moving_2 = apply(node, *inputs[6:])
    y = relu(y + shortcut)
    return [y, saved, *moving, positive_bits(y), saved_2, *moving_2]


def _compute_reduce(node: NodeView, dy: Array, mask: Array, x: Array, saved: Array, x_2: Array, saved_2: Array,
                    dy2: Array | None = None) -> Sequence[Array]:
    dz = masked(total(dy, dy2), mask)
    return [*gradient_sums(node, dz, x, saved), dz, *gradient_sums(node, dz, x_2, saved_2)]


def _compute_backward_apply(node: NodeView, dz: Array, *inputs: Array) -> list[Array]:
    return [data_gradient(node, dz, x, gamma, saved, (dgamma, dbeta))
            for x, gamma, saved, dgamma, dbeta in (inputs[:5], inputs[5:])]


# --- the descriptions ---


def both(*names: str) -> tuple[str, ...]:
    """The names for the BatchNorm of the sum, then for the shortcut's."""
    return (*names, *(f"{name}_2" for name in names))


_SUMS = ("gamma_grad", "beta_grad")

OPERATORS = (
    Operator("BatchNormPairApply", both("data", "sums", "gamma", "beta", *RUNNING), _apply, _compute_apply, ATTRIBUTES,
             ("output", "saved", *RUNNING, "mask", "saved_2", *(f"{name}_2" for name in RUNNING)), aux=both(*RUNNING),
             forward="BatchNormAddRelu", fused=True),
    Operator("BatchNormPairBackwardReduce", ("out_grad", "mask", *both("data", "saved"), "out_grad_2"),
             _backward_reduce, _compute_reduce, ATTRIBUTES | SINGLE_GRAD,
             (*_SUMS, "masked_grad", *(f"{name}_2" for name in _SUMS)), SECOND_GRAD,
             in_place={"masked_grad": ("out_grad",)}, forward="BatchNormAddRelu", fused=True),
    Operator("BatchNormPairBackwardApply", ("masked_grad", *both("data", "gamma", "saved", *_SUMS)), _backward_apply,
             _compute_backward_apply, ATTRIBUTES, ("data_grad", "data_grad_2"),
             in_place={"data_grad": ("masked_grad",)}, forward="BatchNormAddRelu", fused=True),
)
