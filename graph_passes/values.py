"""Value numbering: tensors that are the same expression of the variables have the same number, whatever is fused.

    number(graph)    # each tensor by its Ref -> its number in a table of expressions

A fused operator is expanded into primitives, which is its body: ConvolutionAddRelu is relu(add(bias(conv))). The bodies
say what `compute` of the operators does (`operators/`); tests hold both together. Sums of a batch that BatchNorm reads
have one number in both of their forms (`operators/batch_norm_halves.py`), as who reads them takes either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import OPERATORS, is_relu, output_size, window

# How something is computed or stored, not what.
_HOW = ("algorithm", "dtype", "no_output", "part_of", "way", "workspace")


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
        """The number of an expression. A sum is the same in either order."""
        ordered = tuple(sorted(inputs)) if op == "add" else inputs
        expression = Expression(op, ordered, tuple(attrs), output)
        if expression not in self._numbers:
            self._numbers[expression] = len(self._expressions)
            self._expressions.append(expression)
        return self._numbers[expression]

    def __getitem__(self, number: int) -> Expression:
        return self._expressions[number]

    def outputs(self, node: Node, inputs: Sequence[int]) -> list[int]:
        """The numbers of what a node gives, from those of what it reads."""
        if node.is_variable:
            return [self("variable", attrs=(node.name,))]
        found = list(_BODIES.get(node.op, _primitive)(_Body(self, node, inputs)))
        hidden = range(len(found), node.num_outputs)  # MXNet's, of which no description knows: a workspace of Pooling
        return found + [self("hidden", *inputs, attrs=(node.op, node.name), output=index) for index in hidden]


def number(graph: Graph, values: Values | None = None) -> dict[Ref, int]:
    """Of all tensors of a graph; of several graphs alike in one table `values`."""
    values, found = values or Values(), dict[Ref, int]()
    for node in graph:
        numbers = values.outputs(node, [found[ref] for ref in node.inputs])
        found.update(zip(node.refs(), numbers, strict=True))
    return found


class _Body:
    """What a body is written with: the inputs of a node by their roles, and a method for each primitive."""

    def __init__(self, values: Values, node: Node, inputs: Sequence[int]) -> None:
        self.values, self.node, self.inputs = values, node, tuple(inputs)
        roles = OPERATORS[node.op].input_names(node) if node.op in OPERATORS else ()
        self._by_role = dict(zip(roles, inputs, strict=False))

    def __getitem__(self, role: str) -> int:
        return self._by_role[role]

    def has(self, role: str) -> bool:
        return role in self._by_role

    def all(self, *roles: str) -> list[int]:
        return [self._by_role[role] for role in roles]

    # --- single elements ---

    def relu(self, x: int) -> int:
        return self.values("relu", x)

    def add(self, one: int, other: int) -> int:
        return self.values("add", one, other)

    def mask(self, x: int) -> int:
        """Where x is above 0, which is where its ReLU is."""
        kind = self.values[x]
        return self.values("mask", kind.inputs[0] if kind.op == "relu" else x)

    def gate(self, gradient: int, mask: int) -> int:
        """A gradient where a ReLU let it through."""
        return self.values("gate", gradient, mask)

    def dropped(self, x: int) -> int:
        """x with some images dropped, where the node has factors for them."""
        return self.values("drop", x, self["factors"], attrs=(self.node["row"],)) if self.has("factors") else x

    def total(self, first: int) -> int:
        """The sum of the gradients that the node adds."""
        if not self.has("out_grad_2"):
            return first
        second, stride = self["out_grad_2"], self.node.get("grad_stride")
        return self.add(first, self.values("scatter", second, attrs=stride) if stride else second)

    # --- convolutions ---

    def conv(self, data: int, weight: int, **changes: Any) -> int:
        return self.values("conv", data, weight, attrs=_geometry(self.node, **changes))

    def bias(self, data: int, bias: int) -> int:
        return self.values("bias", data, bias)

    def dgrad(self, gradient: int, weight: int) -> int:
        """A strided 1x1 convolution leaves pixels out: its gradient is that of what it reads, and 0 elsewhere."""
        node, shape = self.node, self.node["data_shape"]
        kernel, stride, pad, _ = window(node)
        if kernel != (1, 1) or pad != (0, 0) or stride == (1, 1) or node["layout"] != "NHWC":
            return self.values("dgrad", gradient, weight, attrs=(*_geometry(node), shape))
        read = (shape[0], *output_size(node, shape[1:3]), shape[3])
        inner = self.values("dgrad", gradient, weight, attrs=(*_geometry(node, stride=(1, 1)), read))
        return self.values("scatter", inner, attrs=stride)

    def wgrad(self, gradient: int, data: int) -> int:
        return self.values("wgrad", gradient, data, attrs=_geometry(self.node))

    # --- BatchNorm in training ---

    @property
    def _norm(self) -> tuple[Any, ...]:
        return self.node["eps"], self.node["fix_gamma"], self.node["axis"] % 4

    def sums(self, x: int) -> int:
        return self.values("sums", x)

    def statistics(self, suffix: str = "") -> list[int]:
        """What the gradient needs, and the running statistics."""
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

    def through_relu(self, gradient: int, suffix: str = "") -> int:
        """The gradient of what ReLU reads, made again of what the BatchNorm before it reads."""
        return self.gate(gradient, self.mask(self.normalised(self[f"saved{suffix}"], suffix)))

    # --- max pooling ---

    def pooled(self, x: int) -> list[int]:
        """The maxima, and where they are in their windows."""
        attrs = _pooling(self.node)
        return [self.values("max_pool", x, attrs=attrs, output=index) for index in (0, 1)]

    def unpooled(self, gradient: int, winner: int) -> int:
        """A gradient at the winners; where these are of a ReLU with its pooling, through that ReLU."""
        kind, of = self.values[winner], self.values[gradient]
        if kind.op != "winner_above_0":
            return self.values("unpool", gradient, winner)
        if of.op == "gate_at_winner" and of.inputs[1] == winner:
            gradient = of.inputs[0]
        return self.gate(self.values("unpool", gradient, kind.inputs[0]), self.mask(kind.inputs[1]))


def _geometry(node: Node, **changes: Any) -> tuple[Any, ...]:
    size = window(node)._asdict() | {name: node[name] for name in ("num_filter", "num_group", "layout")} | changes
    return tuple(size.values())


def _pooling(node: Node) -> tuple[Any, ...]:
    return (*window(node), node["layout"])


def _primitive(body: _Body) -> list[int]:
    """What has no body is a primitive itself."""
    node = body.node
    attrs = tuple(sorted((key, str(value)) for key, value in node.attrs.items() if key not in _HOW))
    return [body.values(node.op, *body.inputs, attrs=attrs, output=index) for index in range(node.num_outputs)]


# --- bodies: elements, networks before `gradient` ---


def _relu(b: _Body) -> list[int]:
    return [b.relu(b.inputs[0])] if is_relu(b.node) else _primitive(b)


def _relu_backward(b: _Body) -> list[int]:
    return [b.gate(b.total(b["out_grad"]), b.mask(b["output"]))]


def _whole_norm(b: _Body) -> list[int]:
    """BatchNorm, BatchNormRelu and BatchNormAddRelu, before they are split."""
    attrs = (*b._norm, b.node["momentum"], b.node["use_global_stats"])
    y, *others = (b.values("BatchNorm", *b.inputs[:5], attrs=attrs, output=index) for index in range(3))
    if b.node.op == "BatchNormAddRelu":
        y = b.add(b.dropped(y), b["addend"])
    return [y if b.node.op == "BatchNorm" else b.relu(y), *others]


# --- bodies: convolutions ---


def _convolution(b: _Body) -> list[int]:
    """With bias, sum and ReLU as the operator's name says."""
    y = b.conv(b["data"], b["weight"])
    y = b.bias(y, b["bias"]) if b.has("bias") else y
    return [_end(b, y)]


