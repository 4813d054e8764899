"""Convolutions of few images, with what follows them, by conv_small.cu, whose blocks share a tile in clusters."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from graph_passes.executors.cuda.kernels import HOPPER, Size
from graph_passes.executors.cuda.lowering.builder import Builder, Rules, require
from graph_passes.executors.cuda.lowering.operands import In, Out
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.graph import Node
from graph_passes.operators import Shape, Window, window
from graph_passes.passes.conv_small import TILES

BLOCK: Size = (256, 1, 1)
SPLITS = (1, 2, 4, 8)  # blocks of a cluster; 8 is what every GPU with clusters can have
CHUNK_VECTORS = 4  # of channels that are multiplied at once
UNIT_BYTES = 16 * CHUNK_VECTORS  # of a pixel or a filter
PADDED_COLUMNS = 8  # beside those of a row of sums, which are fp32
# Blocks for each multiprocessor, which holds two at most. A block has loaded all that it needs before it ends, so where
# many follow each other a kernel that loads the next tile while it multiplies this one is faster.
MAX_BLOCKS = 4


class Sizes(ctypes.Structure):
    """`SmallConvolution` of conv_small.cu."""

    _fields_ = (("rows", ctypes.c_uint32), *((name, ctypes.c_int) for name in (
        "out_height", "out_width", "filters", "vectors", "height", "width", "pad_h", "pad_w", "inside_h", "inside_w",
        "pixel", "line", "image", "stride_h", "stride_w", "taps", "kernel_w", "step_h", "step_w", "chunks", "places",
        "relu")))

    @classmethod
    def of(cls, data: Shape, output: Shape, size: Window, rows: int, relu: bool) -> Sizes:
        """Of a convolution from `data` (N, H, W, C) to `output` (N, OH, OW, K), in tiles of so many rows. A single tap
        without padding reads as many places as there are rows of the output."""
        (_, height, width, channels), (images, out_height, out_width, filters) = data, output
        vectors, (stride_h, stride_w) = channels // VECTOR, size.stride
        pitches = vectors, width * vectors, height * width * vectors
        step_w, step_h = size.dilate[1], size.dilate[0] * (width + 2 * size.pad[1])
        if size.kernel == (1, 1) and size.pad == (0, 0):
            pitches = stride_w * pitches[0], stride_h * pitches[1], pitches[2]
            height, width, stride_h, stride_w = out_height, out_width, 1, 1
        padded = height + 2 * size.pad[0], width + 2 * size.pad[1]
        made = cls(images * out_height * out_width, out_height, out_width, filters, vectors, *padded, *size.pad,
                   height, width, *pitches, stride_h, stride_w, size.kernel[0] * size.kernel[1], size.kernel[1],
                   step_h, step_w, -(-vectors // CHUNK_VECTORS), 0, relu)
        made.places = made.most_places(rows)
        return made

    def most_places(self, rows: int) -> int:
        """Of a tile of so many rows: those between the first tap of its first row and the last tap of its last."""
        first = np.arange(0, self.rows, rows)
        last = np.minimum(first + rows, self.rows) - 1
        of_window = (self.taps // self.kernel_w - 1) * self.step_h + (self.kernel_w - 1) * self.step_w
        return int((self.place(last) - self.place(first)).max()) + of_window + 1

    def place(self, row: np.ndarray) -> np.ndarray:
        """Of the first tap of rows of the output."""
        line, column = np.divmod(row, self.out_width)
        image, line = np.divmod(line, self.out_height)
        return (image * self.height + line * self.stride_h) * self.width + column * self.stride_w


@dataclass(frozen=True)
class ConvSmall:
    """How `conv_small` divides a convolution into tiles of `rows` and `columns`. `sizes`: for these rows."""

    sizes: Sizes
    rows: int
    columns: int

    @property
    def tiles(self) -> tuple[int, int]:
        """Of columns and rows."""
        return -(-self.sizes.filters // self.columns), -(-self.sizes.rows // self.rows)

    def split(self, num_multiprocessors: int, max_shared_bytes: int) -> int:
        """Blocks of a cluster: as many as there are multiprocessors for, more where less have no room for their shares
        of the weights; 0 where none have."""
        fitting = [split for split in SPLITS
                   if split <= self.sizes.chunks and self.shared_bytes(split) <= max_shared_bytes]
        tiles = self.tiles[0] * self.tiles[1]
        in_one_round = [split for split in fitting if tiles * split <= num_multiprocessors]
        return max(in_one_round) if in_one_round else min(fitting, default=0)

    def shared_bytes(self, split: int) -> int:
        """Sums of a tile; a block's share of the weights and pixels."""
        sums = 4 * self.rows * (self.columns + PADDED_COLUMNS)
        chunks = -(-self.sizes.chunks // split)
        return sums + chunks * (self.sizes.taps * self.columns + self.sizes.places) * UNIT_BYTES


def forward(builder: Builder, node: Node) -> None:
    """The convolution with a bias, and perhaps a sum and ReLU."""
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    gpu, (rows, columns) = builder.gpu, TILES[node["way"]]
    require(gpu.capability == HOPPER, node, "is fused as only Hopper's clusters of blocks can compute it")
    require(x.shape[3] % VECTOR == 0 and y.shape[3] % VECTOR == 0, node,
            f"has {x.shape[3]} channels and {y.shape[3]} filters: use multiples of {VECTOR}")
    way = ConvSmall(Sizes.of(x.shape, y.shape, window(node), rows, node.op.endswith("Relu")), rows, columns)
    split = way.split(gpu.num_multiprocessors, gpu.max_shared_bytes)
    across, down = way.tiles
    require(0 < split * across * down <= MAX_BLOCKS * gpu.num_multiprocessors, node, "is not for the kernel of small "
            "problems")
    addend = builder.input(node, "addend") if node.op == "SmallConvolutionAddRelu" else None
    replaced = addend if addend is not x else None  # a window reads what other blocks would have written by then
    builder.launch(node, "conv_small.cu", builder.kernel("conv_small", rows, columns, split), (split * across, down, 1),
                   BLOCK, In(x), In(w), In(builder.input(node, "bias")), In(addend), Out(y, over=replaced), way.sizes,
                   shared_bytes=way.shared_bytes(split), flops=builder.problem("fprop", node, x, w, y).flops)


RULES: Rules = dict.fromkeys(("SmallConvolution", "SmallConvolutionRelu", "SmallConvolutionAddRelu"), forward)
