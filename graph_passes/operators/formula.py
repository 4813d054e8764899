"""A custom loss as a formula: read from a Symbol, differentiated, computed in NumPy, written as CUDA C++.

    formula = read(symbol.tojson(), "softmax")     # of the variables scores and targets, (N, C) each
    loss, gradient = formula.compute(["loss", "gradient"], scores, targets)

Each value has a number for each class of an image, (N, C), or one number for an image, (N, 1), which broadcasts. No
value depends on several images.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from graph_passes.errors import GraphError

Array = np.ndarray
SCORES, TARGETS = "scores", "targets"
PROBABILITIES = ("softmax", "sigmoid")  # how scores become probabilities


class Step(NamedTuple):
    """A value of a formula: a primitive of earlier values, by their numbers; or a constant."""

    op: str
    inputs: tuple[int, ...] = ()
    number: float = 0.0


@dataclass(frozen=True)
class Formula:
    """A list of steps, in which each step follows the steps that it reads. `outputs`: name -> number of the step."""

    steps: tuple[Step, ...]
    outputs: Mapping[str, int]

    def compute(self, names: Sequence[str], scores: Array, targets: Array) -> list[Array]:
        """Compute some outputs in NumPy, in the dtype of the scores: (N, C), or (N, 1) for values of an image."""
        dtype = scores.dtype
        given = {SCORES: scores, TARGETS: targets.astype(dtype), CLASSES: np.full((1, 1), scores.shape[1], dtype)}
        values: list[Array] = []
        with np.errstate(all="ignore"):  # ignores errors in branches that `where` does not take
            for op, inputs, number in self.steps:
                if op == NUMBER:
                    values.append(np.full((1, 1), number, dtype))
                elif op in given:
                    values.append(given[op])
                else:
                    values.append(_PRIMITIVES[op].numpy(*(values[each] for each in inputs)).astype(dtype, copy=False))
        rows, classes = (len(scores), 1), scores.shape
        is_row = _rows(self.steps)
        return [np.broadcast_to(values[at], rows if is_row[at] else classes)
                for at in map(self.outputs.__getitem__, names)]

    def cuda(self) -> str:
        """The struct Formula of kernels/custom_loss.cuh, as CUDA C++."""
        return _Writer(self).text()


# --- primitives ---

NUMBER, CLASSES = "number", "classes"  # NUMBER: a constant; CLASSES: the number of classes
_LEAVES = (SCORES, TARGETS, NUMBER, CLASSES)
_REDUCTIONS = ("sum", "max")


class _Primitive(NamedTuple):
    """`gradient` gets the builder, the gradient of the value, the value and its inputs, and returns the gradients of
    the inputs; None: no gradient.
    """

    numpy: Callable[..., Array]
    cuda: str
    gradient: Callable[..., Sequence[int | None]]


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def _compared(compare: Callable[[Array, Array], Array], sign: str) -> _Primitive:
    return _Primitive(compare, f"float({{0}} {sign} {{1}})", lambda b, g, y, one, other: (None, None))


# At points where a function has a corner, the gradient is MXNet's.
_PRIMITIVES: dict[str, _Primitive] = {
    "exp": _Primitive(np.exp, "expf({0})", lambda b, g, y, x: [b.mul(g, y)]),
    "expm1": _Primitive(np.expm1, "expm1f({0})", lambda b, g, y, x: [b.mul(g, b.add(y, b.number(1)))]),
    "log": _Primitive(np.log, "logf({0})", lambda b, g, y, x: [b.div(g, x)]),
    "log1p": _Primitive(np.log1p, "log1pf({0})", lambda b, g, y, x: [b.div(g, b.add(x, b.number(1)))]),
    "sqrt": _Primitive(np.sqrt, "sqrtf({0})", lambda b, g, y, x: [b.div(b.mul(g, b.number(0.5)), y)]),
    "abs": _Primitive(np.abs, "fabsf({0})", lambda b, g, y, x: [b.mul(g, b.make("sign", x))]),
    "sign": _Primitive(np.sign, "float(({0} > 0) - ({0} < 0))", lambda b, g, y, x: [None]),
    "sigmoid": _Primitive(_sigmoid, "1 / (1 + expf(-{0}))",
                          lambda b, g, y, x: [b.mul(g, b.mul(y, b.sub(b.number(1), y)))]),
    "tanh": _Primitive(np.tanh, "tanhf({0})", lambda b, g, y, x: [b.mul(g, b.sub(b.number(1), b.mul(y, y)))]),
    "relu": _Primitive(lambda x: np.maximum(x, 0), "fmaxf({0}, 0.f)",
                       lambda b, g, y, x: [b.mul(g, b.make("greater", y, b.number(0)))]),
    # log(1 + exp(x))
    "softrelu": _Primitive(lambda x: np.logaddexp(0, x), "fmaxf({0}, 0.f) + log1pf(expf(-fabsf({0})))",
                           lambda b, g, y, x: [b.mul(g, b.make("sigmoid", x))]),
    "stop": _Primitive(lambda x: x, "{0}", lambda b, g, y, x: [None]),
    "add": _Primitive(np.add, "{0} + {1}", lambda b, g, y, one, other: [g, g]),
    "sub": _Primitive(np.subtract, "{0} - {1}", lambda b, g, y, one, other: [g, b.neg(g)]),
    "mul": _Primitive(np.multiply, "{0} * {1}", lambda b, g, y, one, other: [b.mul(g, other), b.mul(g, one)]),
    "div": _Primitive(np.divide, "{0} / {1}",
                      lambda b, g, y, one, other: [b.div(g, other), b.neg(b.div(b.mul(g, y), other))]),
    "power": _Primitive(np.power, "powf({0}, {1})", lambda b, g, y, one, other: [
        b.mul(g, b.mul(other, b.power(one, b.sub(other, b.number(1))))), b.mul(g, b.mul(y, b.make("log", one)))]),
    "maximum": _Primitive(np.maximum, "fmaxf({0}, {1})", lambda b, g, y, one, other: [
        b.mul(g, b.make("greater_equal", one, other)), b.mul(g, b.make("lesser", one, other))]),
    "minimum": _Primitive(np.minimum, "fminf({0}, {1})", lambda b, g, y, one, other: [
        b.mul(g, b.make("lesser_equal", one, other)), b.mul(g, b.make("greater", one, other))]),
    "equal": _compared(np.equal, "=="),
    "not_equal": _compared(np.not_equal, "!="),
    "greater": _compared(np.greater, ">"),
    "greater_equal": _compared(np.greater_equal, ">="),
    "lesser": _compared(np.less, "<"),
    "lesser_equal": _compared(np.less_equal, "<="),
    "where": _Primitive(lambda c, one, other: np.where(c != 0, one, other), "{0} != 0 ? {1} : {2}",
                        lambda b, g, y, c, one, other: [None, b.make("where", c, g, b.number(0)),
                                                        b.make("where", c, b.number(0), g)]),
    # Reductions over the classes of an image.
    "sum": _Primitive(lambda x: x.sum(axis=1, keepdims=True, dtype=x.dtype), "", lambda b, g, y, x: [g]),
    "max": _Primitive(lambda x: x.max(axis=1, keepdims=True), "",
                      lambda b, g, y, x: [b.mul(g, b.make("equal", x, y))]),
}


def _rows(steps: Sequence[Step]) -> list[bool]:
    """For each step, whether the value belongs to an image, rather than to a class."""
    found: list[bool] = []
    for step in steps:
        found.append(_is_row(step.op, [found[each] for each in step.inputs]))
    return found


def _is_row(op: str, are_rows: Sequence[bool]) -> bool:
    return op in _REDUCTIONS or (op not in (SCORES, TARGETS) and all(are_rows))


class _Builder:
    """Builds a list of steps. Equal steps are made once; products with 0 and 1 are simplified away."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._is_row: list[bool] = []
        self._known: dict[Step, int] = {}

    def make(self, op: str, *inputs: int, number: float = 0.0) -> int:
        """Make a step, unless it exists, and return its number."""
        if inputs and op not in _REDUCTIONS and all(self.steps[each].op == NUMBER for each in inputs):
            return self.number(float(_PRIMITIVES[op].numpy(*(np.float64(self.steps[each].number) for each in inputs))))
        step = Step(op, inputs, number)
        if step not in self._known:
            self._known[step] = len(self.steps)
            self.steps.append(step)
            self._is_row.append(_is_row(op, [self._is_row[each] for each in inputs]))
        return self._known[step]

    def number(self, value: float) -> int:
        return self.make(NUMBER, number=float(value))

    def is_number(self, at: int, value: float) -> bool:
        return self.steps[at] == Step(NUMBER, (), value)

    def add(self, one: int, other: int) -> int:
        if self.is_number(one, 0):
            return other
        return one if self.is_number(other, 0) else self.make("add", one, other)

    def sub(self, one: int, other: int) -> int:
        return one if self.is_number(other, 0) else self.make("sub", one, other)

    def mul(self, one: int, other: int) -> int:
        if self.is_number(one, 1):
            return other
        return one if self.is_number(other, 1) else self.make("mul", one, other)

    def div(self, one: int, other: int) -> int:
        return one if self.is_number(other, 1) else self.make("div", one, other)

    def neg(self, x: int) -> int:
        return self.mul(x, self.number(-1))

    def power(self, one: int, other: int) -> int:
        if self.is_number(other, 1):
            return one
        return self.mul(one, one) if self.is_number(other, 2) else self.make("power", one, other)

    def sum(self, x: int) -> int:
        """The sum over the classes. A value of an image counts once for each class."""
        return self.mul(x, self.make(CLASSES)) if self._is_row[x] else self.make("sum", x)

    def max(self, x: int) -> int:
        return x if self._is_row[x] else self.make("max", x)

    def mean(self, x: int) -> int:
        return x if self._is_row[x] else self.div(self.sum(x), self.make(CLASSES))

    def log_softmax(self, x: int) -> int:
        shifted = self.sub(x, self.make("stop", self.max(x)))  # the shift changes no result, so it needs no gradient
        return self.sub(shifted, self.make("log", self.sum(self.make("exp", shifted))))

    def softmax(self, x: int) -> int:
        e = self.make("exp", self.sub(x, self.make("stop", self.max(x))))
        return self.div(e, self.sum(e))

    def gradient(self, loss: int, of: int) -> int | None:
        """The gradient of a value of an image with regard to the value `of`; None if the loss does not depend on it."""
        gradients: dict[int, int] = {loss: self.number(1)}
        for at in range(loss, -1, -1):
            op, inputs, _ = self.steps[at]
            if at not in gradients or op in _LEAVES:
                continue
            for each, term in zip(inputs, _PRIMITIVES[op].gradient(self, gradients[at], at, *inputs), strict=True):
                if term is None or self.steps[each].op == NUMBER:
                    continue
                if self._is_row[each] and not self._is_row[at]:  # the value was broadcast
                    term = self.sum(term)
                gradients[each] = self.add(gradients[each], term) if each in gradients else term
        return gradients.get(of)


