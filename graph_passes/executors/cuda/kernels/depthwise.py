"""Depthwise convolutions, in NHWC: 3x3, 5x5 or 7x7, at a stride of 1 or 2.

    before    x, weight -> Convolution `conv`                          (num_group = channels = num_filter)
    after     x, weight -> DepthwiseForward `conv`

    before    x, weight -> Convolution `conv` -> y -> BatchNormStatistics -> sums
    after     x, weight -> DepthwiseStatistics `conv` -> y, sums

    before    dy, weight -> ConvolutionDgrad        dy, x -> ConvolutionWgrad
    after     dy, weight -> DepthwiseDgrad          dy, x -> DepthwiseWgrad

Each kernel must move its images once. It moves, in elements (two bytes in 16-bit types): x + y forward, also with the
sums; dy + dx for the gradient of the data; x + dy for the gradient of the weights. Each element of y takes K * K
multiplications and additions, in fp32. By the data sheet of an H100 (3.35 TB/s; 132 multiprocessors of 128 fp32 lanes
at 1.7 GHz), the 4 bytes of an element of x and y take 1.2 ps at a stride of 1. Its arithmetic takes 0.3 ps for 3x3, 0.9
ps for 5x5 and 1.7 ps for 7x7: 7x7 reaches 70 % of the speed of a copy at most. Not measured on a GPU yet.

All sums are in a fixed order. Plain CUDA C++ for every GPU.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from graph_passes.candidates import Candidate, Candidates, form
from graph_passes.executors.cuda.builder import Builder, Launches, padded_rows, require
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import Size, instance
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node, Ref
from graph_passes.operators import Operator, Shape, channel_axis, window
from graph_passes.operators.base import DATA_SHAPE
from graph_passes.operators.convolution import CONVOLUTION, convolution_body

KERNELS, STRIDES = (3, 5, 7), (1, 2)
_CUDA = Declarations("depthwise.cu")
THREADS, LANES, SPLITS = _CUDA.values("THREADS", "LANES", "SPLITS")
MAX_GROUPS = 64  # most groups of channels that a block processes
# Channels and columns of a thread, and blocks of a multiprocessor, by kernel size.
CHANNELS, COLUMNS, BLOCKS = ({size: _CUDA.value(f"Piece<half, {size}>::{name}") for size in KERNELS}
                             for name in ("CHANNELS", "COLUMNS", "BLOCKS"))
ROUNDS = 4  # least number of rounds of threads per GPU, if strips can be short enough
SHORTEST_STRIP = 2  # shortest strip, in windows: neighbouring strips read the rows between them twice




def is_depthwise(convolution: Node) -> bool:
    """Whether these kernels support the convolution (or the convolution whose gradient this node is), judged by its
    attributes.
    """
    size = window(convolution)
    (rows, columns), stride = size.kernel, size.stride
    return (convolution["layout"] == "NHWC" and convolution["num_group"] == convolution["num_filter"] > 1
            and rows == columns in KERNELS and stride[0] == stride[1] in STRIDES and size.dilate == (1, 1)
            and max(size.pad) < rows)


def depthwise_statistics(table: Candidates, sums: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a BatchNormStatistics `sums`."""
    for convolution in table.makers(sums.input("data"), "Convolution"):
        if convolution["no_bias"] and sums["axis"] % 4 == channel_axis("NHWC") and is_depthwise(convolution.node):
            yield convolution.node.derive("DepthwiseStatistics", convolution.node.name, convolution.node.inputs)


# --- division of the work ---


class Walk(ctypes.Structure):
    """`Walk` of kernels/depthwise.cu."""

    _fields_ = _CUDA.fields("Walk")