def _biased(b: _Body) -> list[int]:
    return [_end(b, b.bias(b["data"], b["bias"]))]


def _end(b: _Body, y: int) -> int:
    y = b.add(y, b["addend"]) if b.has("addend") else y
    return b.relu(y) if b.node.op.endswith("Relu") else y


def _with_sums(b: _Body) -> list[int]:
    y = b.conv(b["data"], b["weight"])
    return [y, b.sums(y)]


def _pair_of_convolutions(b: _Body) -> list[int]:
    y = b.relu(b.add(b.bias(b.conv(b["data"], b["weight"]), b["bias"]), b["addend"]))
    z = b.conv(y, b["weight_2"], num_filter=b.node["num_filter_2"])
    return [y, b.relu(b.bias(z, b["bias_2"]))]


def _sum_of_convolutions(b: _Body) -> list[int]:
    one = b.bias(b.conv(b["data"], b["weight"]), b["bias"])
    other = b.bias(b.conv(b["data_2"], b["weight_2"], stride=(1, 1)), b["bias_2"])
    return [b.relu(b.add(one, other))]


def _stem_pool(b: _Body) -> list[int]:
    y = b.relu(b.bias(b.conv(b["data"], b["weight"]), b["bias"]))
    return [b.values("max_of_3x3", y)]


