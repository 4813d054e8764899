"""Convolution and its gradients; what is fused with it: BatchNorm's sums; bias, sum and ReLU; the stem's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.operators.base import (
    DATA_SHAPE,
    FALSE,
    OPTIONAL_SIZES,
    Array,
    Attribute,
    Gradient,
    NodeView,
    Operator,
    Ref,
    Shape,
    Shapes,
    channel_axis,
    channel_sums,
    image_batch,
    integers,
    known,
    sum_over_others,
    sums_about_mean,
)
from graph_passes.operators.elementwise import relu
from graph_passes.operators.windows import LAYOUT, Places, as_layout, nhwc, output_size, window

# --- shapes ---


def convolution_shapes(node: NodeView, data: Shape) -> tuple[Shape, Shape]:
    """Shapes of weight and output, from that of the data."""
    image_batch(node, data)
    layout, filters, groups = node["layout"], node["num_filter"], node["num_group"]
    channels, kernel = data[channel_axis(layout)], window(node).kernel
    if channels % groups or filters % groups:
        raise GraphError(
            f"Convolution '{node.name}': {channels} channels and {filters} filters do not divide into {groups} groups"
        )
    height, width = output_size(node, data[2:] if layout == "NCHW" else data[1:3])
    weight = (filters, channels // groups, *kernel) if layout == "NCHW" else (filters, *kernel, channels // groups)
    return weight, (data[0], filters, height, width) if layout == "NCHW" else (data[0], height, width, filters)


def _convolution(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    weight, output = convolution_shapes(node, data)
    return [data, weight] if node["no_bias"] else [data, weight, (node["num_filter"],)], [output]


def _with_statistics(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    weight, output = convolution_shapes(node, data)
    return [data, weight], [output, (2 if _is_by_cudnn(node) else 3, node["num_filter"])]


def _is_by_cudnn(node: NodeView) -> bool:
    """Whether the sums are those of cuDNN's genstats, of x and x * x; those of our own kernels are about the mean."""
    return node.op == "ConvolutionStatistics"


