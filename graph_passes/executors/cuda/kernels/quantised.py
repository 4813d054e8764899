"""INT8: quantising and dequantising, pooling, and a slow convolution kernel for all shapes and GPUs. The kernels
produce exactly the integers that `graph_passes/operators/quantised.py` defines.

The part that all INT8 convolutions share is here too (quantised.cuh).
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from graph_passes.executors.cuda.builder import Builder, Launches, require
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import count, instance, threads
from graph_passes.executors.cuda.kernels.pooling import Window
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.executors.cuda.parameters import VECTOR, padded
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators import window
from graph_passes.operators.quantised import SQUARE_CHANNELS, squares

_CUDA = Declarations("quantised_stream.cuh")
TILE_VECTOR = _CUDA.value("VECTOR")  # channels that convolution kernels read at once
CHUNK = _CUDA.value("CHUNK")  # bytes of the reduction that convolution kernels multiply at once
RESERVED_BYTES = 1 << 10  # shared memory of each block that is reserved by CUDA


class Geometry(ctypes.Structure):
    """`Convolution` of quantised.cuh."""

    _fields_ = _CUDA.fields("Convolution")

    @classmethod
    def of(cls, node: Node, x: Buffer, y: Buffer) -> Geometry:
        """The geometry of a convolution from `x` to `y`, both NHWC."""
        images, out_height, out_width, filters = y.shape
        size = window(node)
        return cls(images * out_height * out_width, *x.shape[1:4], out_height, out_width, filters, *size.kernel,
                   *size.stride, *size.pad, *size.dilate)


class Epilogue(NamedTuple):
    """The epilogue of an INT8 convolution."""

    adds: bool
    relu: bool
    share: ctypes.c_float  # scale of the addend divided by the scale of the output

    @classmethod
    def of(cls, node: Node) -> Epilogue:
        return cls(not node.get("no_addend", True), node["relu"], ctypes.c_float(node["addend_scale"] / node["scale"]))


def require_tensor_cores(builder: Builder, node: Node, columns: int) -> None:
    """Raise GraphError if this GPU cannot run the kernels on tensor cores, or this number of filters cannot be divided
    into blocks of `columns` columns."""
    filters = node["num_filter"]
    require(builder.gpu.capability >= (8, 0) and node["num_group"] == 1 and filters % TILE_VECTOR == 0, node,
            "is not for the kernels on tensor cores")
    require(filters > columns // 2, node, f"has less filters than {columns} columns are worth")


# --- launches ---


def quantise(builder: Builder, node: Node) -> None:
    """Launch the conversion of floats to int8. For images this includes the padding channel."""
    x = builder.input(node, "data")
    y = builder.output(node, shape=x.shape)
    require(x.shape[-1] % 4 == 0, node, f"has {x.shape[-1]} channels: use a multiple of 4")
    vectors = _vectors(node, y)
    builder.launch(node, "quantised.cu", builder.kernel("quantise"), *threads(vectors), In(x), Out(y),
                   ctypes.c_float(1 / node["scale"]), count(vectors))


def quantise_squares(builder: Builder, node: Node) -> None:
    """Launch the conversion of images to int8, in squares of 2x2 pixels."""
    x, y = builder.input(node, "data"), builder.output(node)
    require(4 * x.shape[3] == SQUARE_CHANNELS, node, f"has images with {x.shape[3]} channels: give 3 or 4")
    number = y.num_bytes // SQUARE_CHANNELS
    before = (squares(*of).before for of in zip(node["kernel"], node["pad"], strict=True))
    builder.launch(node, "quantised.cu", builder.kernel("quantise_squares"), *threads(number), In(x), Out(y),
                   ctypes.c_float(1 / node["scale"]), count(number),
                   *map(ctypes.c_int, (*x.shape[1:3], *y.shape[1:3], *before)))


def dequantise(builder: Builder, node: Node) -> None:
    """Launch the conversion of int8 to real values."""
    x = builder.input(node, "data")
    y = builder.output(node, shape=x.shape)
    vectors = _vectors(node, x)
    builder.launch(node, "quantised.cu", builder.kernel("dequantise"), *threads(vectors), In(x), Out(y),
                   ctypes.c_float(node["data_scale"]), count(vectors))


def _vectors(node: Node, integers: Buffer) -> int:
    """The total number of vectors. A vector has as many values as a thread processes at once."""
    require(integers.num_bytes % VECTOR == 0, node, f"has the shape {integers.shape}, and works on {VECTOR} values at "
            f"once: use a multiple of {VECTOR} of them")
    return integers.num_bytes // VECTOR


def convolution(builder: Builder, node: Node) -> None:
    """Launch the kernel for all shapes; a thread computes one output."""
    x, y = builder.input(node, "data"), builder.output(node)
    own = x.shape[3] // node["num_group"]
    require(own % 4 == 0, node, f"has {own} channels in a group: use a multiple of 4")
    _launch_direct(builder, node, Geometry.of(node, x, y), builder.input(node, "bias"),
                   builder.optional_input(node, "addend", "no_addend"), y, Epilogue.of(node), node["num_group"])


def classifier(builder: Builder, node: Node) -> None:
    """Launch a 1x1 convolution of a 1x1 image, with float output. The softmax adds the bias."""
    x = builder.input(node, "data")
    images, channels, filters = x.shape[0], x.num_bytes // x.shape[0], padded(node["num_hidden"])
    require(channels % 4 == 0, node, f"has {channels} values of an image: use a multiple of 4")
    require(node["dtype"] != "int8", node, "does not feed a SoftmaxOutput alone: only the classifier has "
            "a GPU lowering")
    y = builder.output(node, shape=(images, 1, 1, filters))
    geometry = Geometry(images, 1, 1, channels, 1, 1, filters, *(1,) * 4, 0, 0, 1, 1)
    _launch_direct(builder, node, geometry, None, None, y, Epilogue(False, False, ctypes.c_float(0)), groups=1)


def _launch_direct(builder: Builder, node: Node, geometry: Geometry, bias: Buffer | None, addend: Buffer | None,
                   y: Buffer, epilogue: Epilogue, groups: int) -> None:
    outputs = geometry.rows * geometry.filters
    adds, relu, share = epilogue
    builder.launch(node, "quantised.cu", instance("quantised_conv_direct", y.dtype, adds, relu), *threads(outputs),
                   In(builder.input(node, "data")), In(builder.input(node, "weight")),
                   In(builder.input(node, "multiplier")), In(bias), In(addend), Out(y), geometry, share,
                   count(outputs), ctypes.c_int(groups))


def pooling(builder: Builder, node: Node) -> None:
    """Launch a pooling. Maxima stay the same integers; means and sums are requantised."""
    x, y = builder.input(node, "data"), builder.output(node)
    channels = x.shape[3]
    require(channels % 4 == 0, node, f"has {channels} channels: use a multiple of 4")
    words = 4 if channels % 16 == 0 else 1
    items, pitch = x.shape[0] * y.shape[1] * y.shape[2] * channels // (4 * words), channels // (4 * words)
    size = (Window(*x.shape[1:3], 1, 1, *x.shape[1:3], 1, 1, 0, 0) if node["global_pool"]
            else Window.of(node, x, y))
    if node["pool_type"] == "max":
        unrolled = 3 if (size.kernel_h, size.kernel_w) == (3, 3) else 0
        builder.launch(node, "quantised.cu", instance("quantised_max_pool", words, unrolled), *threads(items), In(x),
                       Out(y), size, count(items), ctypes.c_int(pitch))
        return
    divisor = "SUM" if node["pool_type"] == "sum" else "PADDING" if node["count_include_pad"] else "IMAGE"
    builder.launch(node, "quantised.cu", instance("quantised_average_pool", y.dtype, words, divisor),
                   *threads(items), In(x), Out(y), size, ctypes.c_double(node["data_scale"] / node["scale"]),
                   count(items), ctypes.c_int(pitch))


LAUNCHES: Launches = {
    "Quantise": quantise,
    "QuantiseSquares": quantise_squares,
    "Dequantise": dequantise,
    "QuantisedConvolution": convolution,
    "QuantisedFullyConnected": classifier,
    "QuantisedPooling": pooling,
}
