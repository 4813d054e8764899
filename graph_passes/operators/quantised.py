"""INT8: operators on integers from -127 to 127. An integer represents itself times the scale of its tensor.

Scales are symmetric: one per tensor for activations, one per output channel for weights. The real value is `scale *
integer`, and a convolution's sum of products is `data_scale * weight_scale[k] * accumulator`. A GPU must produce the
same integers to the bit. So every operation after the exact int32 sum is one fp32 operation, rounded to nearest even,
in the order written at `requantised`. No operation is contracted (no fma). Values derived from scales are computed in
float64 and rounded to fp32 once. In this order an epilogue is a conversion, one product (two and a sum with an addend),
and a conversion with saturation, which is also the ReLU.

The bias is an int32 in units of the accumulator, which starts from it. Adding the bias therefore needs no operation,
and ONNX's QDQ form has the same integer. Outputs have the `dtype` of the node: "int8", or a float type if an operator
in floats reads the output. Float outputs are not rounded and their unit is 1 (`scale` is 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from graph_passes.operators.base import (
    TRUE,
    Array,
    Attribute,
    NodeView,
    Operator,
    Shape,
    Shapes,
    boolean,
    integers,
    known,
)
from graph_passes.operators.body import Body
from graph_passes.operators.convolution import CONVOLUTION
from graph_passes.operators.elementwise import elementwise, relu
from graph_passes.operators.fully_connected import FULLY_CONNECTED, fully_connected_shapes
from graph_passes.operators.pooling import POOLING, max_pooling, pooled_shape, pooling_body
from graph_passes.operators.windows import Places, as_layout, nhwc

SQUARE_CHANNELS = 16  # 2x2 pixels of 4 channels
LARGEST = 127  # integers range from -LARGEST to LARGEST: symmetric, so that a product with -1 cannot overflow
# Number of int8 products that fp32 sums exactly in any order: every partial sum is an integer of at most 24 bits.
_EXACT_IN_FP32 = 2**24 // LARGEST**2

# --- shapes ---


def _fully_connected(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    weight, output = fully_connected_shapes(node, data)
    return [data, weight, (node["num_hidden"],)], [output]


def _pooling(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    return [data], [pooled_shape(node, data)]


class Squares(NamedTuple):
    """The 2x2 squares that a convolution at stride 2 reads in place of pixels, in one dimension."""

    before: int  # squares of the image
    shift: int  # position of a window's tap in its squares
    window: int  # squares of a window
    total: int


def squares(kernel: int, pad: int, size: int = 0) -> Squares:
    """Squares for a window of `kernel` pixels at stride 2 with this padding. `size`: pixels of the image; if 0, the
    number of squares is not computed.
    """
    before = -(-pad // 2)
    shift = 2 * before - pad
    window = -(-(kernel + shift) // 2)
    return Squares(before, shift, window, (size + 2 * pad - kernel) // 2 + window)


def _squares(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    sizes = (squares(*of).total for of in zip(node["kernel"], node["pad"], data[1:3], strict=True))
    return [data], [(data[0], *sizes, SQUARE_CHANNELS)]


# --- NumPy ---


def saturated(x: Array) -> Array:
    """Floats to int8: rounded to the nearest integer, ties to even, and clamped to -127 ... 127."""
    return np.clip(np.rint(x), -LARGEST, LARGEST).astype(np.int8)


def quantised(x: Array, scale: float) -> Array:
    """Floats as int8 in units of `scale`: the fp32 product with fp32(1 / scale), saturated."""
    return saturated(x.astype(np.float32) * np.float32(1 / scale))


def in_squares(x: Array, kernel: Sequence[int], pad: Sequence[int]) -> Array:
    """Images (N, H, W, up to 4 channels) as squares (N, h, w, 16), zeros outside the image."""
    down, right = (squares(*of) for of in zip(kernel, pad, x.shape[1:3], strict=True))
    room = np.zeros((len(x), 2 * down.total, 2 * right.total, 4), x.dtype)
    top, left = 2 * down.before, 2 * right.before
    height, width = min(x.shape[1], room.shape[1] - top), min(x.shape[2], room.shape[2] - left)
    room[:, top : top + height, left : left + width, : x.shape[3]] = x[:, :height, :width]
    return _pixels_as_channels(room)


def weight_in_squares(weight: Array, pad: Sequence[int]) -> Array:
    """The weight with which a convolution of squares at stride 1, without padding, equals the convolution of images at
    stride 2 with this weight (K, kernel, up to 4 channels)."""
    filters, height, width, channels = weight.shape
    down, right = squares(height, pad[0]), squares(width, pad[1])
    room = np.zeros((filters, 2 * down.window, 2 * right.window, 4), weight.dtype)
    room[:, down.shift : down.shift + height, right.shift : right.shift + width, :channels] = weight
    return _pixels_as_channels(room)


def _pixels_as_channels(x: Array) -> Array:
    """(N, 2h, 2w, 4) -> (N, h, w, 16)."""
    count, height, width, _ = x.shape
    x = x.reshape(count, height // 2, 2, width // 2, 2, 4)
    return np.ascontiguousarray(x.transpose(0, 1, 3, 2, 4, 5)).reshape(count, height // 2, width // 2, SQUARE_CHANNELS)


def dequantised(x: Array, scale: float) -> Array:
    """Integers as real values: the fp32 product with the scale."""
    return x.astype(np.float32) * np.float32(scale)


def rescaled(accumulator: Array, multiplier: Array) -> Array:
    """Exact sums in another unit: the fp32 product with a factor."""
    return accumulator.astype(np.float32) * multiplier.astype(np.float32)


def add_rescaled(v: Array, addend: Array, ratio: float) -> Array:
    """The fp32 sum with an int8 addend whose unit is `ratio` times the unit of v."""
    return v + addend.astype(np.float32) * np.float32(ratio)


def requantised(node: NodeView, accumulator: Array, multiplier: Array, addend: Array | None = None) -> Array:
    """The epilogue: converts an int32 accumulator to the unit of the node's output. All arithmetic is fp32.

        v = float(accumulator) * multiplier
        v = v + float(addend) * fp32(addend_scale / scale)     with an addend
        v = max(v, 0)                                          with relu
        int8: round to nearest even, clamp to -127 ... 127; otherwise v

    Args:
        accumulator: int32, any shape.
        multiplier: fp32, data_scale * weight_scale / scale, which broadcasts to the accumulator.
        addend: int8, of the accumulator's shape.
    """
    v = rescaled(accumulator, multiplier)
    if addend is not None:
        v = add_rescaled(v, addend, node["addend_scale"] / node["scale"])
    if node.get("relu", False):
        v = relu(v)
    return saturated(v) if node["dtype"] == "int8" else v


def int8_convolution(node: NodeView, x: Array, weight: Array) -> Array:
    """The exact int32 sums of a convolution of int8 data and weights, in the node's layout."""
    places = Places(node, x.shape)
    x, weight, groups = places.padded(nhwc(node, x)), nhwc(node, weight), node["num_group"]
    filters, _, _, channels = weight.shape  # channels of a group
    batch, height, width = places.output_size
    total = np.zeros((groups, batch * height * width, filters // groups), np.int32)
    for (row, column), region in places:
        patch = x[region].reshape(-1, groups, channels).transpose(1, 0, 2)
        total += _products(patch, weight[:, row, column].reshape(groups, -1, channels).transpose(0, 2, 1))
    return as_layout(node, total.transpose(1, 0, 2).reshape(batch, height, width, filters))


def _products(a: Array, b: Array) -> Array:
    """The exact int32 product of int8 matrices (..., M, K) and (..., K, N), by fast fp32 products of parts of K."""
    parts = [slice(start, start + _EXACT_IN_FP32) for start in range(0, a.shape[-1], _EXACT_IN_FP32)]
    return sum(((a[..., part].astype(np.float32) @ b[..., part, :].astype(np.float32)).astype(np.int32)
                for part in parts), start=np.zeros((), np.int32))


def _quantised_pooling(node: NodeView, x: Array) -> list[Array]:
    if node["pool_type"] == "max":
        return [max_pooling(node, x.astype(np.float32))[0].astype(np.int8)]
    places = Places(node, x.shape)
    padded = places.padded(nhwc(node, x))
    sums = np.sum([padded[region] for _, region in places], axis=0, dtype=np.int32)
    multiplier = (node["data_scale"] / node["scale"] / places.divisor(node)).astype(np.float32)
    return [as_layout(node, requantised(node, sums, multiplier))]


def _quantised_fully_connected(node: NodeView, x: Array, weight: Array, multiplier: Array) -> list[Array]:
    x = x.reshape(len(x), -1) if node["flatten"] else x
    return [requantised(node, _products(x, weight.T), multiplier)]


# --- bodies ---


class Scales(NamedTuple):
    """The epilogue of a convolution in INT8: the units of its output and of its addend."""

    scale: float
    addend: float = 1.0
    relu: bool = True
    dtype: str = "int8"


def quantised_body(b: Body, suffix: str, data: Any, scales: Scales, addend: Any = None, **changes: Any) -> Any:
    """The body: integer sums, rescaled; addition; ReLU; saturation."""
    weight, multiplier, bias = b.all(*(f"{role}{suffix}" for role in ("weight", "multiplier", "bias")))
    y = b.rescaled(b.bias(b.conv(data, weight, **changes), bias), multiplier)
    y = y if addend is None else b.add_rescaled(y, addend, scales.addend / scales.scale)
    y = b.relu(y) if scales.relu else y
    return b.saturated(y) if scales.dtype == "int8" else y


def quantised_convolution_body(b: Body) -> list[Any]:
    node = b.node
    scales = Scales(node["scale"], node.get("addend_scale", 1.0), node["relu"], node["dtype"])
    return [quantised_body(b, "", b["data"], scales, b["addend"] if b.has("addend") else None)]


# --- the descriptions ---


def _scale(value: object) -> float:
    number = float(value)  # type: ignore[arg-type]
    if not 0 < number < float("inf"):
        raise ValueError(value)
    return number


SCALE = Attribute(_scale)  # scale of the output: the real value of the integer 1
SIZES = Attribute(integers)
_DTYPE = {"dtype": Attribute(str, "int8")}
QUANTISED_CONVOLUTION = CONVOLUTION | _DTYPE | {"scale": SCALE, "addend_scale": Attribute(_scale, 1.0),
                                                "no_addend": TRUE, "relu": Attribute(boolean, False)}
OPTIONAL_ADDEND = {"addend": "no_addend"}

OPERATORS = (
    Operator("Quantise", ("data",), elementwise, lambda node, x: [quantised(x, node["scale"])],
             {"scale": SCALE, **_DTYPE}),
    # For the first convolution at stride 2, with this `kernel` and `pad`: 2x2 pixels become the channels of one pixel
    # (passes/quantise_squares.py).
    Operator("QuantiseSquares", ("data",), _squares,
             lambda node, x: [in_squares(quantised(x, node["scale"]), node["kernel"], node["pad"])],
             {"scale": SCALE, "kernel": SIZES, "pad": SIZES, **_DTYPE}, forward="Quantise"),
    # `data_scale`: the real value of the integer 1 in the data.
    Operator("Dequantise", ("data",), elementwise, lambda node, x: [dequantised(x, node["data_scale"])],
             {"data_scale": SCALE, "dtype": Attribute(str, "float32")}),
    # multiplier: data_scale * weight_scale / scale, fp32 per channel. Then bias, addend and ReLU: `requantised`.
    Operator("QuantisedConvolution", ("data", "weight", "multiplier", "bias", "addend"),
             attrs=QUANTISED_CONVOLUTION, optional=OPTIONAL_ADDEND, forward="Convolution", fused=True,
             body=quantised_convolution_body),
    # For a maximum, `scale` equals `data_scale`, and the integers do not change. A mean is the exact sum times
    # fp32(data_scale / scale / pixels of the window).
    Operator("QuantisedPooling", ("data",), _pooling, _quantised_pooling,
             POOLING | _DTYPE | {"scale": SCALE, "data_scale": SCALE}, forward="Pooling", body=pooling_body),
    # Without bias, which the softmax adds.
    Operator("QuantisedFullyConnected", ("data", "weight", "multiplier"), _fully_connected, _quantised_fully_connected,
             FULLY_CONNECTED | _DTYPE | {"scale": SCALE}, forward="FullyConnected"),
)
