"""Convolution and its gradients, and cuDNN's fusions with it: BatchNorm's sums; bias, addition and ReLU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

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
)
from graph_passes.operators.body import Body
from graph_passes.operators.windows import LAYOUT, Places, as_layout, nhwc, output_size, window

# --- shapes ---


def convolution_shapes(node: NodeView, data: Shape) -> tuple[Shape, Shape]:
    """Shapes of weight and output, from the data's shape."""
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
    return [data, weight], [output, (2, node["num_filter"])]


def stem_pooled_shape(shape: Shape) -> Shape:
    """The output shape of `stem_pooled`."""
    images, height, width, channels = shape
    return images, (height + 1) // 2, (width + 1) // 2, channels


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


def _compute_with_statistics(node: NodeView, x: Array, weight: Array) -> tuple[Array, Array]:
    y = convolution(node, x, weight)
    return y, channel_sums(y, channel_axis(node["layout"]))


def stem_pooled(y: Array, least: float) -> Array:
    """Maxima of 3x3 windows with stride 2 and padding 1, in NHWC; no element of y is smaller than `least`."""
    padded = np.pad(y, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=least)
    rows = [padded[:, i:i + y.shape[1]:2] for i in range(3)]
    maxima: Array = np.max([row[:, :, j:j + y.shape[2]:2] for row in rows for j in range(3)], axis=0)
    return maxima


def _numpy_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                    training: bool) -> list[Array | None]:
    x, weight, *bias = inputs
    dbias = [sum_over_others(dy, channel_axis(node["layout"]))] if bias else []
    return [convolution_dgrad(node, dy, weight, x.shape), convolution_wgrad(node, dy, x), *dbias]


# --- the gradient in the graph ---


def weighted_gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    """The backward pass of a Convolution or FullyConnected. The weight's gradient comes before the data's gradient. The
    memory of the forward pass's data is then free earlier, and so is the bucket full earlier.
    """
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


def convolution_body(b: Body, relu: bool) -> list[Any]:
    """The body of a convolution with the node's bias and addend."""
    return [b.epilogue(b.conv(b["data"], b["weight"]), relu)]


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

OPERATORS = (
    Operator(
        "Convolution",
        ("data", "weight", "bias"),
        _convolution,
        lambda node, *inputs: [convolution(node, *inputs)],
        CONVOLUTION,
        optional={"bias": "no_bias"},
        gradient=weighted_gradient,
        numpy_gradient=_numpy_gradient,
        body=partial(convolution_body, relu=False),
        plain=True,
    ),
    Operator(
        "ConvolutionWgrad",
        ("out_grad", "data"),
        attrs=CONVOLUTION,
        outputs=("weight_grad",),
        forward="Convolution",
        body=lambda b: [b.wgrad(b["out_grad"], b["data"])],
    ),
    Operator(
        "ConvolutionDgrad",
        ("out_grad", "weight"),
        attrs=CONVOLUTION | DATA_SHAPE,
        outputs=("data_grad",),
        forward="Convolution",
        body=lambda b: [b.dgrad(b["out_grad"], b["weight"])],
    ),
    # For a Convolution or FullyConnected: the sum of dy over all dimensions but `axis`.
    Operator(
        "BiasGrad",
        ("out_grad",),
        _bias_grad,
        lambda node, dy: [sum_over_others(dy, node["axis"])],
        {"axis": Attribute(int)},
        ("bias_grad",),
    ),
    # With the sums of cuDNN's genstats: of x and of x * x.
    Operator(
        "ConvolutionStatistics",
        ("data", "weight"),
        _with_statistics,
        _compute_with_statistics,
        CONVOLUTION,
        ("output", "sums"),
        forward="Convolution",
        fused=True,
        body=lambda b: b.with_sums(b.conv(b["data"], b["weight"])),
    ),
    Operator(
        "ConvolutionRelu",
        ("data", "weight", "bias"),
        attrs=CONVOLUTION,
        forward="Convolution",
        fused=True,
        body=partial(convolution_body, relu=True),
    ),
    Operator(
        "ConvolutionAddRelu",
        ("data", "weight", "bias", "addend"),
        attrs=CONVOLUTION,
        forward="Convolution",
        fused=True,
        body=partial(convolution_body, relu=True),
    ),
)
