"""3x3 convolutions of 64 channels with 64 filters, with what comes before and after them, and the gradient of their
data, by conv3x3.cu, which is for Hopper's matrix instructions and copy engine."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

from graph_passes.executors.cuda.builder import Builder, Launches, require, require_hopper
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import Size
from graph_passes.executors.cuda.kernels.batch_norm import before, require_gamma
from graph_passes.executors.cuda.kernels.conv1x1_forward import SHARED_BYTES
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators import Shape

CHANNELS, TAPS = 64, 9
PIXEL_BYTES = 2 * CHANNELS
CONTROL_BYTES = 4 << 10


class TiledImages(ctypes.Structure):
    """`TiledImages` of kernels/conv3x3.cu."""

    _fields_ = tuple((name, ctypes.c_int) for name in (
        "images", "height", "width", "rows", "places", "place_vectors"))


@dataclass(frozen=True)
class Conv3x3:
    """How the kernels of conv3x3.cu divide images (N, H, W, 64) into tiles of whole rows. `reduces`: with the sums of a
    gradient, for which each team has a place for what it reads beside its tile, and leaves."""

    BLOCK: ClassVar[Size] = (288, 1, 1)
    PIXELS: ClassVar[int] = 232  # that are multiplied at once, those in the columns of zeros among them
    MAX_PLACES: ClassVar[int] = 3
    TEAMS: ClassVar[int] = 2
    WEIGHTS: ClassVar[Tiling] = Tiling.of_matrix(CHANNELS, TAPS * CHANNELS, (CHANNELS, CHANNELS))

    shape: Shape
    reduces: bool = False

    @property
    def pitch(self) -> int:
        """Pixels of a row in shared memory: one of zeros on each side."""
        return self.shape[2] + 2

    @property
    def rows(self) -> int:
        """Of a tile. Those of zeros behind the last of its pixels are not needed."""
        return min(self.shape[1], (self.PIXELS + 2) // self.pitch)

    @property
    def place_bytes(self) -> int:
        """Of a tile in shared memory, up to the last pixel that is read with the last tap, and at least one more."""
        return ((2 * self.pitch + 2 + self.PIXELS) // 8 + 1) * 8 * PIXEL_BYTES

    @property
    def places(self) -> int:
        return min(self.MAX_PLACES, (SHARED_BYTES - self._kept_bytes) // self.place_bytes)

    @property
    def _kept_bytes(self) -> int:
        """Of shared memory, beside the tiles' places."""
        results = self.TEAMS * self.PIXELS * PIXEL_BYTES if self.reduces else 0
        return CONTROL_BYTES + results + TAPS * CHANNELS * PIXEL_BYTES

    @property
    def fits(self) -> bool:
        """Whether the two teams have a tile each."""
        return self.rows > 0 and self.places >= self.TEAMS

    @property
    def shared_bytes(self) -> int:
        return self._kept_bytes + self.places * self.place_bytes

    @property
    def images(self) -> TiledImages:
        return TiledImages(*self.shape[:3], self.rows, self.places, self.place_bytes // 16)

    def grid(self, num_multiprocessors: int) -> Size:
        tiles = self.shape[0] * -(-self.shape[1] // self.rows)
        return 1, min(num_multiprocessors, tiles), 1

    @property
    def padded_rows(self) -> Tiling:
        """Of what is read: of each row also the pixels before the first and behind the last."""
        return self._tiling(self.pitch)

    @property
    def image_rows(self) -> Tiling:
        """Of what is written, and of what is read beside it."""
        return self._tiling(self.shape[2])

    def _tiling(self, pixels: int) -> Tiling:
        images, height, width, channels = self.shape
        return Tiling((images * height, width, channels), (width * channels, channels), (1, pixels, channels))


def _way(builder: Builder, node: Node, x: Buffer, reduces: bool = False) -> Conv3x3:
    """Raises GraphError where the GPU or these images are not for the kernels."""
    require_hopper(builder, node)
    require(x.shape[3] == CHANNELS, node, f"has {x.shape[3]} channels: its kernel takes {CHANNELS}")
    way = Conv3x3(x.shape, reduces)
    require(way.fits, node, f"has rows of {x.shape[2]} pixels, of which too few fit into shared memory")
    return way


def forward(builder: Builder, node: Node) -> None:
    """The convolution with bias and ReLU, or with the sums of its output."""
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    way = _way(builder, node, x)
    sums = builder.output(node, "sums") if node.op == "Conv3x3Statistics" else None
    bias = None if sums else builder.input(node, "bias")
    grid = way.grid(builder.gpu.num_multiprocessors)
    builder.launch(node, "conv3x3.cu", builder.kernel("conv3x3_forward", sums is not None, bias is not None), grid,
                   way.BLOCK, Tiled(In(x), way.padded_rows), Tiled(In(w), way.WEIGHTS), Tiled(Out(y), way.image_rows),
                   In(bias), Out(sums), builder.partials(3 * CHANNELS * grid[1] if sums else 0), builder.tickets,
                   way.images, shared_bytes=way.shared_bytes, flops=builder.problem("fprop", node, x, w, y).flops)


def norm_forward(builder: Builder, node: Node) -> None:
    """BatchNorm + ReLU of the data, and the convolution of that with the sums of its output."""
    require_gamma(node)
    x, w = (builder.input(node, role) for role in ("data", "weight"))
    y, z = builder.output(node), builder.output(node, "convolved")
    way = _way(builder, node, x)
    grid = way.grid(builder.gpu.num_multiprocessors)
    builder.launch(node, "conv3x3.cu", builder.kernel("norm_conv3x3"), grid, way.BLOCK,
                   Tiled(In(x), way.padded_rows), Tiled(In(w), way.WEIGHTS), Tiled(Out(y), way.image_rows),
                   Tiled(Out(z), way.image_rows), *before(builder, node), Out(builder.output(node, "sums")),
                   builder.partials(3 * CHANNELS * grid[1]), builder.tickets, way.images,
                   shared_bytes=way.shared_bytes, flops=builder.problem("fprop", node, x, w, z).flops)


def dgrad(builder: Builder, node: Node) -> None:
    """The gradient of the data."""
    dy, w, dx = builder.input(node, "out_grad"), builder.input(node, "weight"), builder.output(node)
    way = _way(builder, node, dx)
    builder.launch(node, "conv3x3.cu", builder.kernel("conv3x3_dgrad"), way.grid(builder.gpu.num_multiprocessors),
                   way.BLOCK, Tiled(In(dy), way.padded_rows), Tiled(In(w), way.WEIGHTS), Tiled(Out(dx), way.image_rows),
                   way.images, shared_bytes=way.shared_bytes, flops=builder.problem("dgrad", node, dx, w, dy).flops)


def dgrad_reduce(builder: Builder, node: Node) -> None:
    """The same, masked, and the sums of the BatchNorm that made the data."""
    dy, w, x, dz = (*(builder.input(node, role) for role in ("conv_grad", "weight", "data")),
                    builder.output(node, "masked_grad"))
    way = _way(builder, node, x, reduces=True)
    norm = (In(builder.input(node, role)) for role in ("saved", "gamma", "beta"))
    sums = (Out(builder.output(node, role)) for role in ("gamma_grad", "beta_grad"))
    grid = way.grid(builder.gpu.num_multiprocessors)
    builder.launch(node, "conv3x3.cu", builder.kernel("conv3x3_dgrad_reduce"), grid, way.BLOCK,
                   Tiled(In(dy), way.padded_rows), Tiled(In(w), way.WEIGHTS), Tiled(In(x), way.image_rows),
                   Tiled(Out(dz), way.image_rows), *norm, *sums, builder.partials(2 * CHANNELS * grid[1]),
                   builder.tickets, way.images, shared_bytes=way.shared_bytes,
                   flops=builder.problem("dgrad", node, dz, w, dy).flops)


LAUNCHES: Launches = {"Conv3x3Relu": forward, "Conv3x3Statistics": forward, "BatchNormReluConv3x3": norm_forward,
                "Conv3x3Dgrad": dgrad, "Conv3x3DgradReduce": dgrad_reduce}