def _max_pooling(b: _Body) -> list[int]:
    """That of the stem is a primitive of its own, which StemPool has too."""
    node = b.node
    is_stems = (node["pool_type"] == "max" and not node["global_pool"] and node["pooling_convention"] == "valid"
                and _pooling(node) == ((3, 3), (2, 2), (1, 1), (1, 1), "NHWC"))
    return [b.values("max_of_3x3", b.inputs[0])] if is_stems else _primitive(b)


# --- bodies: the halves of BatchNorms ---


def _apply(b: _Body) -> list[int]:
    statistics, op = b.statistics(), b.node.op
    z = b.dropped(b.normalised(statistics[0]))
    z = b.add(z, b["addend"]) if "Add" in op else z
    y = b.relu(z) if "Relu" in op else z
    return [y, *statistics, *([b.mask(z)] if "Add" in op else []), *_followed(b, y)]


def _pair_apply(b: _Body) -> list[int]:
    one, other = b.statistics(), b.statistics("_2")
    z = b.add(b.dropped(b.normalised(one[0])), b.normalised(other[0], "_2"))
    y = b.relu(z)
    return [y, *one, b.mask(z), *other, *_followed(b, y)]


def _followed(b: _Body, y: int) -> list[int]:
    """The convolution that reads a BatchNorm's output, and its sums, where the node has both."""
    if not b.has("weight"):
        return []
    convolved = b.conv(y, b["weight"])
    return [convolved, b.sums(convolved)]


def _reduce(b: _Body) -> list[int]:
    gradient, op = b.total(b["out_grad"]), b.node.op
    if op == "BatchNormReluBackwardReduce":
        gradient = b.through_relu(gradient)
    elif op == "BatchNormAddReluBackwardReduce":
        gradient = b.gate(gradient, b["mask"])
    kept = [gradient] * (b.node.num_outputs - 2)
    return [*b.norm_sums(b.dropped(gradient), b["data"], b["saved"]), *kept]


def _pair_reduce(b: _Body) -> list[int]:
    gradient = b.gate(b.total(b["out_grad"]), b["mask"])
    return [*b.norm_sums(b.dropped(gradient), *b.all("data", "saved")), gradient,
            *b.norm_sums(gradient, *b.all("data_2", "saved_2"))]


def _backward_apply(b: _Body) -> list[int]:
    relu = "Relu" in b.node.op
    dx = b.norm_grad(b.through_relu(b["out_grad"]) if relu else b.dropped(b["masked_grad"]))
    return [b.add(dx, b["addend"]) if b.has("addend") else dx]


def _pair_backward_apply(b: _Body) -> list[int]:
    return [b.norm_grad(b.dropped(b["masked_grad"])), b.norm_grad(b["masked_grad"], "_2")]


# --- bodies: BatchNorm with max pooling ---


def _max_pooling_train(b: _Body) -> list[int]:
    return b.pooled(b["data"])


def _max_pooling_backward(b: _Body) -> list[int]:
    return [b.unpooled(b.total(b["out_grad"]), b["winner"])]


def _pool_apply(b: _Body) -> list[int]:
    statistics = b.statistics()
    y = b.relu(b.normalised(statistics[0]))
    largest, winner = b.pooled(y)
    above_0 = b.values("winner_above_0", winner, y)
    return [largest, *statistics, above_0, b.values("data_at_winner", b["data"], winner)]


