"""INT8 convolutions on Hopper whose windows overlap in shared memory: the first convolution, of 2x2 squares
(`passes/quantise_squares.py`), and 3x3 convolutions of few channels.

    before    x, weight, multiplier, bias -> QuantisedConvolution `y`
    after     x, weight, multiplier, bias -> QuantisedConvSquares `y`
"""

from __future__ import annotations

import ctypes

from graph_passes.candidates import form
from graph_passes.executors.cuda.builder import Builder, Launches, require
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import HOPPER, count, instance
from graph_passes.executors.cuda.kernels.quantised import CHUNK, RESERVED_BYTES, Epilogue, require_tensor_cores
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.graph import Node
from graph_passes.operators import Operator, window
from graph_passes.operators.quantised import (
    OPTIONAL_ADDEND,
    QUANTISED_CONVOLUTION,
    SQUARE_CHANNELS,
    quantised_convolution_body,
)

ROWS, THREADS = Declarations("quantised_conv_squares.cu").values("ROWS", "THREADS")
STAGES, BLOCKS = 3, 3  # blocks on a multiprocessor
# channels of a supported 3x3 convolution -> filters of a block; for the first convolution: 64
COLUMNS = {64: 64, 128: 128}


def launch(builder: Builder, node: Node) -> None:
    """Launch the convolution. Blocks walk over the positions."""
    x, weight, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    size, (adds, relu, _), filters = window(node), Epilogue.of(node), y.shape[3]
    images, height, width, channels = x.shape
    kernel, pad, planes = size.kernel[0], size.pad[0], channels // SQUARE_CHANNELS
    is_plain = size == ((kernel, kernel), (1, 1), (pad, pad), (1, 1)) and not adds
    is_squares = channels == SQUARE_CHANNELS and kernel % 2 == 0 and pad == 0
    has_few_channels = channels in COLUMNS and kernel == 3
    require(builder.gpu.capability == HOPPER and is_plain and (is_squares or has_few_channels), node,
            "is not for the kernel of squares")
    columns = COLUMNS.get(channels, 64)
    require_tensor_cores(builder, node, columns)
    on_multiprocessor = BLOCKS if columns == 64 else 1
    height, width = height + 2 * pad, width + 2 * pad
    places, patch = images * height * width, ROWS + (kernel - 1) * width + kernel
    # with this patch size, eight copies of all planes use all banks of shared memory
    patch += (8 // planes - patch) % 8
    stages = STAGES if planes == 1 else STAGES - 1
    shared_bytes = -(-kernel**2 * planes // 8) * columns * CHUNK + stages * patch * channels
    require(shared_bytes <= builder.gpu.max_shared_bytes // on_multiprocessor - RESERVED_BYTES, node,
            "has too wide images for the kernel of squares")
    blocks = min(-(-places // ROWS), on_multiprocessor * builder.gpu.num_multiprocessors)
    builder.launch(
        node, "quantised_conv_squares.cu", instance("quantised_conv_squares", y.dtype, kernel, planes, columns, relu),
        (blocks, -(-filters // columns), 1), (THREADS, 1, 1), In(x), In(weight),
        In(builder.input(node, "multiplier")), In(builder.input(node, "bias")), Out(y), count(places),
        *map(ctypes.c_int, (height, width, filters, patch, pad)), shared_bytes=shared_bytes,
        flops=builder.problem("fprop", node, x, weight, y).flops)


OPERATORS = (
    Operator("QuantisedConvSquares", ("data", "weight", "multiplier", "bias", "addend"), attrs=QUANTISED_CONVOLUTION,
             optional=OPTIONAL_ADDEND, form_of="QuantisedConvolution", body=quantised_convolution_body,
             forward="Convolution", fused=True),
)
RULES = (("QuantisedConvolution", form("QuantisedConvSquares")),)
LAUNCHES: Launches = {"QuantisedConvSquares": launch}
