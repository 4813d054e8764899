"""3x3 convolutions from 64 to 64 channels, as in ResNet's stage 1. In inference with bias and ReLU; in training with
the sums of their output, and optionally the BatchNorm + ReLU before them; and the gradient of their data,

    before    dy, weight -> ConvolutionDgrad
    after     dy, weight -> Conv3x3Dgrad

which can include the first half of the backward pass of the BatchNorm + ReLU that made the data:

    before    dy, weight -> ConvolutionDgrad -> dx
              dx, x, ... -> BatchNormReluBackwardReduce `r` -> dgamma, dbeta
              dx, x, ... -> BatchNormReluBackwardApply `b`
    after     dy, weight, x, ... -> Conv3x3DgradReduce `r` -> dgamma, dbeta, dz
              dz, x, ... -> BatchNormBackwardApply `b`

The kernels are for 16-bit types and Hopper GPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from graph_passes.candidates import Candidate, Candidates, form
from graph_passes.executors.cuda.builder import Builder, Launches, require, require_hopper
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import Size
from graph_passes.executors.cuda.kernels.batch_norm import (
    before,
    convolutions_after,
    from_masked,
    relu_reductions,
    require_gamma,
    with_conv,
)
from graph_passes.executors.cuda.kernels.conv1x1_forward import SHARED_BYTES
from graph_passes.executors.cuda.kernels.conv1x1_statistics import NORM_CONV, norm_body
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators import Operator, Shape, window
from graph_passes.operators.base import DATA_SHAPE
from graph_passes.operators.batch_norm import ATTRIBUTES, RUNNING
from graph_passes.operators.body import Body
from graph_passes.operators.convolution import CONVOLUTION, convolution_body

_CUDA = Declarations("conv3x3.cu")
CHANNELS, TAPS = _CUDA.values("CHANNELS", "TAPS")
PIXEL_BYTES = 2 * CHANNELS
CONTROL_BYTES = _CUDA.sizeof("Control")




def is_3x3(convolution: Node) -> bool:
    """Whether the convolution (or the convolution whose gradient this node is) is 3x3 with stride and padding 1 in a
    16-bit type.
    """
    return (window(convolution) == ((3, 3), (1, 1), (1, 1), (1, 1)) and convolution["layout"] == "NHWC"
            and convolution["num_group"] == 1 and convolution.attrs.get("dtype") in ("float16", "bfloat16"))


def is_narrow(convolution: Node) -> bool:
    """Whether the node is a convolution by `is_3x3` with 64 filters."""
    return is_3x3(convolution) and convolution["num_filter"] == CHANNELS


def norm_conv3x3(table: Candidates, norm: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a BatchNormReluApply `norm`."""
    for convolution in convolutions_after(table, norm, is_narrow):
        yield with_conv("NormConv3x3", norm, convolution)