def _pool_reduce(b: _Body) -> list[int]:
    gradient, winner = b.total(b["out_grad"]), b["winner"]
    data = b.values[b["data_at_winner"]].inputs[0]
    kept = [] if b.node["single_grad"] else [b.values("gate_at_winner", gradient, winner)]
    return [*b.norm_sums(b.unpooled(gradient, winner), data, b["saved"]), *kept]


def _pool_backward_apply(b: _Body) -> list[int]:
    return [b.norm_grad(b.unpooled(b["out_grad"], b["winner"]))]


def _stem_wgrad(b: _Body) -> list[int]:
    (gradient,) = _pool_backward_apply(b)
    return [b.wgrad(gradient, b["image"])]


# --- bodies: the backward pass of convolutions ---


def _wgrad(b: _Body) -> list[int]:
    return [b.wgrad(b["out_grad"], b["data"])]


def _dgrad(b: _Body) -> list[int]:
    return [b.dgrad(b["out_grad"], b["weight"])]


def _dgrad_reduce(b: _Body) -> list[int]:
    gradient = b.gate(b.total(b.dgrad(b["conv_grad"], b["weight"])), b["mask"])
    sums = b.norm_sums(b.dropped(gradient), *b.all("data", "saved"))
    other = [] if b.node["single_norm"] else b.norm_sums(gradient, *b.all("data_2", "saved_2"))
    return [*sums, gradient, *other]


def _conv3x3_dgrad_reduce(b: _Body) -> list[int]:
    gradient = b.through_relu(b.dgrad(b["conv_grad"], b["weight"]))
    return [*b.norm_sums(gradient, *b.all("data", "saved")), gradient]


def _norm_conv(b: _Body) -> list[int]:
    """NormConvBackward, NormConvReduce and NormConvDgrad, by what each of them gives first."""
    gradient = b.dropped(b["masked_grad"])
    dy = b.norm_grad(b.through_relu(gradient) if b.has("beta") else gradient)
    dx = b.dgrad(dy, b["weight"])
    if b.node.op == "NormConvBackward":
        return [b.wgrad(dy, b["data_2"]), dx]
    y = b.relu(b.normalised(b["saved_2"], "_2"))
    dz = b.gate(dx, b.mask(y))
    first = dy if b.node.op == "NormConvDgrad" else b.wgrad(dy, y)
    return [first, dz, *b.norm_sums(dz, *b.all("data_2", "saved_2"))]


# --- bodies: recurrent layers ---


def _rnn_train(b: _Body) -> list[int]:
    """What lies in `reserve` depends on the algorithm, which the backward pass must share."""
    *others, reserve = _primitive(b)
    return [*others, b.values("reserve", reserve, attrs=(b.node["algorithm"],))]


def _rnn_backward(b: _Body) -> list[int]:
    kind = b.values[b["reserve"]]
    if kind.attrs != (b.node["algorithm"],):
        return _primitive(b)
    b.inputs = tuple(kind.inputs[0] if each == b["reserve"] else each for each in b.inputs)
    return _primitive(b)


# --- bodies: INT8 ---


class _Scales(NamedTuple):
    """How a convolution in INT8 ends: what its output and what it adds are in units of."""

    scale: float
    addend: float = 1.0
    relu: bool = True
    dtype: str = "int8"


def _quantised(b: _Body, suffix: str, data: int, scales: _Scales, addend: int | None = None, **changes: Any) -> int:
    """A convolution in INT8: the integer sums, rescaled; the sum; ReLU; saturation."""
    weight, multiplier, bias = b.all(*(f"{role}{suffix}" for role in ("weight", "multiplier", "bias")))
    y = b.values("rescaled", b.bias(b.conv(data, weight, **changes), bias), multiplier)
    if addend is not None:
        y = b.values("add_rescaled", y, addend, attrs=(scales.addend / scales.scale,))
    y = b.relu(y) if scales.relu else y
    return b.values("saturated", y) if scales.dtype == "int8" else y


def _quantised_convolution(b: _Body) -> list[int]:
    node = b.node
    scales = _Scales(node["scale"], node.get("addend_scale", 1.0), node["relu"], node["dtype"])
    y = _quantised(b, "", b["data"], scales, b["addend"] if b.has("addend") else None)
    return [b.values("max_of_3x3", y)] if node.op == "QuantisedStemPool" else [y]


