"""BatchNorm (Ioffe and Szegedy, arXiv:1502.03167), alone, with ReLU, or with addition and ReLU; and the gradients.

The fused operators are defined here, with the names that NVIDIA's MXNet uses. Like MXNet's BatchNorm, all have three
outputs: the result, and the mean and (biased) variance with which the data was normalised. In an inference graph these
are the running statistics. The variants of a training step use the batch's statistics and keep what the gradient needs
besides the data:

- `saved` (2, C), fp32: mean and 1 / sqrt(var + eps). Its size is negligible.
- BatchNorm reads its own data again (2 bytes per element in 16 bits). The ReLU after it keeps nothing: the sign of its
  input is recomputed from data, gamma, beta and `saved`, which are read anyway.
- `mask` of BatchNorm + add + ReLU: one bit (1/8 byte), eight channels per byte, the lowest bit first. To recompute it,
  the addend would have to be kept and read (2 bytes); reading the output instead costs 2 bytes as well.

With stochastic depth (`operators/dropout.py`), BatchNorm + add + ReLU multiplies by `factors` before it adds. The
gradient of BatchNorm is then multiplied by `factors`, too, but the addend's gradient is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.operators.base import (
    FALSE,
    SECOND_GRAD,
    SINGLE_GRAD,
    TRUE,
    Array,
    Attribute,
    Gradient,
    NodeView,
    Operator,
    Ref,
    Shape,
    Shapes,
    along_axis,
    known,
    sum_over_others,
    total,
)
from graph_passes.operators.body import Body
from graph_passes.operators.dropout import FACTORS, dropped, dropping, factors_shape
from graph_passes.operators.elementwise import relu, relu_backward

BATCH_NORMS = ("BatchNorm", "BatchNormRelu", "BatchNormAddRelu")


class Statistics(NamedTuple):
    """For each channel, the mean and the biased variance with which the data is normalised."""

    mean: Array
    var: Array


# --- shapes ---


def channels_of(node: NodeView, data: Shape) -> Shape:
    """(C,), from the data's shape. Raises GraphError for an axis that the data does not have."""
    if not -len(data) <= node["axis"] < len(data):
        raise GraphError(f"{node.op} '{node.name}' has axis={node['axis']}, but its input has the shape {data}")
    return (data[node["axis"]],)


