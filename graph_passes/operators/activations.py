"""Elementwise functions: MXNet's Activation, LeakyReLU, clip, hard_sigmoid, sigmoid, tanh and softsign.

    function_of(node)    # -> Function("leaky", 0.01): which function a node applies, whatever its spelling

Gradients are computed from the data; only ReLU's gradient (operators/elementwise.py) is computed from the output. At a
kink, such as leaky ReLU's at 0, the slope is MXNet's. Sources: ELU arXiv:1511.07289, SELU arXiv:1706.02515, GELU
arXiv:1606.08415 (with erf), PReLU arXiv:1502.01852, hard sigmoid and hard swish arXiv:1905.02244.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.operators.base import (
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
    number,
    one_of,
    sum_over_others,
)
from graph_passes.operators.body import Body
from graph_passes.operators.elementwise import elementwise, is_relu, relu_gradient, relu_numpy_gradient
from graph_passes.operators.sigmoid import sigmoid

SELU_SCALE, SELU_ALPHA = 1.0507009873554805, 1.6732632423543772
_erf = np.vectorize(math.erf, otypes=[np.float64])


class Function(NamedTuple):
    """A function of one number, with up to two constants. `name` is one of FUNCTIONS."""

    name: str
    a: float = 0.0
    b: float = 0.0

    def value(self, x: Array) -> Array:
        result: Array = FUNCTIONS[self.name][0](x, self.a, self.b)
        return result

    def slope(self, x: Array) -> Array:
        """The derivative at x."""
        result: Array = FUNCTIONS[self.name][1](x, self.a, self.b)
        return result


def _softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)).astype(x.dtype))


def _gelu_slope(x: Array) -> Array:
    normal = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + _erf(x / math.sqrt(2)).astype(x.dtype)) + x * normal


def _elu(x: Array, a: float) -> Array:
    return np.where(x > 0, x, a * np.expm1(np.minimum(x, 0)))


def _elu_slope(x: Array, a: float) -> Array:
    return np.where(x > 0, 1, a * np.exp(np.minimum(x, 0)))


def _inside(x: Array, low: float, high: float) -> Array:
    return ((x >= low) & (x <= high)).astype(x.dtype)


Rule = Callable[[Array, float, float], Array]
# Name -> the function and its derivative; `a` and `b` are constants of the function.
FUNCTIONS: Mapping[str, tuple[Rule, Rule]] = {
    "relu": (lambda x, a, b: np.maximum(x, 0), lambda x, a, b: (x > 0).astype(x.dtype)),
    "sigmoid": (lambda x, a, b: sigmoid(x), lambda x, a, b: sigmoid(x) * sigmoid(-x)),
    "tanh": (lambda x, a, b: np.tanh(x), lambda x, a, b: 1 - np.tanh(x) ** 2),
    "softrelu": (lambda x, a, b: _softplus(x), lambda x, a, b: sigmoid(x)),
    "softsign": (lambda x, a, b: x / (1 + np.abs(x)), lambda x, a, b: 1 / (1 + np.abs(x)) ** 2),
    "leaky": (lambda x, a, b: np.where(x > 0, x, a * x), lambda x, a, b: np.where(x > 0, 1, a)),
    "elu": (lambda x, a, b: _elu(x, a), lambda x, a, b: _elu_slope(x, a)),
    "selu": (lambda x, a, b: SELU_SCALE * _elu(x, SELU_ALPHA), lambda x, a, b: SELU_SCALE * _elu_slope(x, SELU_ALPHA)),
    "gelu": (lambda x, a, b: _gelu(x), lambda x, a, b: _gelu_slope(x)),
    "clip": (lambda x, a, b: np.clip(x, a, b), _inside),
    "hard_sigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1),
                     lambda x, a, b: a * ((a * x + b > 0) & (a * x + b < 1)).astype(x.dtype)),
}


def function_of(node: NodeView) -> Function | None:
    """The function that a node applies to each element; None for other nodes."""
    if node.op in ("relu", "sigmoid", "tanh", "softsign"):
        return Function(node.op)
    if node.op == "Activation":
        return Function(node["act_type"])
    if node.op == "LeakyReLU" and node["act_type"] != "prelu":
        return Function(node["act_type"], node["slope"] if node["act_type"] in ("leaky", "elu") else 0.0)
    if node.op == "clip":
        return Function("clip", node["a_min"], node["a_max"])
    if node.op == "hard_sigmoid":
        return Function("hard_sigmoid", node["alpha"], node["beta"])
    if node.op == "ActivationBackward":
        return Function(node["function"], node["a"], node["b"])
    return None


def _function(node: NodeView) -> Function:
    function = function_of(node)
    assert function, node.op
    return function


# --- shapes ---


def _leaky(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    return [data, *[data[1:2]] * (node["act_type"] == "prelu")], [data]


def _prelu_backward(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes, 1)
    return [data, data, data[1:2]], [data, data[1:2]]


# --- NumPy ---


def _compute(node: NodeView, x: Array, gamma: Array | None = None) -> list[Array]:
    if gamma is not None:
        return [np.where(x > 0, x, along_axis(gamma, 1, x.ndim) * x)]
    return [_function(node).value(x).astype(x.dtype)]


def _compute_backward(node: NodeView, dy: Array, x: Array) -> list[Array]:
    return [(dy * _function(node).slope(x)).astype(dy.dtype)]


def _compute_prelu_backward(node: NodeView, dy: Array, x: Array, gamma: Array) -> list[Array]:
    """The gradients of data and slopes of PReLU. Each channel, along the second dimension, has one slope."""
    return [np.where(x > 0, dy, along_axis(gamma, 1, x.ndim) * dy), sum_over_others(np.where(x > 0, 0, x * dy), 1)]


def _numpy_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                    training: bool) -> list[Array | None]:
    if is_relu(node):
        return relu_numpy_gradient(node, inputs, outputs, dy, training)
    compute = _compute_prelu_backward if len(inputs) == 2 else _compute_backward
    return [*compute(node, dy, *inputs)]


# --- the gradient in the graph ---


def _gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    """The gradient of a function in the graph. ReLU's gradient is computed from the output, all others from the data.
    """
    if is_relu(node):
        return relu_gradient(node, dy, shapes)
    name = f"{node.name}_backward"
    if len(node.inputs) == 2:
        backward = node.replace(op="PReluBackward", name=name, inputs=(dy, *node.inputs), attrs={}, num_outputs=0)
        return Gradient([backward], {"data": Ref(name, 0), "gamma": Ref(name, 1)})
    function = _function(node)
    attrs = {"function": function.name, "a": function.a, "b": function.b}
    backward = node.replace(op="ActivationBackward", name=name, inputs=(dy, node.inputs[0]), attrs=attrs)
    return Gradient([backward], {"data": Ref(name)})


# --- the descriptions ---

_ACTIVATIONS = ("relu", "sigmoid", "tanh", "softrelu", "softsign")
_LEAKY = ("leaky", "prelu", "elu", "selu", "gelu")


def _leaky_kind(value: object) -> str:
    if value == "rrelu":
        raise GraphError("LeakyReLU with act_type='rrelu' draws its slopes at random, which is not supported: use "
                         "leaky")
    return one_of(*_LEAKY)(value)


def _body(b: Body) -> list[Any]:
    return [b.relu(b["data"])] if is_relu(b.node) else b.primitive()


def _of_elements(name: str, attrs: Mapping[str, Attribute] | None = None) -> Operator:
    return Operator(name, ("data",), elementwise, _compute, attrs or {}, in_place={"output": ("data",)},
                    gradient=_gradient, numpy_gradient=_numpy_gradient, body=_body)


OPERATORS = (
    _of_elements("Activation", {"act_type": Attribute(one_of(*_ACTIVATIONS))}),
    _of_elements("sigmoid"),
    _of_elements("tanh"),
    _of_elements("softsign"),
    _of_elements("clip", {"a_min": Attribute(number), "a_max": Attribute(number)}),
    _of_elements("hard_sigmoid", {"alpha": Attribute(float, 0.2), "beta": Attribute(float, 0.5)}),
    # `gamma`: PReLU's slopes, one per channel, along the second dimension as in MXNet.
    Operator("LeakyReLU", ("data", "gamma"), _leaky, _compute,
             {"act_type": Attribute(_leaky_kind, "leaky"), "slope": Attribute(float, 0.25)},
             optional={"gamma": lambda node: node["act_type"] != "prelu"}, gradient=_gradient,
             numpy_gradient=_numpy_gradient),
    Operator("ActivationBackward", ("out_grad", "data"), elementwise, _compute_backward,
             {"function": Attribute(one_of(*FUNCTIONS)), "a": Attribute(float, 0.0), "b": Attribute(float, 0.0)},
             ("data_grad",), in_place={"data_grad": ("out_grad", "data")}, forward="Activation"),
    Operator("PReluBackward", ("out_grad", "data", "gamma"), _prelu_backward, _compute_prelu_backward, {},
             ("data_grad", "gamma_grad"), in_place={"data_grad": ("out_grad",)}, forward="LeakyReLU"),
)
