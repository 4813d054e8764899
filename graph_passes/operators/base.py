"""The description of an operator, and helpers that the descriptions of all families share.

An `Operator` describes one operator completely: inputs, outputs, attributes, shapes, gradient, and its computation in
NumPy. Each module of this package has one family of operators; `operators/__init__.py` is the table of all operators.

Names, attributes and defaults of MXNet's operators are MXNet's (`help(mx.sym.Convolution)`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from graph_passes.errors import GraphError

Array = np.ndarray
Shape = tuple[int, ...]
Shapes = Sequence[Shape]
REQUIRED = object()


class Ref(NamedTuple):
    """One output of a node: the name of the node and the number of the output."""

    node: str
    output: int = 0


class NodeView(Protocol):
    """The view of a graph's node (`graph.Node`) that an operator's functions get."""

    @property
    def op(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[Ref, ...]: ...
    @property
    def attrs(self) -> Mapping[str, Any]: ...
    def __getitem__(self, attribute: str) -> Any: ...
    def get(self, attribute: str, default: Any = None) -> Any: ...
    def replace(self, **changes: Any) -> Any: ...
    def derive(self, op: str, name: str, inputs: Sequence[Ref], **attrs: Any) -> Any: ...


class Gradient(NamedTuple):
    """The backward pass of one node: the nodes that it adds, and the gradients of its inputs by name."""

    nodes: Sequence[Any]
    of_inputs: Mapping[str, Ref]


Infer = Callable[[Any, "list[Shape | None]"], "tuple[Shapes, Shapes]"]
Compute = Callable[..., Sequence[Array]]  # (node, *inputs) -> outputs
GradientRule = Callable[[Any, Ref, Mapping[Ref, Shape]], Gradient]  # (node, gradient of its output, shapes)
NumpyGradient = Callable[[Any, Sequence[Array], Sequence[Array], Array, bool], "list[Array | None]"]


class Attribute(NamedTuple):
    """How an attribute is parsed (from text or a value), and its default."""

    read: Callable[[Any], Any]
    default: Any = REQUIRED


def by_body(node: Any, *given: Any) -> Any:
    """A marker in place of `infer` and `compute`, which are then derived from the body."""
    raise NotImplementedError


@dataclass(frozen=True)
class Operator:
    """The description of one operator.

    `infer` completes the input shapes (None: unknown) and returns the output shapes. `compute` returns the outputs, in
    the dtype of the inputs. `gradient` writes the backward pass into the graph. `numpy_gradient` computes the gradient
    for the oracle, which has no graph of the backward pass: (node, inputs, outputs, gradient of the first output,
    training) -> gradients of the inputs, or None. `body` expresses the operator in primitives (`body.py`); an operator
    without a body is a primitive. An operator with a body does not need `infer` and `compute`.
    """

    name: str
    inputs: tuple[str, ...]
    infer: Infer = by_body
    compute: Compute = by_body
    attrs: Mapping[str, Attribute] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("output",)
    # Input or output -> an attribute, or a function of the node. The input or output is absent if this is true.
    optional: Mapping[str, str | Callable[[Any], bool]] = field(default_factory=dict)
    aux: tuple[str, ...] = ()  # inputs that the operator updates in training
    # Outputs that may overwrite an input, the preferred input first: element i of the output depends on that input only
    # through its element i and through sums that are complete before the first element is written.
    in_place: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gradient: GradientRule | None = None
    numpy_gradient: NumpyGradient | None = None
    # The operator that replaces this operator in a training step. It also outputs the tensors that the gradient needs.
    training: Callable[[Any], str] | None = None
    fused: bool = False  # a fused operator of ours: shown in another colour
    body: Callable[[Any], Sequence[Any]] | None = None
    # Name of an operator that computes the same outputs from the same inputs, with a plainer kernel or a kernel for all
    # devices.
    form_of: str = ""
    plain: bool = False  # the memory check's step, which is otherwise unfused, uses this fusion
    forward: str = ""  # the name that users know: Convolution for ConvolutionWgrad

    def default(self, attribute: str) -> Any:
        return self.attrs[attribute].default

    def parse(self, name: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes as values. Raises GraphError, naming the node, for a missing or invalid attribute."""
        values: dict[str, Any] = {}
        for key, value in attrs.items():
            if key not in self.attrs:
                values[key] = value  # hints such as `workspace` and `__ctx_group__`: kept but never read
                continue
            try:
                values[key] = self.attrs[key].read(value)
            except (ValueError, SyntaxError, TypeError):
                raise GraphError(f"{self.name} '{name}' has {key}={value!r}, which is not a valid value for it"
                                 ) from None
        for key, attribute in self.attrs.items():
            if attribute.default is REQUIRED and key not in values:
                raise GraphError(f"{self.name} '{name}' lacks the attribute '{key}': add it")
        return values

    def input_names(self, node: NodeView) -> tuple[str, ...]:
        """Names of the inputs that this node has, in order."""
        return self._present(node, self.inputs)

    def output_names(self, node: NodeView) -> tuple[str, ...]:
        """Names of the outputs that this node has, in order."""
        return self._present(node, self.outputs)

    def _present(self, node: NodeView, names: tuple[str, ...]) -> tuple[str, ...]:
        if not self.optional:
            return names
        return tuple(name for name in names if name not in self.optional or not self._is_absent(node, name))

    def _is_absent(self, node: NodeView, name: str) -> bool:
        absent = self.optional[name]
        return bool(node[absent] if isinstance(absent, str) else absent(node))

    def aux_inputs(self, node: NodeView) -> tuple[Ref, ...]:
        """The inputs of this node that are running statistics."""
        if not self.aux:
            return ()
        return tuple(ref for name, ref in zip(self.inputs, node.inputs, strict=False) if name in self.aux)