def mask_shape(data: Shape) -> Shape:
    """One bit per element, packed along the last dimension."""
    return (*data[:-1], -(-data[-1] // 8))


def _inference(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    channels = channels_of(node, data)
    addend = [data, *factors_shape(node, shapes, 6)] if node.op.startswith("BatchNormAddRelu") else []
    return [data, *[channels] * 4, *addend], [data, channels, channels]


def _training(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    inputs, (output, channels, _) = _inference(node, shapes)
    mask = [mask_shape(output)] if node.op == "BatchNormAddReluTrain" else []
    return inputs, [output, (2, *channels), channels, channels, *mask]


def _backward(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    channels = channels_of(node, data)
    adds = node.op == "BatchNormAddReluBackward"
    last = [mask_shape(data), *factors_shape(node, shapes, 5)] if adds else [channels] * ("Relu" in node.op)
    second = [] if node["single_grad"] else [data]
    addend = [data] if adds else []
    return [data, data, channels, (2, *channels), *last, *second], [data, channels, channels, *addend]


# --- NumPy ---


def batch_statistics(node: NodeView, x: Array) -> Statistics:
    x = np.moveaxis(x, node["axis"], -1)
    axes = tuple(range(x.ndim - 1))
    return Statistics(x.mean(axis=axes), x.var(axis=axes))


def running_statistics(node: NodeView, running: Statistics, batch: Statistics) -> Statistics:
    """The running statistics after a training step."""
    keep = node["momentum"]
    return Statistics(*(keep * old + (1 - keep) * new for old, new in zip(running, batch, strict=True)))


def to_saved(node: NodeView, statistics: Statistics) -> Array:
    """The part of the statistics that the gradient needs."""
    return np.stack([statistics.mean, 1 / np.sqrt(statistics.var + node["eps"])])


def normalised(node: NodeView, x: Array, saved: Array) -> Array:
    mean, inverse_std = (along_axis(values, node["axis"], x.ndim) for values in saved)
    return (x - mean) * inverse_std


def scaled(node: NodeView, x: Array, gamma: Array, beta: Array, saved: Array) -> Array:
    """The output of BatchNorm for the data x."""
    gamma = np.ones_like(gamma) if node["fix_gamma"] else gamma
    axis = node["axis"]
    return normalised(node, x, saved) * along_axis(gamma, axis, x.ndim) + along_axis(beta, axis, x.ndim)


def gradient_sums(node: NodeView, dz: Array, x: Array, saved: Array) -> tuple[Array, Array]:
    """The two sums that the gradient of x needs: the gradients of gamma (unless fixed) and beta."""
    axis = node["axis"]
    return sum_over_others(dz * normalised(node, x, saved), axis), sum_over_others(dz, axis)


def data_gradient(node: NodeView, dz: Array, x: Array, gamma: Array, saved: Array, sums: tuple[Array, Array],
                  from_batch: bool = True) -> Array:
    """The gradient of x. `from_batch`: the statistics are computed from x, so the gradient also flows through the
    statistics.
    """
    axis, (dgamma, dbeta) = node["axis"], sums
    if from_batch:
        terms = along_axis(dbeta, axis, x.ndim) + normalised(node, x, saved) * along_axis(dgamma, axis, x.ndim)
        dz = dz - terms / (x.size // x.shape[axis])
    factor = saved[1] if node["fix_gamma"] else gamma * saved[1]
    return dz * along_axis(factor, axis, x.ndim)


def positive_bits(y: Array) -> Array:
    """The `mask` of an output."""
    return np.packbits(y > 0, axis=-1, bitorder="little")


def masked(dz: Array, mask: Array) -> Array:
    """The gradient where the bits of `mask` are set, and 0 elsewhere."""
    return relu_backward(dz, np.unpackbits(mask, axis=-1, count=dz.shape[-1], bitorder="little"))


def _compute(node: NodeView, x: Array, gamma: Array, beta: Array, mean: Array, var: Array,
             addend: Array | None = None, factors: Array | None = None) -> list[Array]:
    y = scaled(node, x, gamma, beta, to_saved(node, Statistics(mean, var)))
    y = y if addend is None else dropped(node, y, factors) + addend
    return [y if node.op == "BatchNorm" else relu(y), mean, var]


def _compute_training(node: NodeView, x: Array, gamma: Array, beta: Array, mean: Array, var: Array,
                      addend: Array | None = None, factors: Array | None = None) -> list[Array]:
    batch = batch_statistics(node, x)
    saved, moving = to_saved(node, batch), running_statistics(node, Statistics(mean, var), batch)
    y = scaled(node, x, gamma, beta, saved)
    if node.op == "BatchNormTrain":
        return [y, saved, *moving]
    if addend is None:
        return [relu(y), saved, *moving]
    y = relu(dropped(node, y, factors) + addend)
    return [y, saved, *moving, positive_bits(y)]


def _compute_backward(node: NodeView, dy: Array, x: Array, gamma: Array, saved: Array, *others: Array) -> list[Array]:
    last = others[0] if node.op != "BatchNormBackward" else None
    dz = total(dy, None if node["single_grad"] else others[-1])
    if node.op == "BatchNormReluBackward":
        assert last is not None
        dz = relu_backward(dz, scaled(node, x, gamma, last, saved))
    elif node.op == "BatchNormAddReluBackward":
        assert last is not None
        dz = masked(dz, last)
    addend = []
    if node.op == "BatchNormAddReluBackward":
        addend, dz = [dz], dropped(node, dz, None if node["no_factors"] else others[1])
    sums = gradient_sums(node, dz, x, saved)
    dgamma = np.zeros_like(sums[0]) if node["fix_gamma"] else sums[0]
    return [data_gradient(node, dz, x, gamma, saved, sums), dgamma, sums[1], *addend]


def _numpy_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                    training: bool) -> list[Array | None]:
    dz = dy if node.op == "BatchNorm" else relu_backward(dy, outputs[0])
    addend = [dz] if node.op == "BatchNormAddRelu" else []
    factors = inputs[6:]
    dz = dropped(node, dz, *factors or (None,))
    x, gamma, saved = inputs[0], inputs[1], to_saved(node, Statistics(*outputs[1:]))
    sums = gradient_sums(node, dz, x, saved)
    from_batch = training and not node["use_global_stats"]
    dgamma = np.zeros_like(sums[0]) if node["fix_gamma"] else sums[0]
    dx = data_gradient(node, dz, x, gamma, saved, sums, from_batch)
    return [dx, dgamma, sums[1], None, None, *addend, *[None] * len(factors)]


# --- the gradient in the graph ---


def _training_variant(node: NodeView) -> str:
    if node["use_global_stats"]:
        raise GraphError(f"{node.op} '{node.name}' has use_global_stats=True, which has no gradient here: set it to "
                         "False")
    return f"{node.op}Train"


def _gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    data, gamma, beta, *_ = node.inputs
    saved, mask = Ref(node.name, 1), Ref(node.name, 4)
    more = {"BatchNorm": (), "BatchNormRelu": (beta,), "BatchNormAddRelu": (mask, *node.inputs[6:])}[node.op]
    backward = node.derive(f"{node.op}Backward", f"{node.name}_backward", (dy, data, gamma, saved, *more))
    names = ["data", "gamma", "beta", "addend"]
    gradients = {name: Ref(backward.name, index) for index, name in enumerate(names[: backward.num_outputs])}
    if node["fix_gamma"]:
        del gradients["gamma"]
    return Gradient([backward], gradients)


# --- the descriptions ---

ATTRIBUTES = {
    "eps": Attribute(float, 1e-3),
    "momentum": Attribute(float, 0.9),
    "fix_gamma": TRUE,  # gamma counts as 1 and gets no gradient
    "use_global_stats": FALSE,
    "axis": Attribute(int, 1),
}
RUNNING = ("moving_mean", "moving_var")
_INPUTS = ("data", "gamma", "beta", *RUNNING)
_KEPT = ("output", "saved", *RUNNING)
_GRADIENTS = ("data_grad", "gamma_grad", "beta_grad")


def _forward(name: str, inputs: tuple[str, ...], over: tuple[str, ...]) -> Operator:
    return Operator(name, inputs, _inference, _compute, ATTRIBUTES | dropping(inputs), ("output", "mean", "var"),
                    FACTORS, RUNNING, {"output": over}, gradient=_gradient, numpy_gradient=_numpy_gradient,
                    training=_training_variant, fused=name != "BatchNorm", body=_body)


def _body(b: Body) -> list[Any]:
    """The body before the split into halves, with the addition or ReLU that the node has."""
    y, *others = b.batch_norm()
    y = b.add(b.dropped(y), b["addend"]) if b.has("addend") else y
    return [y if b.node.op == "BatchNorm" else b.relu(y), *others]


def _train(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], over: tuple[str, ...]) -> Operator:
    return Operator(name, inputs, _training, _compute_training, ATTRIBUTES | dropping(inputs), outputs, FACTORS,
                    RUNNING, {"output": over}, fused="Relu" in name, forward=name.removesuffix("Train"))


def _back(name: str, last: tuple[str, ...], outputs: tuple[str, ...], in_place: Mapping[str, Any]) -> Operator:
    return Operator(name, ("out_grad", "data", "gamma", "saved", *last, "out_grad_2"), _backward, _compute_backward,
                    ATTRIBUTES | SINGLE_GRAD | dropping(last), outputs, {**SECOND_GRAD, **FACTORS}, in_place=in_place,
                    fused="Relu" in name, forward=name.removesuffix("Backward"))


_OVER = {"data_grad": ("data", "out_grad", "out_grad_2")}

OPERATORS = (
    _forward("BatchNorm", _INPUTS, ("data",)),
    _forward("BatchNormRelu", _INPUTS, ("data",)),
    _forward("BatchNormAddRelu", (*_INPUTS, "addend", "factors"), ("data", "addend")),
    _train("BatchNormTrain", _INPUTS, _KEPT, ("data",)),
    _train("BatchNormReluTrain", _INPUTS, _KEPT, ("data",)),
    _train("BatchNormAddReluTrain", (*_INPUTS, "addend", "factors"), (*_KEPT, "mask"), ("addend", "data")),
    _back("BatchNormBackward", (), _GRADIENTS, _OVER),
    _back("BatchNormReluBackward", ("beta",), _GRADIENTS, _OVER),
    # addend_grad is written by the reduction while data is still read, so it may overwrite gradients only.
    _back("BatchNormAddReluBackward", ("mask", "factors"), (*_GRADIENTS, "addend_grad"),
          {"addend_grad": ("out_grad", "out_grad_2"), "data_grad": ("data",)}),
)
