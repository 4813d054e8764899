"""ResNet's first convolution in 16-bit types with the sums of its output, in training, on Hopper.

    before    image, weight -> Convolution `conv` -> x -> BatchNormStatistics -> sums
    after     image, weight -> StemForward `conv` -> x, sums
"""

from __future__ import annotations

import ctypes
import dataclasses

from graph_passes.candidates import form
from graph_passes.executors.cuda.builder import Builder, Launches
from graph_passes.executors.cuda.kernels.batch_norm_relu_max_pool import Image
from graph_passes.executors.cuda.kernels.stem import FILTERS, STEM_FPROP
from graph_passes.executors.cuda.kernels.stem_rows import StemRows, require_rows
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.graph import Node


def launch(builder: Builder, node: Node) -> None:
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    require_rows(builder, node, x.shape)
    rows = StemRows(y.shape, builder.gpu.num_multiprocessors)
    builder.launch(node, "stem_forward.cu", builder.kernel("stem_forward"), rows.grid, rows.BLOCK, In(x), In(w),
                   Tiled(Out(y), rows.tiling), Out(builder.output(node, "sums")),
                   builder.partials(rows.grid[0] * FILTERS * 3), builder.tickets, Image.of(x, y),
                   *map(ctypes.c_int, (x.shape[0], rows.strip)), shared_bytes=rows.SHARED_BYTES,
                   flops=builder.problem("fprop", node, x, w, y).flops)


OPERATORS = (dataclasses.replace(STEM_FPROP, name="StemForward", form_of="StemFprop", plain=False),)
RULES = (("StemFprop", form("StemForward")),)
LAUNCHES: Launches = {"StemForward": launch}
