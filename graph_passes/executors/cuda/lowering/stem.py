"""ResNet's first convolution in 16-bit types: 7x7, stride 2, 64 filters over four channels, by stem.cu."""

from __future__ import annotations

import ctypes

from graph_passes.executors.cuda.kernels import Size, count
from graph_passes.executors.cuda.lowering.batch_norm_pool import Image
from graph_passes.executors.cuda.lowering.builder import Builder, Rules, require, rows_and_channels
from graph_passes.executors.cuda.lowering.operands import In, Out
from graph_passes.graph import Node
from graph_passes.operators import Shape
from graph_passes.passes.stem import FILTERS, SIZE

STEM_BLOCK: Size = (256, 1, 1)
OUT_ROWS = 4  # of stem.cu
STATIC_BYTES = 3100  # of shared memory, beside what `stem_work` says
SHARE = FILTERS * SIZE * 32  # floats of the weights' gradient that a block of stem_wgrad leaves


def stem_work(out_shape: Shape) -> tuple[int, int, int, int]:
    """How stem.cu divides an output (N, H, W, 64): items of work, tiles of 16 pixels in a row, and the bytes of shared
    memory that an item's rows of the image and of the output's gradient take."""
    images, height, width, filters = out_shape
    tiles = -(-width // 16)
    in_rows = 2 * OUT_ROWS + SIZE - 2
    return (images * -(-height // OUT_ROWS), tiles, in_rows * (16 * tiles + 3) * 16,
            OUT_ROWS * 16 * tiles * filters * 2)


def _require_support(builder: Builder, node: Node, out_shape: Shape) -> None:
    """Raise GraphError where the GPU, or what it has of shared memory, is not for these kernels."""
    _, _, image_bytes, gradient_bytes = stem_work(out_shape)
    needed = image_bytes + max(image_bytes, gradient_bytes) + STATIC_BYTES
    require(builder.gpu.capability >= (8, 0) and needed <= builder.gpu.max_shared_bytes, node,
            "is not for this GPU's kernels of the stem")


def forward(builder: Builder, node: Node) -> None:
    """The convolution with the sums of its output."""
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    _require_support(builder, node, y.shape)
    items, tiles, image_bytes, _ = stem_work(y.shape)
    blocks = min(builder.gpu.num_multiprocessors, items)
    builder.launch(node, "stem.cu", builder.kernel("stem_fprop"), (blocks, 1, 1), STEM_BLOCK,
                   In(x), In(w), Out(y), Out(builder.output(node, "sums")), builder.partials(blocks * FILTERS * 3),
                   builder.tickets, Image.of(x, y), count(items), ctypes.c_int(tiles), shared_bytes=2 * image_bytes,
                   flops=builder.problem("fprop", node, x, w, y).flops)


def wgrad(builder: Builder, node: Node) -> None:
    """The gradient of the weights, from what makes the gradient of the convolution's output."""
    x, dz, image = (builder.input(node, role) for role in ("data", "out_grad", "image"))
    dw = builder.output(node)
    _require_support(builder, node, x.shape)
    items, tiles, image_bytes, gradient_bytes = stem_work(x.shape)
    blocks = min(2 * builder.gpu.num_multiprocessors, items)
    shares = builder.partials(blocks * SHARE)
    rows, _ = rows_and_channels(node, x)
    builder.launch(node, "stem.cu", builder.kernel("stem_wgrad"), (blocks, 1, 1), STEM_BLOCK, In(image), In(x), In(dz),
                   *(In(builder.input(node, role)) for role in (
                       "winner", "saved", "gamma", "gamma_grad", "beta_grad")),
                   shares, Image.of(image, x), Image.of(x, dz), count(rows), count(items), ctypes.c_int(tiles),
                   shared_bytes=image_bytes + gradient_bytes,
                   flops=builder.problem("wgrad", node, image, dw, x).flops)
    builder.launch(node, "stem.cu", builder.kernel("stem_wgrad_sum"), (FILTERS * SIZE, 1, 1), (32, 8, 1),
                   shares, Out(dw), ctypes.c_int(blocks))


RULES: Rules = {
    "StemConvolution": forward,
    "StemWgrad": wgrad,
}
