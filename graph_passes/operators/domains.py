"""Two further interpretations of a body: over arrays (the operator's NumPy implementation), and over shapes.

An operator that has only a body gets its `compute` and `infer` from here (`derived`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.operators.base import (
    Array,
    NodeView,
    Operator,
    Shape,
    Shapes,
    along_axis,
    by_body,
    channel_axis,
    compact_shape,
    sums_about_mean,
    with_all_pixels,
)
from graph_passes.operators.batch_norm import (
    RUNNING,
    Statistics,
    channels_of,
    data_gradient,
    gradient_sums,
    mask_shape,
    masked,
    positive_bits,
    running_statistics,
    scaled,
    to_saved,
)
from graph_passes.operators.batch_norm_halves import statistics_of, sums_shape
from graph_passes.operators.body import Body
from graph_passes.operators.convolution import (
    convolution,
    convolution_dgrad,
    convolution_shapes,
    convolution_wgrad,
    stem_pooled,
    stem_pooled_shape,
)
from graph_passes.operators.dropout import dropped
from graph_passes.operators.elementwise import relu
from graph_passes.operators.quantised import LARGEST, add_rescaled, int8_convolution, rescaled, saturated

_SUMS = ("gamma_grad", "beta_grad")


def derived(operator: Operator) -> Operator:
    """The operator with `compute` and `infer` derived from its body. An operator that has these already does not
    change.
    """
    if operator.compute is not by_body:
        return operator
    return dataclasses.replace(operator, compute=partial(_compute, operator), infer=partial(_infer, operator))


def _compute(operator: Operator, node: NodeView, *inputs: Array) -> Sequence[Array]:
    assert operator.body
    return operator.body(_Arrays(node, operator.input_names(node), inputs))


def _infer(operator: Operator, node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    assert operator.body
    inputs = [_Tensor(shape, node.inputs[index].node) for index, shape in enumerate(shapes)]
    outputs = operator.body(_Sizes(node, operator.input_names(node), inputs))
    return [_known(node, each) for each in inputs], [_known(node, each) for each in outputs]


def _changed(node: NodeView, **changes: Any) -> NodeView:
    """A copy of the node with changed attributes."""
    view: NodeView = node.replace(attrs={**node.attrs, **changes})
    return view


def _channel_axis(node: NodeView) -> int:
    """The channel axis of the output of the node's convolution."""
    return channel_axis(node["layout"])


class _Arrays(Body):
    """Primitives on NumPy arrays."""

    def relu(self, x: Array) -> Array:
        return relu(x)

    def add(self, one: Array, other: Array) -> Array:
        return one + other

    def mask(self, x: Array) -> Array:
        return positive_bits(x)

    def gate(self, gradient: Array, mask: Array) -> Array:
        return masked(gradient, mask)

    def drop(self, x: Array, factors: Array) -> Array:
        return dropped(self.node, x, factors)

    def scatter(self, compact: Array, stride: tuple[int, int], like: Array) -> Array:
        return with_all_pixels(self.node, compact, like.shape)

    def stored(self, x: Array) -> Array:
        return x.astype(self["data"].dtype)

    def conv(self, data: Array, weight: Array, **changes: Any) -> Array:
        compute = int8_convolution if data.dtype == np.int8 else convolution
        return compute(_changed(self.node, **changes), data, weight)

    def bias(self, data: Array, bias: Array) -> Array:
        return data + along_axis(bias, _channel_axis(self.node), data.ndim)

    def dgrad(self, gradient: Array, weight: Array) -> Array:
        return convolution_dgrad(self.node, gradient, weight, self.node["data_shape"])

    def wgrad(self, gradient: Array, data: Array) -> Array:
        return convolution_wgrad(self.node, gradient, data)

    def sums(self, x: Array) -> Array:
        return sums_about_mean(x, _channel_axis(self.node))

    def statistics(self, suffix: str = "") -> list[Array]:
        data, sums, *running = self.all(*(f"{role}{suffix}" for role in ("data", "sums", *RUNNING)))
        batch = statistics_of(sums, data)
        return [to_saved(self.node, batch), *running_statistics(self.node, Statistics(*running), batch)]

    def normalised(self, saved: Array, suffix: str = "") -> Array:
        data, gamma, beta = self.all(*(f"{role}{suffix}" for role in ("data", "gamma", "beta")))
        return scaled(self.node, data, gamma, beta, saved)

    def norm_sums(self, gradient: Array, data: Array, saved: Array) -> list[Array]:
        return [*gradient_sums(self.node, gradient, data, saved)]

    def norm_grad(self, gradient: Array, suffix: str = "") -> Array:
        data, gamma, saved, *sums = self.all(*(f"{role}{suffix}" for role in ("data", "gamma", "saved", *_SUMS)))
        dgamma, dbeta = sums
        return data_gradient(self.node, gradient, data, gamma, saved, (dgamma, dbeta))

    def max_of_3x3(self, x: Array) -> Array:
        return stem_pooled(x, -LARGEST if x.dtype == np.int8 else -np.inf)

    def rescaled(self, sums: Array, multiplier: Array) -> Array:
        return rescaled(sums, along_axis(multiplier, _channel_axis(self.node), sums.ndim))

    def add_rescaled(self, x: Array, addend: Array, ratio: float) -> Array:
        return add_rescaled(x, addend, ratio)

    def saturated(self, x: Array) -> Array:
        return saturated(x)


