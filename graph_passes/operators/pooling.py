"""Max and average pooling, and their gradients.

The training variant of max pooling keeps `winner`, the position in the window (row * width + column), in 1 byte per
output. Keeping its data and output instead would take 2 * stride^2 + 2 = 10 bytes in ResNet's stem, where no other
operator needs the pooling's data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.operators.base import (
    DATA_SHAPE,
    FALSE,
    OPTIONAL_SIZES,
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
    channel_axis,
    image_batch,
    known,
    one_of,
    total,
)
from graph_passes.operators.body import Body
from graph_passes.operators.windows import LAYOUT, Places, as_layout, nhwc, output_size, window

# --- shapes ---


def pooled_shape(node: NodeView, data: Shape) -> Shape:
    """Shape of the output, from the data's shape."""
    image_batch(node, data)
    layout = node["layout"]
    height, width = output_size(node, data[2:] if layout == "NCHW" else data[1:3])
    channels = data[channel_axis(layout)]
    return (data[0], channels, height, width) if layout == "NCHW" else (data[0], height, width, channels)


def _pooling(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    return [data], [pooled_shape(node, data)]


def _max_pooling_train(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    if math.prod(window(node).kernel) > 256:
        raise GraphError(f"Pooling '{node.name}' has kernel={node['kernel']}, but training stores the position of a "
                         "maximum in one byte: use a kernel of at most 256 elements")
    data = known(node, shapes)
    return [data], [pooled_shape(node, data)] * 2


def _backward(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    """Every input has the shape of the forward operator's output."""
    return [pooled_shape(node, node["data_shape"])] * len(shapes), [node["data_shape"]]


# --- NumPy ---


def max_pooling(node: NodeView, x: Array) -> tuple[Array, Array]:
    """The largest element of each window, and its position in the window, row * width + column (the first of
    several)."""
    places = Places(node, x.shape)
    x = places.padded(nhwc(node, x), fill=-np.inf)
    windows = np.stack([x[region] for _, region in places])
    winner = windows.argmax(axis=0)
    y = np.take_along_axis(windows, winner[None], axis=0)[0]
    return as_layout(node, y), as_layout(node, winner)


def max_pooling_backward(node: NodeView, dy: Array, winner: Array, data_shape: Shape) -> Array:
    """Each element of dy goes to the winner of its window."""
    places = Places(node, data_shape)
    dy, winner = nhwc(node, dy), nhwc(node, winner)
    dx = places.empty_padded(dy.dtype)
    for place, (_, region) in enumerate(places):
        dx[region] += np.where(winner == place, dy, 0)
    return as_layout(node, places.unpadded(dx))


def avg_pooling(node: NodeView, x: Array) -> Array:
    """Mean (or, for pool_type "sum", sum) of each window."""
    places = Places(node, x.shape)
    padded = places.padded(nhwc(node, x))
    sums = np.sum([padded[region] for _, region in places], axis=0)
    return as_layout(node, sums / places.divisor(node).astype(x.dtype))


def avg_pooling_backward(node: NodeView, dy: Array, data_shape: Shape) -> Array:
    places = Places(node, data_shape)
    share = nhwc(node, dy) / places.divisor(node).astype(dy.dtype)
    dx = places.empty_padded(dy.dtype)
    for _, region in places:
        dx[region] += share
    return as_layout(node, places.unpadded(dx))


def _compute(node: NodeView, x: Array) -> list[Array]:
    if node["pool_type"] == "lp":
        raise GraphError(f"Pooling '{node.name}' has pool_type='lp': the reference executor has max, avg and sum")
    return [max_pooling(node, x)[0] if node["pool_type"] == "max" else avg_pooling(node, x)]


def _max_pooling_with_winner(node: NodeView, x: Array) -> list[Array]:
    y, winner = max_pooling(node, x)
    return [y, winner.astype(np.uint8)]


def _numpy_gradient(node: NodeView, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array,
                    training: bool) -> list[Array | None]:
    (x,) = inputs
    if node["pool_type"] == "max":
        return [max_pooling_backward(node, dy, max_pooling(node, x)[1], x.shape)]
    return [avg_pooling_backward(node, dy, x.shape)]


# --- the gradient in the graph ---


def _gradient(node: NodeView, dy: Ref, shapes: Mapping[Ref, Shape]) -> Gradient:
    name, data_shape = f"{node.name}_backward", shapes[node.inputs[0]]
    if node["pool_type"] in ("avg", "sum"):
        backward = node.derive("AvgPoolingBackward", name, (dy,), data_shape=data_shape)
    elif node["pool_type"] == "max" and not node["global_pool"]:
        backward = node.derive("MaxPoolingBackward", name, (dy, Ref(node.name, 1)), data_shape=data_shape)
    else:
        kind = f"pool_type={node['pool_type']}, global_pool={node['global_pool']}"
        raise GraphError(f"Pooling '{node.name}' ({kind}) has no gradient here: use avg, or max over windows")
    return Gradient([backward], {"data": Ref(backward.name)})


# --- the descriptions ---

POOLING = {
    "kernel": OPTIONAL_SIZES,
    "stride": OPTIONAL_SIZES,
    "pad": OPTIONAL_SIZES,
    "pool_type": Attribute(one_of("max", "avg", "sum", "lp"), "max"),
    "global_pool": FALSE,
    "pooling_convention": Attribute(one_of("valid", "full", "same"), "valid"),
    "count_include_pad": TRUE,
    "layout": LAYOUT,
}

STEM_WINDOW = ((3, 3), (2, 2), (1, 1), (1, 1))  # kernel, stride, pad, dilation of the max pooling in ResNet's stem


def is_stems(node: NodeView) -> bool:
    """Whether the node is the max pooling of ResNet's stem."""
    return bool(node["pool_type"] == "max" and not node["global_pool"] and node["pooling_convention"] == "valid"
                and window(node) == STEM_WINDOW)


def pooling_body(b: Body) -> list[Any]:
    """The body of a pooling. The stem's pooling is a primitive because our fused kernels include it."""
    return [b.max_of_3x3(b["data"])] if is_stems(b.node) and b.node["layout"] == "NHWC" else b.primitive()


OPERATORS = (
    Operator("Pooling", ("data",), _pooling, _compute, POOLING, gradient=_gradient, numpy_gradient=_numpy_gradient,
             training=lambda node: "MaxPoolingTrain" if node["pool_type"] == "max" else "Pooling", body=pooling_body),
    Operator("MaxPoolingTrain", ("data",), _max_pooling_train, _max_pooling_with_winner, POOLING,
             ("output", "winner"), forward="Pooling", body=lambda b: b.pooled(b["data"])),
    # Each element of dy goes to the winner of its window.
    Operator("MaxPoolingBackward", ("out_grad", "winner", "out_grad_2"), _backward,
             lambda node, dy, winner, dy2=None: [max_pooling_backward(node, total(dy, dy2), winner,
                                                                      node["data_shape"])],
             POOLING | DATA_SHAPE | SINGLE_GRAD, ("data_grad",), SECOND_GRAD, forward="Pooling",
             body=lambda b: [b.unpooled(b.total(b["out_grad"]), b["winner"])]),
    Operator("AvgPoolingBackward", ("out_grad",), _backward,
             lambda node, dy: [avg_pooling_backward(node, dy, node["data_shape"])],
             POOLING | DATA_SHAPE, ("data_grad",), forward="Pooling"),
)