# --- reading a Symbol ---

_CLASSES_SHAPE = ("N", "C")
Shape = tuple[Any, ...]  # ("N", "C"), ("N", 1) or ("N",)


class _Value(NamedTuple):
    at: int
    shape: Shape


class _Node(NamedTuple):
    """An operator of the Symbol."""

    op: str
    name: str
    attrs: Mapping[str, str]

    def fault(self, sentence: str) -> GraphError:
        return GraphError(f"has the operator {self.op} ({self.name}), which {sentence}")

    def has(self, name: str, *allowed: str) -> bool:
        """Whether an attribute has one of these values, or is not given."""
        return self.attrs.get(name, allowed[0]) in allowed


Read = Callable[[_Builder, _Node, Sequence[_Value]], _Value]


def _unary(op: str, b: _Builder, node: _Node, given: Sequence[_Value]) -> _Value:
    (x,) = given
    return _Value(b.make(op, x.at), x.shape)


def _of_two(op: str, broadcasts: bool, b: _Builder, node: _Node, given: Sequence[_Value]) -> _Value:
    one, other = given
    fits = len(one.shape) == len(other.shape) if broadcasts else one.shape == other.shape
    if not fits:
        raise node.fault(f"gets {_shown(one.shape)} and {_shown(other.shape)}: give equal shapes, or use broadcast_... "
                         "with (N, 1), which keepdims=True leaves")
    return _Value(_called(b, op, one.at, other.at), max(one.shape, other.shape, key=lambda shape: shape[-1] == "C"))