def _quantised_sum(b: _Body, relu: bool) -> int:
    node = b.node
    shortcut = _quantised(b, "", b["data"], _Scales(node["addend_scale"], relu=False))
    last = _Scales(node["scale"], node["addend_scale"], relu)
    return _quantised(b, "_2", b["data_2"], last, shortcut, stride=(1, 1))


def _quantised_pair(b: _Body) -> list[int]:
    node, is_sum = b.node, b.has("data_2")
    scales = _Scales(node["scale"], node["addend_scale"])
    y = _quantised_sum(b, True) if is_sum else _quantised(b, "", b["data"], scales, b["addend"])
    z = _quantised(b, "_3" if is_sum else "_2", y, _Scales(node["scale_2"]), stride=(1, 1),
                   num_filter=node["num_filter_2"])
    return [y, z]


_BODIES: Mapping[str, Callable[[_Body], Sequence[int]]] = {
    "elemwise_add": lambda b: [b.add(*b.inputs)],
    "AddRelu": lambda b: [b.relu(b.add(*b.inputs))],
    "ReluBackward": _relu_backward,
    **dict.fromkeys(("relu", "Activation"), _relu),
    **dict.fromkeys(("BatchNorm", "BatchNormRelu", "BatchNormAddRelu"), _whole_norm),
    **dict.fromkeys(("Convolution", "ConvolutionRelu", "ConvolutionAddRelu", "Conv1x1", "Conv1x1Relu", "Conv1x1AddRelu",
                     "Conv3x3Relu"), _convolution),
    **dict.fromkeys(("BiasAdd", "BiasRelu", "BiasAddRelu"), _biased),
    **dict.fromkeys(("ConvolutionStatistics", "Conv1x1Statistics", "Conv3x3Statistics", "StemConvolution"), _with_sums),
    "Conv1x1Pair": _pair_of_convolutions,
    "Conv1x1SumRelu": _sum_of_convolutions,
    "StemPool": _stem_pool,
    **dict.fromkeys(("Pooling", "QuantisedPooling"), _max_pooling),
    "DropoutImages": lambda b: [b.dropped(b["data"])],
    "BatchNormStatistics": lambda b: [b.sums(b["data"])],
    **dict.fromkeys(("BatchNormApply", "BatchNormReluApply", "BatchNormAddReluApply", "BatchNormReluConv1x1",
                     "BatchNormReluConv3x3", "BatchNormAddReluConv1x1"), _apply),
    **dict.fromkeys(("BatchNormPairApply", "BatchNormPairConv1x1"), _pair_apply),
    **dict.fromkeys(("BatchNormBackwardReduce", "BatchNormReluBackwardReduce", "BatchNormAddReluBackwardReduce"),
                    _reduce),
    "BatchNormPairBackwardReduce": _pair_reduce,
    **dict.fromkeys(("BatchNormBackwardApply", "BatchNormReluBackwardApply", "BatchNormBackwardApplyAdd",
                     "BatchNormReluBackwardApplyAdd"), _backward_apply),
    "BatchNormPairBackwardApply": _pair_backward_apply,
    "MaxPoolingTrain": _max_pooling_train,
    "MaxPoolingBackward": _max_pooling_backward,
    "BatchNormPoolApply": _pool_apply,
    "BatchNormPoolBackwardReduce": _pool_reduce,
    "BatchNormPoolBackwardApply": _pool_backward_apply,
    "StemWgrad": _stem_wgrad,
    **dict.fromkeys(("ConvolutionWgrad", "Conv3x3Wgrad"), _wgrad),
    **dict.fromkeys(("ConvolutionDgrad", "Conv3x3Dgrad"), _dgrad),
    "DgradReduce": _dgrad_reduce,
    "Conv3x3DgradReduce": _conv3x3_dgrad_reduce,
    **dict.fromkeys(("NormConvBackward", "NormConvReduce", "NormConvDgrad"), _norm_conv),
    "RNNTrain": _rnn_train,
    "RNNBackward": _rnn_backward,
    **dict.fromkeys(("QuantisedConvolution", "QuantisedStemPool"), _quantised_convolution),
    "QuantisedConvolutionSum": lambda b: [_quantised_sum(b, b.node["relu"])],
    **dict.fromkeys(("QuantisedConvolutionPair", "QuantisedConvolutionSumPair"), _quantised_pair),
}
