"""Value numbering: tensors that are equal expressions of the variables have equal numbers, with or without fusions.

    number(graph)    # each tensor by its Ref -> its number in a table of expressions

A fused operator is expanded into primitives by its body (`operators/body.py`): ConvolutionAddRelu is
relu(add(bias(conv))). BatchNorm's sums have one number in both of their forms (`operators/batch_norm_halves.py`),
because their readers accept either form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import OPERATORS, output_size, window
from graph_passes.operators.body import Body

# Attributes that determine how a tensor is computed or stored, but not its value.
_HOW = ("algorithm", "dtype", "no_output", "part_of", "tile", "workspace")


class Expression(NamedTuple):
    """One output of a primitive, or a variable. `inputs` are numbers."""

    op: str
    inputs: tuple[int, ...]
    attrs: tuple[Any, ...] = ()
    output: int = 0


class Values:
    """The table of expressions."""

    def __init__(self) -> None:
        self._numbers: dict[Expression, int] = {}
        self._expressions: list[Expression] = []

    def __call__(self, op: str, *inputs: int, attrs: Sequence[Any] = (), output: int = 0) -> int:
        """The number of an expression. a + b and b + a have one number."""
        ordered = tuple(sorted(inputs)) if op == "add" else inputs
        expression = Expression(op, ordered, tuple(attrs), output)
        if expression not in self._numbers:
            self._numbers[expression] = len(self._expressions)
            self._expressions.append(expression)
        return self._numbers[expression]

    def __getitem__(self, number: int) -> Expression:
        return self._expressions[number]

    def outputs(self, node: Node, inputs: Sequence[int]) -> list[int]:
        """The numbers of a node's outputs, from the numbers of its inputs."""
        if node.is_variable:
            return [self("variable", attrs=(node.name,))]
        operator = OPERATORS.get(node.op)
        b = _Numbers(self, node, operator.input_names(node) if operator else (), inputs)
        found = list(operator.body(b)) if operator and operator.body else b.primitive()
        # hidden outputs of MXNet without a description: a workspace of Pooling
        hidden = range(len(found), node.num_outputs)
        return found + [self("hidden", *inputs, attrs=(node.op, node.name), output=index) for index in hidden]


def number(graph: Graph, values: Values | None = None) -> dict[Ref, int]:
    """The numbers of all tensors of a graph. With a table `values`, several graphs can share their numbers."""
    values, found = values or Values(), dict[Ref, int]()
    for node in graph:
        numbers = values.outputs(node, [found[ref] for ref in node.inputs])
        found.update(zip(node.refs(), numbers, strict=True))
    return found