def _with_number(op: str, is_first: bool, b: _Builder, node: _Node, given: Sequence[_Value]) -> _Value:
    (x,), number = given, b.number(float(node.attrs["scalar"]))
    return _Value(_called(b, op, *((number, x.at) if is_first else (x.at, number))), x.shape)


def _called(b: _Builder, op: str, *inputs: int) -> int:
    """Make a step. If the builder has a method for this operator, which simplifies, the method is used."""
    return getattr(b, op, partial(b.make, op))(*inputs)


def _reduction(op: str, b: _Builder, node: _Node, given: Sequence[_Value]) -> _Value:
    (x,) = given
    if not node.has("axis", "()", "1", "-1", "(1,)", "(-1,)", "[1]", "[-1]") or node.attrs.get("axis") is None or (
            len(x.shape) == 1 or not node.has("exclude", "False", "0")):
        raise node.fault(f"has axis={node.attrs.get('axis', 'all')} on the shape {_shown(x.shape)}, which would mix "
                         "the images of a batch: give axis=1, on the shape (N, C)")
    keeps = node.attrs.get("keepdims") in ("True", "1")
    at = x.at if x.shape[1] == 1 else getattr(b, op)(x.at)
    return _Value(at, ("N", 1) if keeps else ("N",))


def _softmax(op: str, b: _Builder, node: _Node, given: Sequence[_Value]) -> _Value:
    if (len(given) != 1 or given[0].shape != _CLASSES_SHAPE or not node.has("axis", "-1", "1")
            or not node.has("temperature", "None", "1", "1.0")):
        raise node.fault("needs one input of the shape (N, C): give axis=1, and no length or temperature")
    return _Value(getattr(b, op)(given[0].at), given[0].shape)