# --- reading attributes ---


def boolean(value: Any) -> bool:
    if str(value).lower() not in ("true", "false", "1", "0"):
        raise ValueError(value)
    return str(value).lower() in ("true", "1")


@lru_cache(maxsize=1024)  # a network has few different kernels, strides, ... in thousands of attributes
def _literal(text: str) -> Any:
    return ast.literal_eval(text)


def integers(value: Any) -> tuple[int, ...]:
    items = _literal(value.replace("L", "")) if isinstance(value, str) else value  # Python 2 wrote (3L, 3L)
    return (int(items),) if isinstance(items, int) else tuple(int(item) for item in items or ())


def numbers(value: Any) -> tuple[float, ...]:
    return tuple(map(float, _literal(value) if isinstance(value, str) else value))


def number(value: Any) -> int | float:
    """Parse a number. An integer stays an integer, so that it is written in the form in which it was read."""
    return int(value) if str(value).lstrip("-").isdecimal() else float(value)


def one_of(*values: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in values:
            raise ValueError(value)
        return str(value)

    return read


FALSE, TRUE = Attribute(boolean, False), Attribute(boolean, True)
OPTIONAL_SIZES = Attribute(integers, ())
# shape of the forward operator's data, which the gradient's shape does not determine
DATA_SHAPE = {"data_shape": Attribute(integers)}
# A tensor may have two gradients: `out_grad_2` is added to `out_grad` while it is read, unless `single_grad` is set.
# With a `grad_stride` the second gradient is compact (passes/compact_grad.py): of NHWC images it has only the pixels
# whose row and column are multiples of that stride, and is 0 elsewhere.
SINGLE_GRAD = {"single_grad": TRUE}
SECOND_GRAD = {"out_grad_2": "single_grad"}
# With a `grad_stride` the second gradient is compact (passes/compact_grad.py): of images in NHWC it has the pixels
# whose row and column are multiples of that stride, and is 0 elsewhere.
GRAD_STRIDE = {"grad_stride": OPTIONAL_SIZES}


# --- shapes ---


def known(node: NodeView, shapes: Sequence[Shape | None], index: int = 0) -> Shape:
    """The shape of an input. Raises GraphError if it is not known."""
    shape = shapes[index]
    if shape is None:
        source = node.inputs[index].node
        raise GraphError(f"the shape of '{source}', read by {node.op} '{node.name}', is not known: give it")
    return shape


def image_batch(node: NodeView, shape: Shape) -> Shape:
    """Return the shape. Raises GraphError unless it has four dimensions."""
    if len(shape) != 4:
        raise GraphError(f"{node.op} '{node.name}' needs a batch of images (4 dimensions), not the shape {shape}")
    return shape


def channel_axis(layout: str) -> int:
    """1 for NCHW, 3 for NHWC."""
    return layout.index("C")


def compact_shape(data: Shape, stride: Sequence[int]) -> Shape:
    """The shape with only the pixels whose row and column are multiples of the stride."""
    images, *size, channels = data
    kept = (-(-pixels // step) for pixels, step in zip(size, stride, strict=True))
    return (images, *kept, channels)


# --- NumPy ---


def with_all_pixels(node: NodeView, compact: Array, shape: Shape) -> Array:
    """The gradient with all pixels. The argument is compact if the node has a `grad_stride`."""
    if not node["grad_stride"]:
        return compact
    rows, columns = node["grad_stride"]
    full = np.zeros(shape, compact.dtype)
    full[:, ::rows, ::columns] = compact
    return full


def total(dy: Array, dy2: Array | None) -> Array:
    """The sum of one or two gradients."""
    return dy if dy2 is None else dy + dy2


def sum_over_others(x: Array, axis: int) -> Array:
    """The sum over all dimensions but `axis`: the gradient of a bias along `axis`."""
    return x.sum(axis=tuple(i for i in range(x.ndim) if i != axis % x.ndim))


def channel_sums(x: Array, axis: int) -> Array:
    """(2, C): sum and sum of squares over all dimensions but `axis`. In float64, because a variance is their
    difference."""
    x = x.astype(np.float64)
    return np.stack([sum_over_others(x, axis), sum_over_others(x * x, axis)])


def sums_about_mean(x: Array, axis: int) -> Array:
    """(3, C): over all dimensions but `axis`, the sum of x - mean (which is 0), the sum of its square, and the mean. A
    variance computed from these loses no digits if the mean is far above the deviation."""
    x = np.moveaxis(x, axis, -1).astype(np.float64)
    mean = x.mean(axis=tuple(range(x.ndim - 1)))
    return np.stack([np.zeros_like(mean), ((x - mean) ** 2).sum(axis=tuple(range(x.ndim - 1))), mean])


def along_axis(channels: Array, axis: int, ndim: int) -> Array:
    """(C,) reshaped to broadcast along the axis of a tensor with `ndim` dimensions."""
    return channels.reshape(-1, *(1,) * (ndim - 1 - axis % ndim))