class _Numbers(Body):
    """Primitives on numbers of expressions."""

    def __init__(self, values: Values, node: Node, roles: Sequence[str], inputs: Sequence[int]) -> None:
        super().__init__(node, roles, inputs)
        self.values = values

    # --- single elements ---

    def relu(self, x: int) -> int:
        return self.values("relu", x)

    def add(self, one: int, other: int) -> int:
        return self.values("add", one, other)

    def mask(self, x: int) -> int:
        kind = self.values[x]
        return self.values("mask", kind.inputs[0] if kind.op == "relu" else x)

    def gate(self, gradient: int, mask: int) -> int:
        return self.values("gate", gradient, mask)

    def drop(self, x: int, factors: int) -> int:
        return self.values("drop", x, factors, attrs=(self.node["row"],))

    def scatter(self, compact: int, stride: tuple[int, int], like: int = 0) -> int:
        return self.values("scatter", compact, attrs=stride)

    def stored(self, x: int) -> int:
        return x

    # --- convolutions ---

    def conv(self, data: int, weight: int, **changes: Any) -> int:
        return self.values("conv", data, weight, attrs=_geometry(self.node, **changes))

    def bias(self, data: int, bias: int) -> int:
        return self.values("bias", data, bias)

    def dgrad(self, gradient: int, weight: int) -> int:
        """A strided 1x1 convolution skips pixels. Its data gradient is the gradient of the pixels that the convolution
        reads, and 0 at all other pixels.
        """
        node, shape = self.node, self.node["data_shape"]
        kernel, stride, pad, _ = window(node)
        if kernel != (1, 1) or pad != (0, 0) or stride == (1, 1) or node["layout"] != "NHWC":
            return self.values("dgrad", gradient, weight, attrs=(*_geometry(node), shape))
        read = (shape[0], *output_size(node, shape[1:3]), shape[3])
        return self.scatter(self.values("dgrad", gradient, weight, attrs=(*_geometry(node, stride=(1, 1)), read)),
                            stride)

    def wgrad(self, gradient: int, data: int) -> int:
        return self.values("wgrad", gradient, data, attrs=_geometry(self.node))

    # --- BatchNorm in training ---

    @property
    def _norm(self) -> tuple[Any, ...]:
        return self.node["eps"], self.node["fix_gamma"], self.node["axis"] % 4

    def sums(self, x: int) -> int:
        return self.values("sums", x)

    def statistics(self, suffix: str = "") -> list[int]:
        inputs = self.all(*(f"{role}{suffix}" for role in ("data", "sums", "moving_mean", "moving_var")))
        attrs = (*self._norm, self.node["momentum"])
        return [self.values("statistics", *inputs, attrs=attrs, output=index) for index in range(3)]

    def normalised(self, saved: int, suffix: str = "") -> int:
        data, gamma, beta = self.all(*(f"{role}{suffix}" for role in ("data", "gamma", "beta")))
        return self.values("norm", data, saved, gamma, beta, attrs=self._norm)

    def norm_sums(self, gradient: int, data: int, saved: int) -> list[int]:
        return [self.values("norm_sums", gradient, data, saved, attrs=self._norm, output=index) for index in (0, 1)]

    def norm_grad(self, gradient: int, suffix: str = "") -> int:
        roles = ("data", "gamma", "saved", "gamma_grad", "beta_grad")
        return self.values("norm_grad", gradient, *self.all(*(f"{role}{suffix}" for role in roles)), attrs=self._norm)

    def batch_norm(self) -> list[int]:
        attrs = (*self._norm, self.node["momentum"], self.node["use_global_stats"])
        return [self.values("BatchNorm", *self.inputs[:5], attrs=attrs, output=index) for index in range(3)]

    # --- max pooling ---

    def max_of_3x3(self, x: int) -> int:
        return self.values("max_of_3x3", x)

    def pooled(self, x: int) -> list[int]:
        attrs = (*window(self.node), self.node["layout"])
        return [self.values("max_pool", x, attrs=attrs, output=index) for index in (0, 1)]

    def unpooled(self, gradient: int, winner: int) -> int:
        kind, of = self.values[winner], self.values[gradient]
        if kind.op != "winner_above_0":
            return self.values("unpool", gradient, winner)
        if of.op == "gate_at_winner" and of.inputs[1] == winner:
            gradient = of.inputs[0]
        return self.gate(self.values("unpool", gradient, kind.inputs[0]), self.mask(kind.inputs[1]))

    def winner_above_0(self, winner: int, pooled: int) -> int:
        return self.values("winner_above_0", winner, pooled)

    def at_winner(self, data: int, winner: int) -> int:
        return self.values("data_at_winner", data, winner)

    def data_of(self, at_winner: int) -> int:
        return self.values[at_winner].inputs[0]

    def gate_at_winner(self, gradient: int, winner: int) -> int:
        return self.values("gate_at_winner", gradient, winner)

    # --- INT8 ---

    def rescaled(self, sums: int, multiplier: int) -> int:
        return self.values("rescaled", sums, multiplier)

    def add_rescaled(self, x: int, addend: int, ratio: float) -> int:
        return self.values("add_rescaled", x, addend, attrs=(ratio,))

    def saturated(self, x: int) -> int:
        return self.values("saturated", x)


    def primitive(self, inputs: Sequence[int] | None = None) -> list[int]:
        node = self.node
        attrs = tuple(sorted((key, str(value)) for key, value in node.attrs.items() if key not in _HOW))
        given = self.inputs if inputs is None else inputs
        return [self.values(node.op, *given, attrs=attrs, output=index) for index in range(node.num_outputs)]

    def reserve(self, of: int) -> int:
        return self.values("reserve", of, attrs=(self.node["algorithm"],))

    def read_reserve(self, reserve: int) -> int:
        kind = self.values[reserve]
        return kind.inputs[0] if kind.attrs == (self.node["algorithm"],) else reserve


def _geometry(node: Node, **changes: Any) -> tuple[Any, ...]:
    size = window(node)._asdict() | {name: node[name] for name in ("num_filter", "num_group", "layout")} | changes
    return tuple(size.values())