@dataclass(frozen=True)
class Depthwise:
    """How the kernels divide a result (N, OH, OW, C) among threads.

    `images`: the shape of the tensor that is read, whose pixels lie `dilation` apart. `offset`: the row and column of
    the images where the result's first window begins.
    """

    kernel: int
    images: Shape
    result: Shape
    offset: tuple[int, int]
    stride: int = 1
    dilation: int = 1
    num_multiprocessors: int = 132

    @property
    def first(self) -> tuple[int, int]:
        """Row and column of the result where strips and pieces begin. In dilated images the window of this position
        begins at 1 - kernel. This is even, so the images have pixels there.
        """
        return (0, 0) if self.dilation == 1 else (1 - self.kernel - self.offset[0], 1 - self.kernel - self.offset[1])

    @property
    def groups(self) -> int:
        """How many groups of channels a block processes: all groups, or a part; all parts have equal size."""
        groups = -(-self.result[3] // CHANNELS[self.kernel])
        return -(-groups // -(-groups // MAX_GROUPS))

    @property
    def walk(self) -> Walk:
        images, height, width, channels = self.result
        height, width = height - self.first[0], width - self.first[1]
        pieces = -(-width // COLUMNS[self.kernel])
        threads = images * pieces * -(-channels // CHANNELS[self.kernel])
        wanted = ROUNDS * THREADS * BLOCKS[self.kernel] * self.num_multiprocessors
        strips = min(-(-wanted // threads), max(1, height // (SHORTEST_STRIP * self.kernel)))
        rows = -(-height // (strips * self.dilation)) * self.dilation
        strips = -(-height // rows)
        return Walk(channels, self.groups, pieces, strips, images * strips * pieces, rows, *self.images[1:3],
                    *self.result[1:3], *self.offset, *self.first)

    def grid(self, blocks: int | None = None) -> Size:
        """The grid: a thread for each item, or at most `blocks` blocks for the same channels, whose threads process
        several items.
        """
        walk = self.walk
        needed = -(-walk.items // (THREADS // walk.groups))
        return (min(needed, blocks) if blocks else needed,
                -(-self.result[3] // (walk.groups * CHANNELS[self.kernel])), 1)

    @property
    def summing_grid(self) -> Size:
        """The grid of kernels that sum: as many blocks as the GPU holds at once. Each block writes a part of the sums.
        """
        parts = self.grid()[1]
        return self.grid(max(1, self.num_multiprocessors * BLOCKS[self.kernel] // parts))


def _division(builder: Builder, node: Node, images: Buffer, result: Buffer, gradient: bool = False) -> Depthwise:
    """The division of a convolution; with `gradient`, the division of the gradient of its data."""
    channels = (node["data_shape"] if gradient else builder.shapes[node.input("data")])[3]
    require(channels == node["num_filter"] == node["num_group"], node,
            f"has {channels} channels in {node['num_group']} groups: its kernel takes as many")
    size = window(node)
    kernel, stride, pad = size.kernel[0], size.stride[0], size.pad
    made = partial(Depthwise, kernel, images.shape, result.shape,
                   num_multiprocessors=builder.gpu.num_multiprocessors)
    if gradient:
        return made((pad[0] + 1 - kernel, pad[1] + 1 - kernel), dilation=stride)
    return made((-pad[0], -pad[1]), stride=stride)


# --- launches ---


def forward(builder: Builder, node: Node) -> None:
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    bias = builder.optional_input(node, "bias", "no_bias")
    division = _division(builder, node, x, y)
    builder.launch(node, "depthwise.cu", builder.kernel("depthwise_forward", division.kernel, division.stride),
                   division.grid(), (THREADS, 1, 1), In(x), In(w), In(bias), Out(y), division.walk,
                   flops=builder.problem("fprop", node, x, w, y).flops)


def statistics(builder: Builder, node: Node) -> None:
    """Launch the convolution with the sums of its output. Blocks write the moments of their part of the output, and a
    second launch combines these moments.
    """
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    division = _division(builder, node, x, y)
    channels, grid = y.shape[3], division.summing_grid
    parts = Buffer(f"{node.name}:parts", (grid[0], channels, 3), "float32")
    builder.launch(node, "depthwise.cu", builder.kernel("depthwise_statistics", division.kernel, division.stride), grid,
                   (THREADS, 1, 1), In(x), In(w), Out(y), Out(parts), division.walk,
                   flops=builder.problem("fprop", node, x, w, y).flops)
    builder.launch(node, "depthwise.cu", "depthwise_moments", (-(-channels // LANES), 1, 1), (LANES * SPLITS, 1, 1),
                   In(parts), Out(builder.output(node, "sums")), *map(ctypes.c_int, (grid[0], channels)))


def dgrad(builder: Builder, node: Node) -> None:
    dy, w, dx = builder.input(node, "out_grad"), builder.input(node, "weight"), builder.output(node)
    division = _division(builder, node, dy, dx, gradient=True)
    builder.launch(node, "depthwise.cu", builder.kernel("depthwise_dgrad", division.kernel, division.dilation),
                   division.grid(), (THREADS, 1, 1), In(dy), In(w), Out(dx), division.walk,
                   flops=builder.problem("dgrad", node, dx, w, dy).flops)


def wgrad(builder: Builder, node: Node) -> None:
    """Launch the gradient of the weights. Blocks write parts of the sums, and a second launch adds these parts."""
    dy, x = builder.input(node, "out_grad"), builder.input(node, "data")
    dw = builder.output(node, shape=(dy.shape[3], *builder.shapes[Ref(node.name)][1:]))
    division = _division(builder, node, x, dy)
    grid = division.summing_grid
    parts = Buffer(f"{node.name}:parts", (grid[0], *dw.shape), "float32")
    builder.launch(node, "depthwise.cu", builder.kernel("depthwise_wgrad", division.kernel, division.stride), grid,
                   (THREADS, 1, 1), In(x), In(dy), Out(parts), division.walk,
                   flops=builder.problem("wgrad", node, x, dw, dy).flops)
    size = math.prod(dw.shape)
    builder.launch(node, "depthwise.cu", instance("depthwise_sum", dw.dtype), (-(-size // LANES), 1, 1),
                   (LANES * SPLITS, 1, 1), In(parts), Out(dw), *map(ctypes.c_int, (grid[0], size)))


_FORM: dict[str, Any] = {"forward": "Convolution", "fused": True}

OPERATORS = (
    Operator("DepthwiseForward", ("data", "weight", "bias"), attrs=CONVOLUTION, optional={"bias": "no_bias"},
             form_of="Convolution", body=partial(convolution_body, relu=False), **_FORM),
    Operator("DepthwiseStatistics", ("data", "weight"), attrs=CONVOLUTION, outputs=("output", "sums"),
             body=lambda b: b.with_sums(b.conv(b["data"], b["weight"])), **_FORM),
    Operator("DepthwiseDgrad", ("out_grad", "weight"), attrs=CONVOLUTION | DATA_SHAPE, outputs=("data_grad",),
             form_of="ConvolutionDgrad", body=lambda b: [b.dgrad(b["out_grad"], b["weight"])], **_FORM),
    Operator("DepthwiseWgrad", ("out_grad", "data"), attrs=CONVOLUTION, outputs=("weight_grad",),
             form_of="ConvolutionWgrad", body=lambda b: [b.wgrad(b["out_grad"], b["data"])], **_FORM),
)
RULES = (("Convolution", form("DepthwiseForward", is_depthwise)), ("BatchNormStatistics", depthwise_statistics),
         ("ConvolutionDgrad", form("DepthwiseDgrad", is_depthwise)),
         ("ConvolutionWgrad", form("DepthwiseWgrad", is_depthwise)))
LAUNCHES: Launches = {"DepthwiseForward": padded_rows(forward), "DepthwiseStatistics": padded_rows(statistics),
                      "DepthwiseDgrad": padded_rows(dgrad), "DepthwiseWgrad": padded_rows(wgrad)}
