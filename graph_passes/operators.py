"""The one table of the operators that passes and executors know: inputs, outputs, attributes and shapes.

Names, attributes and defaults are MXNet's (`help(mx.sym.Convolution)`). The fused operators are ours, under the names
that NVIDIA's MXNet gave them where it had them. Operators that are not listed pass through every pass untouched.

BatchNorm and the operators fused from it have three outputs: the result, and the mean and (biased) variance with which
the data was normalised, as MXNet's own has.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from graph_passes.errors import GraphError

if TYPE_CHECKING:
    from graph_passes.graph import Node, Ref

Shape = tuple[int, ...]
Shapes = Sequence[Shape]
_REQUIRED = object()


class Attribute(NamedTuple):
    """How an attribute is read (from text or a value) and what holds where a node does not give it."""

    read: Callable[[Any], Any]
    default: Any = _REQUIRED


@dataclass(frozen=True)
class Operator:
    """One row of the table. `infer` completes the input shapes (None: unknown) and gives the output shapes."""

    name: str
    inputs: tuple[str, ...]
    infer: Callable[[Node, list[Shape | None]], tuple[Shapes, Shapes]]
    attrs: Mapping[str, Attribute] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("output",)
    optional_input: tuple[str, str] | None = None  # (input, attribute): left out where the attribute is true
    aux: tuple[str, ...] = ()  # inputs that the operator updates in training

    def default(self, attribute: str) -> Any:
        return self.attrs[attribute].default

    def parse(self, name: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes as values; GraphError names the node for one that is missing or makes no sense."""
        values: dict[str, Any] = {}
        for key, value in attrs.items():
            if key not in self.attrs:
                values[key] = value  # hints such as `workspace` and `__ctx_group__`: kept, never read
                continue
            try:
                values[key] = self.attrs[key].read(value)
            except (ValueError, SyntaxError, TypeError):
                raise GraphError(f"{self.name} '{name}' has {key}={value!r}, which is no valid value for it") from None
        for key, attribute in self.attrs.items():
            if attribute.default is _REQUIRED and key not in values:
                raise GraphError(f"{self.name} '{name}' lacks the attribute '{key}': add it")
        return values

    def input_names(self, node: Node) -> tuple[str, ...]:
        """Names of the inputs that this node has, in order."""
        if self.optional_input and node[self.optional_input[1]]:
            return tuple(name for name in self.inputs if name != self.optional_input[0])
        return self.inputs

    def aux_inputs(self, node: Node) -> tuple[Ref, ...]:
        """What this node reads as running statistics."""
        return tuple(ref for name, ref in zip(self.inputs, node.inputs, strict=False) if name in self.aux)


class Window(NamedTuple):
    """The two spatial dimensions of a convolution or pooling: (height, width) each; `pad` on both sides."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]
    dilate: tuple[int, int]


def window(node: Node) -> Window:
    """Window of a Convolution or Pooling, with MXNet's defaults: stride and dilation 1, no padding."""
    kernel = node["kernel"]
    if len(kernel) != 2:
        raise GraphError(f"{node.op} '{node.name}' has kernel={kernel}: only two spatial dimensions are supported")
    dilate = node["dilate"] if node.op == "Convolution" else ()
    return Window(kernel, node["stride"] or (1, 1), node["pad"] or (0, 0), dilate or (1, 1))