def conv3x3_dgrad(table: Candidates, dgrad: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a ConvolutionDgrad `dgrad`."""
    if not is_narrow(dgrad.node) or dgrad["data_shape"][3] != CHANNELS:
        return
    yield dgrad.node.replace(op="Conv3x3Dgrad")
    for reduction in relu_reductions(table, dgrad.output("data_grad")):
        norm = (reduction.input(role) for role in ("data", "gamma", "saved", "beta"))
        yield reduction.node.derive("Conv3x3DgradReduce", reduction.node.name, (*dgrad.node.inputs, *norm),
                                    **dgrad.node.attrs)


# --- what is computed ---


def _dgrad_reduce_body(b: Body) -> list[Any]:
    gradient = b.through_relu(b.dgrad(b["conv_grad"], b["weight"]))
    return [*b.reduced(gradient), gradient]


# --- division of the work ---


class TiledImages(ctypes.Structure):
    """`TiledImages` of kernels/conv3x3.cu."""

    _fields_ = _CUDA.fields("TiledImages")


@dataclass(frozen=True)
class Conv3x3:
    """How the kernels of conv3x3.cu divide images (N, H, W, 64) into tiles of whole rows. `reduces`: with the sums of a
    gradient. Each team then has one more slot, which receives x and is overwritten by the gradient."""

    BLOCK: ClassVar[Size] = (_CUDA.value("THREADS"), 1, 1)
    # Pixels multiplied at once, including those in the columns of zeros.
    PIXELS: ClassVar[int] = _CUDA.value("8 * GROUPS")
    MAX_PLACES: ClassVar[int] = _CUDA.value("MAX_PLACES")
    TEAMS: ClassVar[int] = _CUDA.value("TEAMS")
    WEIGHTS: ClassVar[Tiling] = Tiling.of_matrix(CHANNELS, TAPS * CHANNELS, (CHANNELS, CHANNELS))

    shape: Shape
    reduces: bool = False

    @property
    def pitch(self) -> int:
        """Pixels of a row in shared memory: the image's pixels, and one pixel of zeros on each side."""
        return self.shape[2] + 2

    @property
    def rows(self) -> int:
        """Rows of a tile. Zeros after the last pixel of a tile are not needed."""
        return min(self.shape[1], (self.PIXELS + 2) // self.pitch)

    @property
    def place_bytes(self) -> int:
        """Bytes of a tile's slot in shared memory: all pixels up to the last pixel that the last tap reads, and at
        least one pixel more.
        """
        return ((2 * self.pitch + 2 + self.PIXELS) // 8 + 1) * 8 * PIXEL_BYTES

    @property
    def places(self) -> int:
        return min(self.MAX_PLACES, (SHARED_BYTES - self._kept_bytes) // self.place_bytes)

    @property
    def _kept_bytes(self) -> int:
        """Bytes of shared memory in use besides the tiles' slots."""
        results = self.TEAMS * self.PIXELS * PIXEL_BYTES if self.reduces else 0
        return CONTROL_BYTES + results + TAPS * CHANNELS * PIXEL_BYTES

    @property
    def fits(self) -> bool:
        """Whether shared memory has room for a tile of each of the two teams."""
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
        """The view of the tensor that is read: each row includes one pixel before the first pixel and one after the
        last.
        """
        return self._tiling(self.pitch)

    @property
    def image_rows(self) -> Tiling:
        """The view of the tensor that is written, and of tensors read beside it."""
        return self._tiling(self.shape[2])

    def _tiling(self, pixels: int) -> Tiling:
        images, height, width, channels = self.shape
        return Tiling((images * height, width, channels), (width * channels, channels), (1, pixels, channels))


# --- launches ---


def _division(builder: Builder, node: Node, x: Buffer, reduces: bool = False) -> Conv3x3:
    """The division of the images into tiles. Raises GraphError if the kernels do not support the GPU or these images.
    """
    require_hopper(builder, node)
    require(x.shape[3] == CHANNELS, node, f"has {x.shape[3]} channels: its kernel takes {CHANNELS}")
    geometry = Conv3x3(x.shape, reduces)
    require(geometry.fits, node, f"has rows of {x.shape[2]} pixels, of which too few fit into shared memory")
    return geometry


def forward(builder: Builder, node: Node) -> None:
    """Launch the convolution with bias and ReLU, or with the sums of its output."""
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    geometry = _division(builder, node, x)
    sums = builder.output(node, "sums") if node.op == "Conv3x3ForwardStatistics" else None
    bias = None if sums else builder.input(node, "bias")
    grid = geometry.grid(builder.gpu.num_multiprocessors)
    builder.launch(node, "conv3x3.cu", builder.kernel("conv3x3_forward", sums is not None, bias is not None), grid,
                   geometry.BLOCK, Tiled(In(x), geometry.padded_rows), Tiled(In(w), geometry.WEIGHTS),
                   Tiled(Out(y), geometry.image_rows), In(bias), Out(sums),
                   builder.partials(3 * CHANNELS * grid[1] if sums else 0), builder.tickets, geometry.images,
                   shared_bytes=geometry.shared_bytes, flops=builder.problem("fprop", node, x, w, y).flops)


def norm_forward(builder: Builder, node: Node) -> None:
    """Launch BatchNorm + ReLU, and the convolution of its output with the sums of that output."""
    require_gamma(node)
    x, w = (builder.input(node, role) for role in ("data", "weight"))
    y, z = builder.output(node), builder.output(node, "convolved")
    geometry = _division(builder, node, x)
    grid = geometry.grid(builder.gpu.num_multiprocessors)
    builder.launch(node, "conv3x3.cu", builder.kernel("norm_conv3x3"), grid, geometry.BLOCK,
                   Tiled(In(x), geometry.padded_rows), Tiled(In(w), geometry.WEIGHTS),
                   Tiled(Out(y), geometry.image_rows), Tiled(Out(z), geometry.image_rows), *before(builder, node),
                   Out(builder.output(node, "sums")), builder.partials(3 * CHANNELS * grid[1]), builder.tickets,
                   geometry.images, shared_bytes=geometry.shared_bytes,
                   flops=builder.problem("fprop", node, x, w, z).flops)


def dgrad(builder: Builder, node: Node) -> None:
    """Launch the gradient of the data."""
    dy, w, dx = builder.input(node, "out_grad"), builder.input(node, "weight"), builder.output(node)
    geometry = _division(builder, node, dx)
    builder.launch(node, "conv3x3.cu", builder.kernel("conv3x3_dgrad"), geometry.grid(builder.gpu.num_multiprocessors),
                   geometry.BLOCK, Tiled(In(dy), geometry.padded_rows), Tiled(In(w), geometry.WEIGHTS),
                   Tiled(Out(dx), geometry.image_rows), geometry.images, shared_bytes=geometry.shared_bytes,
                   flops=builder.problem("dgrad", node, dx, w, dy).flops)


def dgrad_reduce(builder: Builder, node: Node) -> None:
    """Launch the masked gradient of the data, and the sums of the BatchNorm that made the data."""
    dy, w, x, dz = (*(builder.input(node, role) for role in ("conv_grad", "weight", "data")),
                    builder.output(node, "masked_grad"))
    geometry = _division(builder, node, x, reduces=True)
    norm = (In(builder.input(node, role)) for role in ("saved", "gamma", "beta"))
    sums = (Out(builder.output(node, role)) for role in ("gamma_grad", "beta_grad"))
    grid = geometry.grid(builder.gpu.num_multiprocessors)
    builder.launch(node, "conv3x3.cu", builder.kernel("conv3x3_dgrad_reduce"), grid, geometry.BLOCK,
                   Tiled(In(dy), geometry.padded_rows), Tiled(In(w), geometry.WEIGHTS),
                   Tiled(In(x), geometry.image_rows), Tiled(Out(dz), geometry.image_rows), *norm, *sums,
                   builder.partials(2 * CHANNELS * grid[1]), builder.tickets, geometry.images,
                   shared_bytes=geometry.shared_bytes, flops=builder.problem("dgrad", node, dz, w, dy).flops)


OPERATORS = (
    Operator("Conv3x3ForwardRelu", ("data", "weight", "bias"), attrs=CONVOLUTION, form_of="ConvolutionRelu",
             body=partial(convolution_body, relu=True), forward="Convolution", fused=True),
    Operator("Conv3x3ForwardStatistics", ("data", "weight"), attrs=CONVOLUTION, outputs=("output", "sums"),
             form_of="ConvolutionStatistics", body=lambda b: b.with_sums(b.conv(b["data"], b["weight"])),
             forward="Convolution", fused=True),
    # Neighbouring tiles are computed from the same data, so the data must not be overwritten.
    Operator("NormConv3x3", ("data", "sums", "gamma", "beta", *RUNNING, "weight"), attrs=NORM_CONV,
             outputs=("output", "saved", *RUNNING, "convolved", "sums"), aux=RUNNING, body=norm_body,
             forward="BatchNormRelu", fused=True),
    Operator("Conv3x3Dgrad", ("out_grad", "weight"), attrs=CONVOLUTION | DATA_SHAPE, outputs=("data_grad",),
             form_of="ConvolutionDgrad", body=lambda b: [b.dgrad(b["out_grad"], b["weight"])], forward="Convolution",
             fused=True),
    Operator("Conv3x3DgradReduce", ("conv_grad", "weight", "data", "gamma", "saved", "beta"),
             attrs=CONVOLUTION | ATTRIBUTES | DATA_SHAPE, outputs=("gamma_grad", "beta_grad", "masked_grad"),
             body=_dgrad_reduce_body, forward="Convolution", fused=True),
)
RULES = (("ConvolutionRelu", form("Conv3x3ForwardRelu", is_narrow)),
         ("ConvolutionStatistics", form("Conv3x3ForwardStatistics", is_narrow)), ("BatchNormReluApply", norm_conv3x3),
         ("ConvolutionDgrad", conv3x3_dgrad), ("Conv3x3DgradReduce", from_masked))
LAUNCHES: Launches = {"Conv3x3ForwardRelu": forward, "Conv3x3ForwardStatistics": forward, "NormConv3x3": norm_forward,
                      "Conv3x3Dgrad": dgrad, "Conv3x3DgradReduce": dgrad_reduce}
