"""ResNet's first convolution in 16-bit types: 7x7, stride 2, 64 filters over four channels, by stem.cu;
on Hopper by stem_forward.cu, stem_pool.cu and stem_weights.cu."""

from __future__ import annotations

import ctypes
import math

from graph_passes.executors.cuda.builder import Builder, Launches, require, require_hopper, rows_and_channels
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import Size, count
from graph_passes.executors.cuda.kernels.batch_norm_pool import Image
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.graph import Node
from graph_passes.operators import Shape
from graph_passes.passes.stem import FILTERS, SIZE

STEM_BLOCK: Size = (256, 1, 1)
OUT_ROWS = 4  # of stem.cu
STATIC_BYTES = 3100  # of shared memory, beside what `stem_work` says
SHARE = FILTERS * SIZE * 32  # floats of the weights' gradient that a block leaves


class StemRows:
    """How the kernels of stem_rows.cuh divide their work: into strips of rows of their output. A block has three teams
    of warps, each of which makes a strip."""

    BLOCK: Size = (512, 1, 1)
    TEAMS, MAX_WIDTH, PAIRS, ROW_BYTES = 3, 224, 8, 1856  # of an image, and of one of its rows in shared memory
    IMAGE_BYTES = -(-((TEAMS * PAIRS * 2 + 1) * ROW_BYTES + 2 * TEAMS * PAIRS * 8) // 1024) * 1024
    ROWS, RESULT_PIXELS = 1, 112  # of the convolution, that make a row of the output; of a row of the output
    SHARED_BYTES = 2 * TEAMS * RESULT_PIXELS * FILTERS * 2 + IMAGE_BYTES

    def __init__(self, shape: Shape, num_multiprocessors: int) -> None:
        """`shape`: of the output, (N, H, W, 64)."""
        images, height, _, _ = shape

        def rows_in_turn(strips: int) -> int:
            """Of the convolution, that the busiest team makes; a strip costs one more."""
            rounds = -(-images * strips // (self.TEAMS * num_multiprocessors))
            return rounds * (self.ROWS * -(-height // strips) + 1)

        strips = min(range(1, height + 1), key=rows_in_turn)
        self.strip = -(-height // strips)
        items = images * -(-height // self.strip)
        self.grid: Size = (min(num_multiprocessors, -(-items // self.TEAMS)), 1, 1)
        self.tiling = Tiling.of_matrix(math.prod(shape[:3]), FILTERS, (shape[2], FILTERS))


class StemPool(StemRows):
    """Of stem_pool.cu, which also makes a row of the strip above."""

    ROWS, RESULT_PIXELS = 2, 56
    SHARED_BYTES = 2 * StemRows.TEAMS * RESULT_PIXELS * FILTERS * 2 + StemRows.IMAGE_BYTES


class Layout(ctypes.Structure):
    """`Layout` of stem_weights.cu."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("stages", "stage_vectors", "pixels"))


class StemWeights:
    """How stem_weights.cu divides its work: into pairs of rows of the gradient of the convolution's output. A stage of
    shared memory holds what such an item is made of."""

    BLOCK: Size = (640, 1, 1)
    ROWS, IN_ROWS, STEP, MAX_PIXELS = 2, 9, 16, 256  # MAX_PIXELS: of a side of what the copy engine copies at once
    CONTROL_BYTES, SHARED_BYTES, MAX_STAGES = 1 << 10, 227 << 10, 8

    def __init__(self, shape: Shape, num_multiprocessors: int) -> None:
        """`shape`: of the convolution's output, (N, OH, OW, 64)."""
        images, height, width, filters = shape
        pixels, pooled_width = -(-width // self.STEP) * self.STEP, -(-width // 2)
        gradient, image = self.ROWS * pixels * filters * 2, self.IN_ROWS * (pixels + 3) * 16
        pooled = 2 * pooled_width * filters * 3  # two rows, of 2 bytes and the winner
        stage_bytes = -(-(gradient + image + pooled) // 1024) * 1024
        stages = min(self.MAX_STAGES, (self.SHARED_BYTES - self.CONTROL_BYTES) // stage_bytes)
        self.fits = stages >= 2 and pixels <= self.MAX_PIXELS
        self.layout = Layout(stages, stage_bytes // 16, pixels)
        self.shared_bytes = self.CONTROL_BYTES + stages * stage_bytes
        self.items = images * -(-height // self.ROWS)
        self.grid: Size = (min(num_multiprocessors, self.items), 1, 1)
        self.tiling = Tiling((images * height, width, filters), (width * filters, filters),
                             (self.ROWS, pixels, filters))


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


def _require_rows(builder: Builder, node: Node, images: Shape) -> None:
    """Raise GraphError where the GPU or these images are not for the kernels of stem_rows.cuh."""
    require_hopper(builder, node)
    _, _, width, channels = images
    require(width % 2 == 0 and width <= StemRows.MAX_WIDTH and channels == 4, node,
            f"reads images of {channels} channels and {width} pixels' width: its kernel takes 4 and, if even, up to "
            f"{StemRows.MAX_WIDTH}")


def forward(builder: Builder, node: Node) -> None:
    """The convolution with the sums of its output."""
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    sums, flops = Out(builder.output(node, "sums")), builder.problem("fprop", node, x, w, y).flops
    if node["way"] == "stem_forward":
        _require_rows(builder, node, x.shape)
        way = StemRows(y.shape, builder.gpu.num_multiprocessors)
        builder.launch(node, "stem_forward.cu", builder.kernel("stem_forward"), way.grid, way.BLOCK, In(x), In(w),
                       Tiled(Out(y), way.tiling), sums, builder.partials(way.grid[0] * FILTERS * 3), builder.tickets,
                       Image.of(x, y), *map(ctypes.c_int, (x.shape[0], way.strip)), shared_bytes=way.SHARED_BYTES,
                       flops=flops)
    else:
        _require_support(builder, node, y.shape)
        items, tiles, image_bytes, _ = stem_work(y.shape)
        blocks = min(builder.gpu.num_multiprocessors, items)
        builder.launch(node, "stem.cu", builder.kernel("stem_fprop"), (blocks, 1, 1), STEM_BLOCK, In(x), In(w), Out(y),
                       sums, builder.partials(blocks * FILTERS * 3), builder.tickets, Image.of(x, y), count(items),
                       ctypes.c_int(tiles), shared_bytes=2 * image_bytes, flops=flops)


class PooledImage(ctypes.Structure):
    """`Sizes` of stem_pool.cu."""

    _fields_ = tuple((name, ctypes.c_int) for name in (
        "height", "width", "out_height", "out_width", "pooled_height", "pooled_width"))

    @classmethod
    def of(cls, image: Shape, pooled: Shape) -> PooledImage:
        height, width = image[1:3]
        return cls(height, width, -(-height // 2), -(-width // 2), *pooled[1:3])


def pool(builder: Builder, node: Node) -> None:
    """The convolution with bias, ReLU and max pooling, in inference."""
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    _require_rows(builder, node, x.shape)
    way, (rows, _) = StemPool(y.shape, builder.gpu.num_multiprocessors), rows_and_channels(node, y)
    builder.launch(node, "stem_pool.cu", builder.kernel("stem_pool"), way.grid, way.BLOCK, In(x), In(w),
                   In(builder.input(node, "bias")), Tiled(Out(y), way.tiling),
                   PooledImage.of(x.shape, y.shape), *map(ctypes.c_int, (x.shape[0], way.strip)),
                   shared_bytes=way.SHARED_BYTES, flops=8 * rows * FILTERS * SIZE * SIZE * x.shape[3])


def wgrad(builder: Builder, node: Node) -> None:
    """The gradient of the weights, from what makes the gradient of the convolution's output."""
    x, dz, image = (builder.input(node, role) for role in ("data", "out_grad", "image"))
    dw = builder.output(node)
    rows, _ = rows_and_channels(node, x)
    of_norm = [In(builder.input(node, role)) for role in ("winner", "saved", "gamma", "gamma_grad", "beta_grad")]
    sizes = Image.of(image, x), Image.of(x, dz), count(rows)
    flops = builder.problem("wgrad", node, image, dw, x).flops
    if node["way"] == "stem_weights":
        require_hopper(builder, node)
        way = StemWeights(x.shape, builder.gpu.num_multiprocessors)
        require(way.fits, node, f"has rows of {image.shape[2]} pixels, of which too few fit into shared memory")
        blocks = way.grid[0]
        shares = builder.partials(blocks * SHARE)
        builder.launch(node, "stem_weights.cu", builder.kernel("stem_weights"), way.grid, way.BLOCK,
                       Tiled(In(x), way.tiling), In(image), In(dz), *of_norm, shares, *sizes, ctypes.c_int(way.items),
                       way.layout, shared_bytes=way.shared_bytes, flops=flops)
    else:
        _require_support(builder, node, x.shape)
        items, tiles, image_bytes, gradient_bytes = stem_work(x.shape)
        blocks = min(2 * builder.gpu.num_multiprocessors, items)
        shares = builder.partials(blocks * SHARE)
        builder.launch(node, "stem.cu", builder.kernel("stem_wgrad"), (blocks, 1, 1), STEM_BLOCK, In(image), In(x),
                       In(dz), *of_norm, shares, *sizes, count(items), ctypes.c_int(tiles),
                       shared_bytes=image_bytes + gradient_bytes, flops=flops)
    builder.launch(node, "stem.cu", builder.kernel("stem_wgrad_sum"), (FILTERS * SIZE, 1, 1), (32, 8, 1),
                   shares, Out(dw), ctypes.c_int(blocks))


LAUNCHES: Launches = {
    "StemConvolution": forward,
    "StemPool": pool,
    "StemWgrad": wgrad,
}