def output_size(node: Node, size: Shape) -> Shape:
    """Height and width after a convolution or pooling of images of height and width `size`."""
    if node.op == "Pooling" and node["global_pool"]:
        return (1, 1)
    if node.op == "Pooling" and node["pooling_convention"] == "same":
        raise GraphError(f"Pooling '{node.name}' has pooling_convention='same': supported are 'valid' and 'full'")
    kernel, stride, pad, dilate = window(node)
    round_up = node.op == "Pooling" and node["pooling_convention"] == "full"
    result = []
    for s, k, st, p, d in zip(size, kernel, stride, pad, dilate, strict=True):
        span = s + 2 * p - (d * (k - 1) + 1)
        if span < 0:
            raise GraphError(
                f"{node.op} '{node.name}': its kernel {kernel} is larger than its padded {size[0]}x{size[1]} input: "
                "use larger images"
            )
        result.append((math.ceil(span / st) if round_up else span // st) + 1)
    return tuple(result)


BATCH_NORMS = ("BatchNorm", "BatchNormRelu", "BatchNormAddRelu")


def channel_axis(layout: str) -> int:
    """1 for NCHW, 3 for NHWC."""
    return layout.index("C")


def is_relu(node: Node) -> bool:
    """Gluon and Symbol write a ReLU as Activation, `mx.sym.relu` as an operator of its own."""
    return node.op == "relu" or (node.op == "Activation" and node["act_type"] == "relu")


def infer_node_shapes(node: Node, inputs: list[Shape | None]) -> tuple[Shapes, Shapes]:
    """Complete the shapes of a node's inputs and give those of its outputs. Raises GraphError, naming the node."""
    operator = OPERATORS.get(node.op)
    if operator is None:
        raise GraphError(f"operator {node.op} of node '{node.name}' has no shape rule in graph_passes/operators.py")
    names = operator.input_names(node)
    if len(inputs) != len(names):
        raise GraphError(f"{node.op} '{node.name}' has {len(inputs)} inputs, it needs {len(names)}: {', '.join(names)}")
    return operator.infer(node, inputs)


# --- reading attributes ---


def _boolean(value: Any) -> bool:
    if str(value).lower() not in ("true", "false", "1", "0"):
        raise ValueError(value)
    return str(value).lower() in ("true", "1")


def _integers(value: Any) -> tuple[int, ...]:
    items = ast.literal_eval(value.replace("L", "")) if isinstance(value, str) else value  # Python 2 wrote (3L, 3L)
    return (int(items),) if isinstance(items, int) else tuple(int(item) for item in items or ())


def _layout(value: Any) -> str:
    """Only two spatial dimensions are supported, so None means NCHW."""
    text = "NCHW" if str(value) == "None" else str(value)
    if text not in ("NCHW", "NHWC"):
        raise ValueError(value)
    return text


def _one_of(*values: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in values:
            raise ValueError(value)
        return str(value)

    return read


# --- shapes ---


def _known(node: Node, shapes: list[Shape | None], index: int = 0) -> Shape:
    shape = shapes[index]
    if shape is None:
        source = node.inputs[index].node
        raise GraphError(f"the shape of '{source}', read by {node.op} '{node.name}', is not known: give it")
    return shape


def _image_batch(node: Node, shapes: list[Shape | None]) -> Shape:
    shape = _known(node, shapes)
    if len(shape) != 4:
        raise GraphError(f"{node.op} '{node.name}' needs a batch of images (4 dimensions), not the shape {shape}")
    return shape


def _convolution(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data, layout, filters, groups = _image_batch(node, shapes), node["layout"], node["num_filter"], node["num_group"]
    axis = channel_axis(layout)
    channels, kernel = data[axis], window(node).kernel
    if channels % groups or filters % groups:
        raise GraphError(
            f"Convolution '{node.name}': {channels} channels and {filters} filters do not divide into {groups} groups"
        )
    height, width = output_size(node, data[2:] if layout == "NCHW" else data[1:3])
    weight = (filters, channels // groups, *kernel) if layout == "NCHW" else (filters, *kernel, channels // groups)
    output = (data[0], filters, height, width) if layout == "NCHW" else (data[0], height, width, filters)
    return [data, weight] if node["no_bias"] else [data, weight, (filters,)], [output]


def _pooling(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data, layout = _image_batch(node, shapes), node["layout"]
    size = data[2:] if layout == "NCHW" else data[1:3]
    height, width = output_size(node, size)
    channels = data[channel_axis(layout)]
    return [data], [(data[0], channels, height, width) if layout == "NCHW" else (data[0], height, width, channels)]


def _batch_norm(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = _known(node, shapes)
    if not -len(data) <= node["axis"] < len(data):
        raise GraphError(f"{node.op} '{node.name}' has axis={node['axis']}, but its input has the shape {data}")
    channels = (data[node["axis"]],)
    addend = [data] if node.op == "BatchNormAddRelu" else []
    return [data, channels, channels, channels, channels, *addend], [data, channels, channels]


def _elementwise(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    known = next((shape for shape in shapes if shape is not None), None) or _known(node, shapes)
    return [known] * len(shapes), [known]


def _fully_connected(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data, hidden = _known(node, shapes), node["num_hidden"]
    flat = (data[0], math.prod(data[1:])) if node["flatten"] else data
    weight = (hidden, flat[-1])
    return [data, weight] if node["no_bias"] else [data, weight, (hidden,)], [(*flat[:-1], hidden)]


def _flatten(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = _known(node, shapes)
    return [data], [(data[0], math.prod(data[1:]))]


def _transpose(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = _known(node, shapes)
    axes = node["axes"] or tuple(reversed(range(len(data))))
    if sorted(axes) != list(range(len(data))):
        raise GraphError(f"transpose '{node.name}' has axes={axes}, but its input has the shape {data}")
    return [data], [tuple(data[axis] for axis in axes)]


def _softmax_output(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = _known(node, shapes)
    if len(data) != 2:
        raise GraphError(f"SoftmaxOutput '{node.name}' needs scores of shape (batch, classes), not {data}")
    return [data, data[:1]], [data]


# --- the table ---

_LAYOUT = Attribute(_layout, "NCHW")
_FALSE, TRUE = Attribute(_boolean, False), Attribute(_boolean, True)
_OPTIONAL_SIZES = Attribute(_integers, ())

_BATCH_NORM_INPUTS = ("data", "gamma", "beta", "moving_mean", "moving_var")
_BATCH_NORM: dict[str, Any] = {
    "infer": _batch_norm,
    "outputs": ("output", "mean", "var"),
    "aux": ("moving_mean", "moving_var"),
    "attrs": {
        "eps": Attribute(float, 1e-3),
        "momentum": Attribute(float, 0.9),
        "fix_gamma": TRUE,  # gamma counts as 1 and gets no gradient
        "use_global_stats": _FALSE,
        "axis": Attribute(int, 1),
    },
}

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator(
            "Convolution",
            ("data", "weight", "bias"),
            _convolution,
            {
                "kernel": Attribute(_integers),
                "num_filter": Attribute(int),
                "stride": _OPTIONAL_SIZES,
                "pad": _OPTIONAL_SIZES,
                "dilate": _OPTIONAL_SIZES,
                "num_group": Attribute(int, 1),
                "no_bias": _FALSE,
                "layout": _LAYOUT,
            },
            optional_input=("bias", "no_bias"),
        ),
        Operator("BatchNorm", _BATCH_NORM_INPUTS, **_BATCH_NORM),
        Operator("BatchNormRelu", _BATCH_NORM_INPUTS, **_BATCH_NORM),
        Operator("BatchNormAddRelu", (*_BATCH_NORM_INPUTS, "addend"), **_BATCH_NORM),
        Operator("AddRelu", ("lhs", "rhs"), _elementwise),
        Operator("elemwise_add", ("lhs", "rhs"), _elementwise),
        Operator("relu", ("data",), _elementwise),
        Operator(
            "Activation",
            ("data",),
            _elementwise,
            {"act_type": Attribute(_one_of("relu", "sigmoid", "tanh", "softrelu", "softsign", "log_sigmoid", "mish"))},
        ),
        Operator(
            "Pooling",
            ("data",),
            _pooling,
            {
                "kernel": _OPTIONAL_SIZES,
                "stride": _OPTIONAL_SIZES,
                "pad": _OPTIONAL_SIZES,
                "pool_type": Attribute(_one_of("max", "avg", "sum", "lp"), "max"),
                "global_pool": _FALSE,
                "pooling_convention": Attribute(_one_of("valid", "full", "same"), "valid"),
                "count_include_pad": TRUE,
                "layout": _LAYOUT,
            },
        ),
        Operator(
            "FullyConnected",
            ("data", "weight", "bias"),
            _fully_connected,
            {"num_hidden": Attribute(int), "no_bias": _FALSE, "flatten": TRUE},
            optional_input=("bias", "no_bias"),
        ),
        Operator("Flatten", ("data",), _flatten),
        Operator("transpose", ("data",), _transpose, {"axes": _OPTIONAL_SIZES}),
        Operator("softmax", ("data",), _elementwise, {"axis": Attribute(int, -1)}),
        Operator(
            "SoftmaxOutput",
            ("data", "label"),
            _softmax_output,
            {
                "grad_scale": Attribute(float, 1.0),
                "normalization": Attribute(_one_of("null", "batch", "valid"), "null"),
                "smooth_alpha": Attribute(float, 0.0),
                "use_ignore": _FALSE,
                "multi_output": _FALSE,
            },
        ),
    )
}