def _activation(b: _Builder, node: _Node, given: Sequence[_Value]) -> _Value:
    kind = node.attrs["act_type"]
    if kind not in ("relu", "sigmoid", "tanh", "softrelu"):
        raise node.fault(f"has act_type={kind}: use relu, sigmoid, tanh or softrelu")
    return _unary(kind, b, node, given)


def _clip(b: _Builder, node: _Node, given: Sequence[_Value]) -> _Value:
    (x,) = given
    low, high = (b.number(float(node.attrs[name])) for name in ("a_min", "a_max"))
    return _Value(b.make("minimum", b.make("maximum", x.at, low), high), x.shape)


def _where(b: _Builder, node: _Node, given: Sequence[_Value]) -> _Value:
    if len({value.shape for value in given}) > 1:
        raise node.fault(f"gets {', '.join(_shown(value.shape) for value in given)}: give equal shapes")
    return _Value(b.make("where", *(value.at for value in given)), given[0].shape)


def _constant(number: float, b: _Builder, node: _Node, given: Sequence[_Value]) -> _Value:
    return _Value(b.number(number), given[0].shape)


def _same(b: _Builder, node: _Node, given: Sequence[_Value]) -> _Value:
    return given[0]


def _expand(b: _Builder, node: _Node, given: Sequence[_Value]) -> _Value:
    if given[0].shape != ("N",) or not node.has("axis", "1", "-1"):
        raise node.fault(f"has axis={node.attrs.get('axis')} on the shape {_shown(given[0].shape)}: "
                         "give axis=1, on the shape (N,)")
    return _Value(given[0].at, ("N", 1))


def _square(b: _Builder, node: _Node, given: Sequence[_Value]) -> _Value:
    return _Value(b.mul(given[0].at, given[0].at), given[0].shape)


def _inverse(b: _Builder, node: _Node, given: Sequence[_Value]) -> _Value:
    return _Value(b.div(b.number(1), given[0].at), given[0].shape)


_TWO = {"add": "add", "sub": "sub", "mul": "mul", "div": "div", "maximum": "maximum", "minimum": "minimum",
        "power": "power", "equal": "equal", "not_equal": "not_equal", "greater": "greater",
        "greater_equal": "greater_equal", "lesser": "lesser", "lesser_equal": "lesser_equal"}
