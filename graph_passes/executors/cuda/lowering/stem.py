"""ResNet's first convolution in 16-bit types: 7x7, stride 2, 64 filters over four channels, by stem.cu."""

from __future__ import annotations

import ctypes

from graph_passes.executors.cuda.kernels import Size, count
from graph_passes.executors.cuda.lowering.batch_norm_pool import Image
from graph_passes.executors.cuda.lowering.builder import Builder, rows_and_channels
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node, Ref
from graph_passes.operators import Shape, window

STEM_BLOCK: Size = (256, 1, 1)
FILTERS, SIZE, OUT_ROWS = 64, 7, 4  # of stem.cu
STATIC_BYTES = 2100  # of shared memory, beside what `stem_work` says
SHARE = FILTERS * SIZE * 32  # floats of the weights' gradient that a block of stem_wgrad leaves


def stem_work(out_shape: Shape) -> tuple[int, int, int, int]:
    """How stem.cu divides an output (N, H, W, 64): items of work, tiles of 16 pixels in a row, and the bytes of shared
    memory that an item's rows of the image and of the output's gradient take."""
    images, height, width, filters = out_shape
    tiles = -(-width // 16)
    in_rows = 2 * OUT_ROWS + SIZE - 2
    return (images * -(-height // OUT_ROWS), tiles, in_rows * (16 * tiles + 3) * 16,
            OUT_ROWS * 16 * tiles * filters * 2)


def serves(builder: Builder, node: Node) -> bool:
    """Is this the convolution that stem.cu is for, on a GPU that has the shared memory for it?"""
    x, w = builder.input(node, 0), builder.input(node, 1)
    if (window(node) != ((7, 7), (2, 2), (3, 3), (1, 1)) or w.shape != (FILTERS, SIZE, SIZE, 4)
            or x.shape[2] % 2 or builder.item_bytes != 2 or builder.gpu.capability < (8, 0)):
        return False
    _, _, image_bytes, gradient_bytes = stem_work(builder.output(node).shape)
    needed = image_bytes + max(image_bytes, gradient_bytes) + STATIC_BYTES
    return needed <= builder.gpu.max_shared_bytes


def forward(builder: Builder, node: Node) -> None:
    """The convolution with the sums of its output."""
    x, w, y = builder.input(node, 0), builder.input(node, 1), builder.output(node)
    sums = Buffer(f"{node.name}:sums", (2, y.shape[3]), "float32")
    builder.fusions.sums[Ref(node.name)] = sums
    builder.fusions.stems.add(node.name)
    items, tiles, image_bytes, _ = stem_work(y.shape)
    blocks = min(builder.gpu.num_multiprocessors, items)
    builder.reserve_partials(blocks * 2 * FILTERS)
    builder.launch(node, "stem.cu", builder.kernel("stem_fprop"), (blocks, 1, 1), STEM_BLOCK,
                   (x, w, y, sums, builder.partials, builder.persistent.tickets, Image.of(x, y), count(items),
                    ctypes.c_int(tiles)),
                   (x, w), (y, sums), shared_bytes=2 * image_bytes,
                   flops=builder.problem("fprop", node, x, w, y).flops)


def wgrad(builder: Builder, node: Node, batch_norm: Node, pool: Node, dz: Buffer) -> None:
    """The gradient of the weights, from what makes the gradient of the convolution's output."""
    x, gamma, saved = (builder.input(batch_norm, index) for index in (1, 2, 3))
    dgamma, dbeta = builder.output(batch_norm, 1), builder.output(batch_norm, 2)
    winner, data, dw = builder.input(pool, 1), builder.input(node, 1), builder.output(node)
    items, tiles, image_bytes, gradient_bytes = stem_work(x.shape)
    blocks = min(2 * builder.gpu.num_multiprocessors, items)
    builder.reserve_partials(blocks * SHARE)
    rows, _ = rows_and_channels(batch_norm, x)
    builder.launch(node, "stem.cu", builder.kernel("stem_wgrad"), (blocks, 1, 1), STEM_BLOCK,
                   (data, x, dz, winner, saved, gamma, dgamma, dbeta, builder.partials, Image.of(data, x),
                    Image.of(x, dz), count(rows), count(items), ctypes.c_int(tiles)),
                   (data, x, dz, winner, saved, gamma, dgamma, dbeta), (),
                   shared_bytes=image_bytes + gradient_bytes,
                   flops=builder.problem("wgrad", node, data, dw, x).flops)
    builder.launch(node, "stem.cu", builder.kernel("stem_wgrad_sum"), (FILTERS * SIZE, 1, 1), (32, 8, 1),
                   (builder.partials, dw, ctypes.c_int(blocks)), (), (dw,))
