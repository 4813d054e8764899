"""A BatchNormAddRelu and the BatchNorm that it adds, a projection shortcut's, as one: the halves of both, forward and
backward. Neither BatchNorm's own output is written. What belongs to the shortcut's has names that end in `_2`. Where
images are dropped, `factors` are those of the other BatchNorm, the branch's."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.operators.base import (
    GRAD_STRIDE,
    SECOND_GRAD,
    SINGLE_GRAD,
    Array,
    NodeView,
    Operator,
    Shape,
    Shapes,
    known,
    second_grad,
    second_grad_shape,
    total,
)
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
from graph_passes.operators.dropout import FACTORS, dropped, dropping, factors_shape
from graph_passes.operators.elementwise import relu

# --- shapes ---


def _apply(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    channels = channels_of(node, data)
    one, other = ([data, sums_shape(shapes[index], channels), *[channels] * 4] for index in (1, 7))
    kept = [(2, *channels), channels, channels]
    return [*one, *other, *factors_shape(node, shapes, 12)], [data, *kept, mask_shape(data), *kept]


def _backward_reduce(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    channels = channels_of(node, data)
    inputs = [data, mask_shape(data), *[data, (2, *channels)] * 2, *factors_shape(node, shapes, 6),
              *second_grad_shape(node, data)]
    return inputs, [channels, channels, data, channels, channels]


def _backward_apply(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    channels = channels_of(node, data)
    inputs = [data, *[data, channels, (2, *channels), channels, channels] * 2]
    return [*inputs, *factors_shape(node, shapes, 11)], [data, data]


# --- NumPy ---


def _compute_apply(node: NodeView, *inputs: Array) -> list[Array]:
    y, saved, moving = apply(node, *inputs[:6])
    shortcut, saved_2, moving_2 = apply(node, *inputs[6:12])
    y = relu(dropped(node, y, *inputs[12:] or (None,)) + shortcut)
    return [y, saved, *moving, positive_bits(y), saved_2, *moving_2]


def _compute_reduce(node: NodeView, dy: Array, mask: Array, x: Array, saved: Array, x_2: Array, saved_2: Array,
                    *others: Array) -> Sequence[Array]:
    factors = None if node["no_factors"] else others[0]
    dz = masked(total(dy, second_grad(node, others, dy.shape)), mask)
    return [*gradient_sums(node, dropped(node, dz, factors), x, saved), dz, *gradient_sums(node, dz, x_2, saved_2)]


def _compute_backward_apply(node: NodeView, dz: Array, *inputs: Array) -> list[Array]:
    return [data_gradient(node, gradient, x, gamma, saved, (dgamma, dbeta))
            for gradient, (x, gamma, saved, dgamma, dbeta) in ((dropped(node, dz, *inputs[10:] or (None,)), inputs[:5]),
                                                               (dz, inputs[5:10]))]


# --- the descriptions ---


def both(*names: str) -> tuple[str, ...]:
    """The names for the BatchNorm of the sum, then for the shortcut's."""
    return (*names, *(f"{name}_2" for name in names))


_SUMS = ("gamma_grad", "beta_grad")

_ATTRIBUTES = ATTRIBUTES | dropping(["factors"])

OPERATORS = (
    Operator("BatchNormPairApply", (*both("data", "sums", "gamma", "beta", *RUNNING), "factors"), _apply,
             _compute_apply, _ATTRIBUTES,
             ("output", "saved", *RUNNING, "mask", "saved_2", *(f"{name}_2" for name in RUNNING)), FACTORS,
             aux=both(*RUNNING), forward="BatchNormAddRelu", fused=True),
    Operator("BatchNormPairBackwardReduce", ("out_grad", "mask", *both("data", "saved"), "factors", "out_grad_2"),
             _backward_reduce, _compute_reduce, _ATTRIBUTES | SINGLE_GRAD | GRAD_STRIDE,
             (*_SUMS, "masked_grad", *(f"{name}_2" for name in _SUMS)), {**SECOND_GRAD, **FACTORS},
             in_place={"masked_grad": ("out_grad",)}, forward="BatchNormAddRelu", fused=True),
    Operator("BatchNormPairBackwardApply", ("masked_grad", *both("data", "gamma", "saved", *_SUMS), "factors"),
             _backward_apply, _compute_backward_apply, _ATTRIBUTES, ("data_grad", "data_grad_2"), FACTORS,
             in_place={"data_grad": ("masked_grad",)}, forward="BatchNormAddRelu", fused=True),
)