_SCALAR = {"_plus_scalar": "add", "_minus_scalar": "sub", "_mul_scalar": "mul", "_div_scalar": "div",
           **{f"_{op}_scalar": op for op in _TWO if op not in ("add", "sub", "mul", "div")}}
_READ: dict[str, Read] = {
    **{op: partial(_unary, op) for op in ("exp", "expm1", "log", "log1p", "sqrt", "abs", "sign", "sigmoid", "tanh",
                                          "relu")},
    **{f"elemwise_{op}": partial(_of_two, op, False) for op in ("add", "sub", "mul", "div")},
    **{f"_{op}": partial(_of_two, op, False) for op in _TWO},
    **{f"broadcast_{op}": partial(_of_two, op, True) for op in _TWO},
    **{name: partial(_with_number, op, False) for name, op in _SCALAR.items()},
    **{name: partial(_with_number, op, True) for name, op in (
        ("_rminus_scalar", "sub"), ("_rdiv_scalar", "div"), ("_rpower_scalar", "power"))},
    **{op: partial(_reduction, op) for op in ("sum", "max", "mean")},
    **{op: partial(_softmax, op) for op in ("softmax", "log_softmax")},
    "negative": lambda b, node, given: _Value(b.neg(given[0].at), given[0].shape),
    "square": _square, "reciprocal": _inverse, "Activation": _activation, "clip": _clip, "where": _where,
    "BlockGrad": partial(_unary, "stop"), "_copy": _same, "expand_dims": _expand,
    "ones_like": partial(_constant, 1.0), "zeros_like": partial(_constant, 0.0),
}


def known_operators() -> list[str]:
    """The operators that a loss may contain, under MXNet's names."""
    return sorted({name for name in _READ if not name.startswith("_")} | {"maximum", "minimum"})


