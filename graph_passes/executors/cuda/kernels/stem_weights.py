"""The gradient of the weights of ResNet's first convolution in 16-bit types, fused with the gradient of its output, on
Hopper.

    before    dy, winner, x -> BatchNormReluMaxPoolBackwardApply -> dx;  dx, image -> ConvolutionWgrad `dw`
    after     dy, winner, x, image -> StemWeights `dw`
"""

from __future__ import annotations

import ctypes
import dataclasses

from graph_passes.candidates import form
from graph_passes.executors.cuda.builder import Builder, Launches, require, require_hopper
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import Size
from graph_passes.executors.cuda.kernels.conv1x1_forward import SHARED_BYTES
from graph_passes.executors.cuda.kernels.stem import SHARE, STEM_WGRAD, Wgrad, sum_shares
from graph_passes.executors.cuda.operands import In, Tiled
from graph_passes.graph import Node
from graph_passes.operators import Shape

_CUDA = Declarations("stem_weights.cu")


class Layout(ctypes.Structure):
    """`Layout` of stem_weights.cu."""

    _fields_ = _CUDA.fields("Layout")


class StemWeights:
    """How stem_weights.cu divides its work: an item is a pair of rows of the gradient of the convolution's output. A
    stage of shared memory holds the operands of one item."""

    BLOCK: Size = (_CUDA.value("THREADS"), 1, 1)
    ROWS, IN_ROWS, STEP, MAX_STAGES = _CUDA.values("OUT_ROWS", "IN_ROWS", "STEP", "MAX_STAGES")
    MAX_PIXELS = 256  # longest side of a TMA copy
    CONTROL_BYTES = _CUDA.sizeof("Control")

    def __init__(self, shape: Shape, num_multiprocessors: int) -> None:
        """`shape`: the shape of the convolution's output, (N, OH, OW, 64)."""
        images, height, width, filters = shape
        pixels, pooled_width = -(-width // self.STEP) * self.STEP, -(-width // 2)
        gradient, image = self.ROWS * pixels * filters * 2, self.IN_ROWS * (pixels + 3) * 16
        pooled = 2 * pooled_width * filters * 3  # bytes of two rows of 2-byte values, and of the winners
        stage_bytes = -(-(gradient + image + pooled) // 1024) * 1024
        stages = min(self.MAX_STAGES, (SHARED_BYTES - self.CONTROL_BYTES) // stage_bytes)
        self.fits = stages >= 2 and pixels <= self.MAX_PIXELS
        self.layout = Layout(stages, stage_bytes // 16, pixels)
        self.shared_bytes = self.CONTROL_BYTES + stages * stage_bytes
        self.items = images * -(-height // self.ROWS)
        self.grid: Size = (min(num_multiprocessors, self.items), 1, 1)
        self.tiling = Tiling((images * height, width, filters), (width * filters, filters),
                             (self.ROWS, pixels, filters))


def launch(builder: Builder, node: Node) -> None:
    x, dz, image = (builder.input(node, role) for role in ("data", "out_grad", "image"))
    given = Wgrad.of(builder, node)
    require_hopper(builder, node)
    division = StemWeights(x.shape, builder.gpu.num_multiprocessors)
    require(division.fits, node, f"has rows of {image.shape[2]} pixels, of which too few fit into shared memory")
    blocks = division.grid[0]
    shares = builder.partials(blocks * SHARE)
    builder.launch(node, "stem_weights.cu", builder.kernel("stem_weights"), division.grid, division.BLOCK,
                   Tiled(In(x), division.tiling), In(image), In(dz), *given.of_norm, shares, *given.sizes,
                   ctypes.c_int(division.items), division.layout, shared_bytes=division.shared_bytes, flops=given.flops)
    sum_shares(builder, node, shares, blocks)


OPERATORS = (dataclasses.replace(STEM_WGRAD, name="StemWeights", form_of="StemWgrad", plain=False),)
RULES = (("StemWgrad", form("StemWeights")),)
LAUNCHES: Launches = {"StemWeights": launch}