def _with_epilogue(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    weight, output = convolution_shapes(node, data)
    return [data, weight, (node["num_filter"],), *[output] * (len(shapes) - 3)], [output]


def _stem_pool(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    weight, output = convolution_shapes(node, data)
    return [data, weight, (node["num_filter"],)], [stem_pooled_shape(output)]


def stem_pooled_shape(shape: Shape) -> Shape:
    """Of `stem_pooled`."""
    images, height, width, channels = shape
    return images, (height + 1) // 2, (width + 1) // 2, channels


def _pair(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    weight, output = convolution_shapes(node, data)
    second = _second(node)
    weight_2, output_2 = convolution_shapes(second, output)
    return ([data, weight, (node["num_filter"],), output, weight_2, (second["num_filter"],)], [output, output_2])


def _second(node: NodeView) -> NodeView:
    """The second convolution of a pair, as a node of its own."""
    second: NodeView = node.derive("ConvolutionRelu", node.name, (), num_filter=node["num_filter_2"])
    return second


def _sum(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data, data_2 = known(node, shapes), known(node, shapes, 3)
    weight, output = convolution_shapes(node, data)
    data_2 = (*output[:3], data_2[-1])
    weight_2, _ = convolution_shapes(_beside(node), data_2)
    bias = (node["num_filter"],)
    return [data, weight, bias, data_2, weight_2, bias], [output]


def _beside(node: NodeView) -> NodeView:
    """The second convolution of a sum, which reads what has the size of the output, as a node of its own."""
    second: NodeView = node.derive("Convolution", node.name, (), stride=(1, 1))
    return second


def _wgrad(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes, 1)
    weight, output = convolution_shapes(node, data)
    return [output, data], [weight]


def _dgrad(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    weight, output = convolution_shapes(node, node["data_shape"])
    return [output, weight], [node["data_shape"]]


def _bias_grad(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    dy = known(node, shapes)
    return [dy], [(dy[node["axis"]],)]


# --- NumPy: one matrix product for each place in the kernel ---


def convolution(node: NodeView, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Cross-correlation of x (N, H, W, C) with weight (K, KH, KW, C / groups), or of NCHW with KCHW."""
    places = Places(node, x.shape)
    x, weight = places.padded(nhwc(node, x)), _grouped(node, weight)
    y = sum(
        np.einsum("nhwgc,goc->nhwgo", _grouped_channels(node, x[region]), weight[:, :, row, column], optimize=True)
        for (row, column), region in places
    )
    y = np.asarray(y).reshape(*places.output_size, node["num_filter"])
    return as_layout(node, y if bias is None else y + bias)


def convolution_dgrad(node: NodeView, dy: Array, weight: Array, data_shape: Shape) -> Array:
    """Gradient of a convolution's data."""
    places = Places(node, data_shape)
    dy, weight = _grouped_channels(node, nhwc(node, dy)), _grouped(node, weight)
    dx = places.empty_padded(dy.dtype)
    for (row, column), region in places:
        part = np.einsum("nhwgo,goc->nhwgc", dy, weight[:, :, row, column], optimize=True)
        dx[region] += part.reshape(dx[region].shape)
    return as_layout(node, places.unpadded(dx))


def convolution_wgrad(node: NodeView, dy: Array, x: Array) -> Array:
    """Gradient of a convolution's weight."""
    places = Places(node, x.shape)
    groups, filters, (height, width) = node["num_group"], node["num_filter"], window(node).kernel
    x, dy = places.padded(nhwc(node, x)), _grouped_channels(node, nhwc(node, dy))
    dw = np.empty((groups, filters // groups, height, width, x.shape[3] // groups), x.dtype)
    for (row, column), region in places:
        patch = _grouped_channels(node, x[region])
        dw[:, :, row, column] = np.einsum("nhwgo,nhwgc->goc", dy, patch, optimize=True)
    return as_layout(node, dw.reshape(filters, height, width, -1))


def _grouped(node: NodeView, weight: Array) -> Array:
    """A weight as (groups, filters / groups, KH, KW, C / groups)."""
    weight = nhwc(node, weight)
    return weight.reshape(node["num_group"], -1, *weight.shape[1:])


def _grouped_channels(node: NodeView, x: Array) -> Array:
    """Images as (N, H, W, groups, C / groups)."""
    return x.reshape(*x.shape[:3], node["num_group"], -1)


def convolution_with_sums(node: NodeView, x: Array, weight: Array) -> tuple[Array, Array]:
    """The convolution, and the sums of its output for a BatchNorm."""
    y = convolution(node, x, weight)
    sums = channel_sums if _is_by_cudnn(node) else sums_about_mean
    return y, sums(y, channel_axis(node["layout"]))


def _compute_stem_pool(node: NodeView, x: Array, weight: Array, bias: Array) -> list[Array]:
    return [stem_pooled(relu(convolution(node, x, weight, bias)), -np.inf)]


def stem_pooled(y: Array, least: float) -> Array:
    """Maxima over 3x3 with stride 2 and padding 1, in NHWC; nothing in y is smaller than `least`."""
    padded = np.pad(y, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=least)
    rows = [padded[:, i:i + y.shape[1]:2] for i in range(3)]
    maxima: Array = np.max([row[:, :, j:j + y.shape[2]:2] for row in rows for j in range(3)], axis=0)
    return maxima


def _compute_pair(node: NodeView, x: Array, weight: Array, bias: Array, addend: Array, weight_2: Array,
                  bias_2: Array) -> list[Array]:
    y = relu(convolution(node, x, weight, bias) + addend).astype(addend.dtype)
    return [y, relu(convolution(_second(node), y, weight_2, bias_2))]


def _compute_sum(node: NodeView, x: Array, weight: Array, bias: Array, x_2: Array, weight_2: Array,
                 bias_2: Array) -> list[Array]:
    return [relu(convolution(node, x, weight, bias) + convolution(_beside(node), x_2, weight_2, bias_2))]


def _numpy_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                    training: bool) -> list[Array | None]:
    x, weight, *bias = inputs
    dbias = [sum_over_others(dy, channel_axis(node["layout"]))] if bias else []
    return [convolution_dgrad(node, dy, weight, x.shape), convolution_wgrad(node, dy, x), *dbias]


# --- the gradient in the graph ---


def weighted_gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    """Of a Convolution or a FullyConnected. The weight's gradient comes before the data's: the data of the forward pass
    is free then, and the bucket is full earlier."""
    data, weight, *bias = node.inputs
    wgrad = node.derive(f"{node.op}Wgrad", f"{node.name}_wgrad", (dy, data))
    dgrad = node.derive(f"{node.op}Dgrad", f"{node.name}_dgrad", (dy, weight), data_shape=shapes[data])
    nodes, gradients = [wgrad, dgrad], {"weight": Ref(wgrad.name), "data": Ref(dgrad.name)}
    if bias:
        axis = channel_axis(node["layout"]) if node.op == "Convolution" else -1
        nodes.append(node.replace(op="BiasGrad", name=f"{node.name}_bias_grad", inputs=(dy,), attrs={"axis": axis}))
        gradients["bias"] = Ref(nodes[-1].name)
    return Gradient(nodes, gradients)


# --- the descriptions ---

CONVOLUTION = {
    "kernel": Attribute(integers),
    "num_filter": Attribute(int),
    "stride": OPTIONAL_SIZES,
    "pad": OPTIONAL_SIZES,
    "dilate": OPTIONAL_SIZES,
    "num_group": Attribute(int, 1),
    "no_bias": FALSE,
    "layout": LAYOUT,
}

_DESCRIBED = (
    Operator(
        "Convolution",
        ("data", "weight", "bias"),
        _convolution,
        lambda node, *inputs: [convolution(node, *inputs)],
        CONVOLUTION,
        optional={"bias": "no_bias"},
        gradient=weighted_gradient,
        numpy_gradient=_numpy_gradient,
    ),
    Operator(
        "ConvolutionWgrad",
        ("out_grad", "data"),
        _wgrad,
        lambda node, dy, x: [convolution_wgrad(node, dy, x)],
        CONVOLUTION,
        ("weight_grad",),
        forward="Convolution",
    ),
    Operator(
        "ConvolutionDgrad",
        ("out_grad", "weight"),
        _dgrad,
        lambda node, dy, weight: [convolution_dgrad(node, dy, weight, node["data_shape"])],
        CONVOLUTION | DATA_SHAPE,
        ("data_grad",),
        forward="Convolution",
    ),
    # Of a Convolution or a FullyConnected: the sum of dy over all dimensions but `axis`.
    Operator(
        "BiasGrad",
        ("out_grad",),
        _bias_grad,
        lambda node, dy: [sum_over_others(dy, node["axis"])],
        {"axis": Attribute(int)},
        ("bias_grad",),
    ),
    Operator(
        "ConvolutionStatistics",
        ("data", "weight"),
        _with_statistics,
        convolution_with_sums,
        CONVOLUTION,
        ("output", "sums"),
        forward="Convolution",
        fused=True,
    ),
    # ResNet's first convolution in 16-bit types: the pass `stem` says which it is. `way`: by which kernel a device
    # computes it.
    Operator(
        "StemConvolution",
        ("data", "weight"),
        _with_statistics,
        convolution_with_sums,
        CONVOLUTION | {"way": Attribute(str, "stem_fprop")},
        ("output", "sums"),
        forward="Convolution",
        fused=True,
    ),
    # In inference the same with bias, ReLU, and max pooling over 3x3 with stride 2 and padding 1, in NHWC.
    Operator(
        "StemPool",
        ("data", "weight", "bias"),
        _stem_pool,
        _compute_stem_pool,
        CONVOLUTION,
        forward="Convolution",
        fused=True,
    ),
    Operator(
        "ConvolutionRelu",
        ("data", "weight", "bias"),
        _with_epilogue,
        lambda node, *inputs: [relu(convolution(node, *inputs))],
        CONVOLUTION,
        forward="Convolution",
        fused=True,
    ),
    Operator(
        "ConvolutionAddRelu",
        ("data", "weight", "bias", "addend"),
        _with_epilogue,
        lambda node, x, weight, bias, addend: [relu(convolution(node, x, weight, bias) + addend)],
        CONVOLUTION,
        forward="Convolution",
        fused=True,
    ),
)

# By kernels of our own: 1x1 convolutions (conv1x1_forward.cu, conv1x1_statistics.cu), and 3x3 (conv3x3.cu over 64
# channels, and for weights conv3x3_weights.cu). Each computes what its namesake does.
_OWN = {
    "Conv1x1": ("Convolution", "ConvolutionRelu", "ConvolutionAddRelu", "ConvolutionStatistics"),
    "Conv3x3": ("ConvolutionRelu", "ConvolutionStatistics", "ConvolutionDgrad", "ConvolutionWgrad"),
}

# Conv1x1Pair is Conv1x1AddRelu and the Conv1x1Relu that reads its output (conv1x1_pair.cu).
# Conv1x1SumRelu is Conv1x1AddRelu with stride 1, of `data_2`, and the Conv1x1 that it adds.
OPERATORS = (*_DESCRIBED, Operator(
    "Conv1x1Pair",
    ("data", "weight", "bias", "addend", "weight_2", "bias_2"),
    _pair,
    _compute_pair,
    {**CONVOLUTION, "num_filter_2": Attribute(int)},
    ("output", "output_2"),
    forward="Convolution",
    fused=True,
), Operator(
    "Conv1x1SumRelu",
    ("data", "weight", "bias", "data_2", "weight_2", "bias_2"),
    _sum,
    _compute_sum,
    CONVOLUTION,
    forward="Convolution",
    fused=True,
), *(
    dataclasses.replace(operator, name=operator.name.replace("Convolution", kind), gradient=None, numpy_gradient=None,
                        forward="Convolution", fused=True)
    for kind, names in _OWN.items() for operator in _DESCRIBED if operator.name in names
))