def _shown(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"


@lru_cache(maxsize=64)
def read(symbol: str, probabilities: str) -> Formula:
    """The formula of a Symbol's JSON: its outputs loss (N, 1), gradient and probabilities (N, C).

    Raises GraphError, whose sentence follows the name of the loss, for an operator that is not known, shapes that do
    not fit, and a Symbol that is not a loss of scores and targets for each image.
    """
    content = json.loads(symbol)
    b, values = _Builder(), list[_Value]()
    scores, targets = b.make(SCORES), b.make(TARGETS)
    variables = {SCORES: scores, TARGETS: targets}
    for each in content["nodes"]:
        node = _Node(each["op"], each["name"], each.get("attrs", {}))
        if node.op == "null":
            if node.name not in variables:
                raise GraphError(f"reads {node.name}: a loss reads scores and targets alone")
            values.append(_Value(variables[node.name], _CLASSES_SHAPE))
        elif node.op not in _READ:
            raise node.fault(f"no loss can have here: make it of {', '.join(known_operators())}")
        else:
            values.append(_READ[node.op](b, node, [values[number] for number, *_ in each["inputs"]]))
    if len(content["heads"]) != 1:
        raise GraphError(f"returns {len(content['heads'])} tensors: return one, a loss for each image")
    loss = values[content["heads"][0][0]]
    if loss.shape[-1] == "C":
        raise GraphError("returns (N, C): return a loss for each image, such as the sum over axis=1")
    for name in variables:
        if name not in [each["name"] for each in content["nodes"]]:
            raise GraphError(f"does not read the {name}: let the loss depend on scores and targets")
    gradient = b.gradient(loss.at, scores)
    if gradient is None:
        raise GraphError("has no gradient with regard to the scores, so nothing could be learned")
    outputs = {"loss": loss.at, "gradient": gradient,
               "probabilities": b.softmax(scores) if probabilities == "softmax" else b.make("sigmoid", scores)}
    return _needed(b.steps, outputs)


def _needed(steps: Sequence[Step], outputs: Mapping[str, int]) -> Formula:
    """The formula without the steps that no output needs."""
    needed = set(outputs.values())
    for at in range(len(steps) - 1, -1, -1):
        if at in needed:
            needed |= set(steps[at].inputs)
    numbers = {old: new for new, old in enumerate(sorted(needed))}
    kept = tuple(step._replace(inputs=tuple(numbers[each] for each in step.inputs))
                 for at, step in enumerate(steps) if at in needed)
    return Formula(kept, {name: numbers[at] for name, at in outputs.items()})


# --- CUDA C++ ---


class _Writer:
    """Writes a formula for a block that has one image. Values of the image are members of the struct, computed by all
    threads alike; reductions that depend on no other reduction of their kind share a loop over the classes, in which
    the values of a class are computed anew."""

    def __init__(self, formula: Formula) -> None:
        self.steps, self.outputs = formula.steps, formula.outputs
        self.is_row = _rows(formula.steps)
        self.levels: list[int] = []  # number of loops before each value
        for step in self.steps:
            before = max((self.levels[each] for each in step.inputs), default=0)
            self.levels.append(before + (step.op in _REDUCTIONS))

    def text(self) -> str:
        members = ", ".join(f"v{at}" for at in self._row_steps())
        body = [*self._of_rows(0)]
        for level in range(1, max(self.levels) + 1):
            reduced = [at for at, step in enumerate(self.steps) if step.op in _REDUCTIONS and self.levels[at] == level]
            body += self._loop(reduced) + self._of_rows(level)
        lines = "\n".join(f"        {line}" for line in body)
        return "\n".join([
            "template <class Elements> struct Formula {",
            f"    float {members};" if members else "",
            "    __device__ Formula(const Elements &elements, int classes) {",
            lines,
            "    }",
            f"    __device__ float loss() const {{ return {self._name(self.outputs['loss'])}; }}",
            *self._of_a_class("gradient"), *self._of_a_class("probabilities"),
            "};", "",
        ])

    def _row_steps(self) -> list[int]:
        return [at for at, step in enumerate(self.steps) if self.is_row[at] and step.op != NUMBER]

    def _of_rows(self, level: int) -> list[str]:
        """Code for the values of the image that are known after `level` loops, without reductions."""
        return [f"v{at} = {self._expression(at)};" for at in self._row_steps()
                if self.levels[at] == level and self.steps[at].op not in _REDUCTIONS]

    def _loop(self, reduced: Sequence[int]) -> list[str]:
        """Code of a loop that computes sums and maxima over the classes."""
        start = {at: "-INF" if self.steps[at].op == "max" else "0.f" for at in reduced}
        lines = [f"v{at} = {start[at]};" for at in reduced]
        lines += ["for (int c = threadIdx.x; c < classes; c += blockDim.x) {",
                  "    const auto element = elements(c);"]
        lines += [f"    {line}" for line in self._of_elements([self.steps[at].inputs[0] for at in reduced])]
        for at in reduced:
            term = self._name(self.steps[at].inputs[0])
            lines.append(f"    v{at} = fmaxf(v{at}, {term});" if start[at] == "-INF" else f"    v{at} += {term};")
        lines.append("}")
        return lines + [f"v{at} = block_reduce(v{at}, {start[at]}, {'Max' if start[at] == '-INF' else 'Sum'}());"
                        for at in reduced]

    def _of_a_class(self, output: str) -> list[str]:
        """Code of a function that returns an output of one class."""
        return [f"    template <class Element> __device__ float {output}(const Element &element) const {{",
                *(f"        {line}" for line in self._of_elements([self.outputs[output]])),
                f"        return {self._name(self.outputs[output])};", "    }"]

    def _of_elements(self, wanted: Sequence[int]) -> list[str]:
        """Code for the values of one class on which some values depend, in order."""
        needed = {at for at in wanted if not self.is_row[at]}
        for at in range(max(needed, default=-1), -1, -1):
            if at in needed:
                needed |= {each for each in self.steps[at].inputs if not self.is_row[each]}
        return [f"const float v{at} = {self._expression(at)};" for at in sorted(needed)]

    def _expression(self, at: int) -> str:
        op, inputs, _ = self.steps[at]
        if op in (SCORES, TARGETS):
            return f"element.{op.removesuffix('s')}"
        return "classes" if op == CLASSES else _PRIMITIVES[op].cuda.format(*map(self._name, inputs))

    def _name(self, at: int) -> str:
        step = self.steps[at]
        if step.op != NUMBER:
            return f"v{at}"
        number = float(np.float32(step.number))
        return f"({number.hex()}f)" if np.isfinite(number) else f"({'-' * (number < 0)}INF)"