@dataclass
class _Tensor:
    """The known shape of a tensor. An input's shape may be found later, by a primitive that reads it."""

    shape: Shape | None
    input: str = ""  # name of the node that produces the input


def _known(node: NodeView, tensor: _Tensor) -> Shape:
    """The tensor's shape. Raises GraphError if it is not known."""
    if tensor.shape is None:
        raise GraphError(f"the shape of '{tensor.input}', read by {node.op} '{node.name}', is not known: give it")
    return tensor.shape


class _Sizes(Body):
    """Primitives on shapes. A primitive's requirement becomes the shape of an input with unknown shape; the caller
    compares it with the known shapes."""

    def _known(self, *tensors: _Tensor) -> Shape:
        """The shape of tensors with equal shapes: the first one that is known."""
        found = next((each for each in tensors if each.shape is not None), tensors[0])
        shape = _known(self.node, found)
        for each in tensors:
            self._is(each, shape)
        return shape

    def _is(self, tensor: _Tensor, shape: Shape) -> None:
        """Set the shape of an input, or check the shape of another tensor. Raises GraphError if the shape differs."""
        if tensor.input:
            tensor.shape = shape
        elif tensor.shape != shape:
            raise GraphError(f"{self.node.op} '{self.node.name}' makes a tensor of the shape {tensor.shape} where it "
                             f"needs {shape}: give inputs that agree")

    def _of_norm(self, data: _Tensor, *channels: _Tensor, saved: _Tensor | None = None) -> Shape:
        """The shape (C,) of a BatchNorm's parameters, from the shape of its data."""
        found = channels_of(self.node, self._known(data))
        for each in channels:
            self._is(each, found)
        if saved:
            self._is(saved, (2, *found))
        return found

    def relu(self, x: _Tensor) -> _Tensor:
        return _Tensor(self._known(x))

    def add(self, one: _Tensor, other: _Tensor) -> _Tensor:
        return _Tensor(self._known(one, other))

    def mask(self, x: _Tensor) -> _Tensor:
        return _Tensor(mask_shape(self._known(x)))

    def gate(self, gradient: _Tensor, mask: _Tensor) -> _Tensor:
        shape = self._known(gradient)
        self._is(mask, mask_shape(shape))
        return _Tensor(shape)

    def drop(self, x: _Tensor, factors: _Tensor) -> _Tensor:
        _known(self.node, factors)
        return _Tensor(self._known(x))

    def scatter(self, compact: _Tensor, stride: tuple[int, int], like: _Tensor) -> _Tensor:
        shape = self._known(like)
        self._is(compact, compact_shape(shape, stride))
        return _Tensor(shape)

    def stored(self, x: _Tensor) -> _Tensor:
        return x

    def conv(self, data: _Tensor, weight: _Tensor, **changes: Any) -> _Tensor:
        of_weight, output = convolution_shapes(_changed(self.node, **changes), self._known(data))
        self._is(weight, of_weight)
        return _Tensor(output)

    def bias(self, data: _Tensor, bias: _Tensor) -> _Tensor:
        shape = self._known(data)
        self._is(bias, (shape[_channel_axis(self.node)],))
        return _Tensor(shape)

    def dgrad(self, gradient: _Tensor, weight: _Tensor) -> _Tensor:
        of_weight, output = convolution_shapes(self.node, self.node["data_shape"])
        self._is(gradient, output)
        self._is(weight, of_weight)
        return _Tensor(self.node["data_shape"])

    def wgrad(self, gradient: _Tensor, data: _Tensor) -> _Tensor:
        weight, output = convolution_shapes(self.node, self._known(data))
        self._is(gradient, output)
        return _Tensor(weight)

    def sums(self, x: _Tensor) -> _Tensor:
        return _Tensor((3, self._known(x)[_channel_axis(self.node)]))

    def statistics(self, suffix: str = "") -> list[_Tensor]:
        data, sums, *running = self.all(*(f"{role}{suffix}" for role in ("data", "sums", *RUNNING)))
        channels = self._of_norm(data, *running)
        self._is(sums, sums_shape(sums.shape, channels))
        return [_Tensor((2, *channels)), _Tensor(channels), _Tensor(channels)]

    def normalised(self, saved: _Tensor, suffix: str = "") -> _Tensor:
        data, gamma, beta = self.all(*(f"{role}{suffix}" for role in ("data", "gamma", "beta")))
        self._of_norm(data, gamma, beta, saved=saved)
        return _Tensor(data.shape)

    def norm_sums(self, gradient: _Tensor, data: _Tensor, saved: _Tensor) -> list[_Tensor]:
        self._known(gradient, data)
        channels = self._of_norm(data, saved=saved)
        return [_Tensor(channels), _Tensor(channels)]

    def norm_grad(self, gradient: _Tensor, suffix: str = "") -> _Tensor:
        data, gamma, saved, *sums = self.all(*(f"{role}{suffix}" for role in ("data", "gamma", "saved", *_SUMS)))
        shape = self._known(gradient, data)
        self._of_norm(data, gamma, *sums, saved=saved)
        return _Tensor(shape)

    def max_of_3x3(self, x: _Tensor) -> _Tensor:
        return _Tensor(stem_pooled_shape(self._known(x)))

    def rescaled(self, sums: _Tensor, multiplier: _Tensor) -> _Tensor:
        return self.bias(sums, multiplier)

    def add_rescaled(self, x: _Tensor, addend: _Tensor, ratio: float) -> _Tensor:
        return self.add(x, addend)

    def saturated(self, x: _Tensor) -> _Tensor:
        return self.relu(x)
