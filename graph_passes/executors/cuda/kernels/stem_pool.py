"""The stem in inference: ResNet's first convolution up to its max pooling.

    before    image, weight, bias -> ConvolutionRelu -> Pooling `pool`
    after     image, weight, bias -> StemPool `pool`

The kernel is for 16-bit types and Hopper GPUs. The largest tensor of the network is not written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches, rows_and_channels
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernels.stem import FILTERS, SIZE, WINDOW
from graph_passes.executors.cuda.kernels.stem_rows import StemRows, require_rows
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.graph import Node
from graph_passes.operators import Operator, Shape, window
from graph_passes.operators.body import Body
from graph_passes.operators.convolution import CONVOLUTION
from graph_passes.operators.pooling import is_stems

_CUDA = Declarations("stem_pool.cu")


def stem_pool(table: Candidates, pooling: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a Pooling `pooling`."""
    if not is_stems(pooling.node):
        return
    for convolution in table.makers(pooling.node.inputs[0], "ConvolutionRelu"):
        if _fits(convolution.node):
            yield convolution.node.derive("StemPool", pooling.node.name, convolution.node.inputs)


def _fits(convolution: Node) -> bool:
    return (window(convolution) == WINDOW and convolution["num_filter"] == FILTERS and convolution["num_group"] == 1
            and convolution["layout"] == "NHWC" and convolution.attrs.get("dtype") in ("float16", "bfloat16"))


def _body(b: Body) -> list[Any]:
    return [b.max_of_3x3(b.epilogue(b.conv(b["data"], b["weight"]), relu=True))]


class StemPool(StemRows):
    """How stem_pool.cu divides its work. A strip also recomputes the last convolution row of the strip above."""

    ROWS = 2
    SHARED_BYTES = _CUDA.sizeof("Shared")


class PooledImage(ctypes.Structure):
    """`Sizes` of stem_pool.cu."""

    _fields_ = _CUDA.fields("Sizes")

    @classmethod
    def of(cls, image: Shape, pooled: Shape) -> PooledImage:
        height, width = image[1:3]
        return cls(height, width, -(-height // 2), -(-width // 2), *pooled[1:3])


def launch(builder: Builder, node: Node) -> None:
    """Launch the convolution with bias, ReLU and max pooling, for inference."""
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    require_rows(builder, node, x.shape)
    geometry, (rows, _) = StemPool(y.shape, builder.gpu.num_multiprocessors), rows_and_channels(node, y)
    builder.launch(node, "stem_pool.cu", builder.kernel("stem_pool"), geometry.grid, geometry.BLOCK, In(x), In(w),
                   In(builder.input(node, "bias")), Tiled(Out(y), geometry.tiling),
                   PooledImage.of(x.shape, y.shape), *map(ctypes.c_int, (x.shape[0], geometry.strip)),
                   shared_bytes=geometry.SHARED_BYTES, flops=8 * rows * FILTERS * SIZE * SIZE * x.shape[3])


OPERATORS = (
    Operator("StemPool", ("data", "weight", "bias"), attrs=CONVOLUTION, body=_body, forward="Convolution", fused=True),
)
RULES = (("Pooling", stem_pool),)
LAUNCHES: Launches = {"StemPool": launch}
