"""The stem in INT8: the first convolution with its max pooling, on Hopper.

    before    squares, weight, multiplier, bias -> QuantisedConvolution -> QuantisedPooling `pool`
    after     squares, weight, multiplier, bias -> QuantisedStemPool `pool`

The first convolution reads 2x2 squares (`passes/quantise_squares.py`). The largest tensor of the network is not
written. The result is bit-identical. Teams of warps walk over the rows of all images.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches, require
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import HOPPER, instance
from graph_passes.executors.cuda.kernels.stem import FILTERS
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.graph import Node
from graph_passes.operators import Operator, window
from graph_passes.operators.body import Body
from graph_passes.operators.pooling import is_stems
from graph_passes.operators.quantised import QUANTISED_CONVOLUTION, SQUARE_CHANNELS, quantised_convolution_body

WINDOW = ((4, 4), (1, 1), (0, 0), (1, 1))  # 7x7 with stride 2 and padding 3, on 2x2 squares
_CUDA = Declarations("quantised_stem_pool.cu")
TEAMS, WIDTH = _CUDA.values("TEAMS", "WIDTH")
BLOCK = _CUDA.value("THREADS"), 1, 1
SHARED_BYTES = _CUDA.sizeof("Shared")


def quantised_stem_pool(table: Candidates, pooling: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a QuantisedPooling `pooling`."""
    if not is_stems(pooling.node):
        return
    for convolution in table.makers(pooling.node.inputs[0], "QuantisedConvolution"):
        if table.makers(convolution.input("data"), "QuantiseSquares") and _fits(convolution.node):
            yield convolution.node.derive("QuantisedStemPool", pooling.node.name, convolution.node.inputs)


def _fits(convolution: Node) -> bool:
    return (window(convolution) == WINDOW and convolution["num_filter"] == FILTERS and convolution["num_group"] == 1
            and convolution["no_addend"] and convolution["layout"] == "NHWC" and convolution["dtype"] == "int8")


def _body(b: Body) -> list[Any]:
    (y,) = quantised_convolution_body(b)
    return [b.max_of_3x3(y)]


class PooledSizes(ctypes.Structure):
    """`PooledSizes` of quantised_stem_pool.cu."""

    _fields_ = _CUDA.fields("PooledSizes")


def launch(builder: Builder, node: Node) -> None:
    x, weight, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    images, height, width, channels = x.shape
    size = window(node)
    out_height, out_width = height - size.kernel[0] + 1, width - size.kernel[1] + 1
    require(builder.gpu.capability == HOPPER and size == WINDOW and channels == SQUARE_CHANNELS
            and y.shape[3] == FILTERS and y.dtype == "int8" and out_width <= WIDTH, node,
            "is not for the kernel of the stem and its pooling")
    blocks = min(builder.gpu.num_multiprocessors, -(-images * y.shape[1] // TEAMS))
    builder.launch(node, "quantised_stem_pool.cu", instance("quantised_stem_pool", node["relu"]), (blocks, 1, 1),
                   BLOCK, In(x), In(weight), In(builder.input(node, "multiplier")),
                   In(builder.input(node, "bias")), Out(y),
                   PooledSizes(images, out_height, out_width, *y.shape[1:3]), shared_bytes=SHARED_BYTES,
                   flops=2 * images * out_height * out_width * weight.num_bytes)


OPERATORS = (
    Operator("QuantisedStemPool", ("data", "weight", "multiplier", "bias"), attrs=QUANTISED_CONVOLUTION, body=_body,
             forward="Convolution", fused=True),
)
RULES = (("QuantisedPooling", quantised_stem_pool),)
LAUNCHES: Launches = {"QuantisedStemPool": launch}
