"""The gradient of the weights of 3x3 convolutions over multiples of 64 channels, with stride and padding 1.

    before    dy, data -> ConvolutionWgrad `dw`
    after     dy, data -> Conv3x3Weights `dw`

For 16-bit types, NHWC and Hopper GPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches, require
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import HOPPER, Size
from graph_passes.executors.cuda.kernels.conv1x1_forward import SHARED_BYTES
from graph_passes.executors.cuda.kernels.conv3x3 import is_3x3
from graph_passes.executors.cuda.kernels.norm_backward import sum_parts
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators import Operator, Shape
from graph_passes.operators.convolution import CONVOLUTION

_CUDA = Declarations("conv3x3_weights.cu")
# Channels of the data and of the output per block. A block's part of the gradient then fits into registers.
CHANNELS = _CUDA.value("CHANNELS")


def conv3x3_weights(table: Candidates, wgrad: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a ConvolutionWgrad `wgrad`."""
    data = table.shapes.get(wgrad.input("data"))
    if is_3x3(wgrad.node) and data and not wgrad["num_filter"] % CHANNELS and not data[3] % CHANNELS:
        yield wgrad.node.replace(op="Conv3x3Weights")


class Ring(ctypes.Structure):
    """`Ring` of conv3x3_weights.cu."""

    _fields_ = _CUDA.fields("Ring")


class Conv3x3Weights:
    """How conv3x3_weights.cu divides its work: into consecutive rows of the padded images, and 64 channels of the data
    and of the output's gradient. Rows of both are kept in circular buffers in shared memory."""

    BLOCK: Size = (_CUDA.value("THREADS"), 1, 1)
    STEP, MAX_ROWS = _CUDA.values("STEP", "MAX_ROWS")
    MAX_PITCH = 256  # longest side of a TMA copy
    CONTROL_BYTES = _CUDA.sizeof("Control")
    # least number of rows of a block: with fewer rows, the additional parts cost more time than the parallelism saves
    LEAST_STEPS = 32

    def __init__(self, shape: Shape, filters: int, num_multiprocessors: int) -> None:
        """`shape`: the shape of the data, (N, H, W, C)."""
        images, height, width, channels = self.shape = shape
        pitch = width + 1
        row_bytes = 2 * pitch * CHANNELS * 2  # slots of both circular buffers
        repeated = -(-(self.STEP + 1) // pitch)  # a product reads this many pixels past the wrap-around
        rows = min(self.MAX_ROWS, (SHARED_BYTES - self.CONTROL_BYTES) // row_bytes - repeated)
        in_use = -(-(2 * self.STEP - 1) // pitch) + 3  # rows of x that two products in flight read
        self.fits = rows > in_use and pitch <= self.MAX_PITCH
        self.ring = Ring(rows, repeated, pitch)
        self.shared_bytes = self.CONTROL_BYTES + (rows + repeated) * row_bytes
        self.padded_rows = images * (height + 1) - 1
        products = channels // CHANNELS * (filters // CHANNELS)
        blocks = min(num_multiprocessors // products, self.padded_rows * pitch // (self.LEAST_STEPS * self.STEP))
        self.grid: Size = (max(1, blocks), products, 1)

    def tiling(self, channels: int) -> Tiling:
        """The TMA tiling of images of this size with this many channels."""
        images, height, width, _ = self.shape
        return Tiling((images * height, width, channels), (width * channels, channels), (1, width + 1, CHANNELS))


def wgrad(builder: Builder, node: Node) -> None:
    """Launch the gradient: blocks leave parts of the sums, and a second launch adds them."""
    require(builder.gpu.capability == HOPPER, node, "has a kernel that only Hopper's instructions can compute")
    dy, x, dw = builder.input(node, "out_grad"), builder.input(node, "data"), builder.output(node)
    geometry = Conv3x3Weights(x.shape, dy.shape[3], builder.gpu.num_multiprocessors)
    require(geometry.fits, node, f"has rows of {x.shape[2]} pixels, of which too few fit into shared memory")
    parts = Buffer(f"{node.name}:parts", (geometry.grid[0], *dw.shape), "float32")
    builder.launch(node, "conv3x3_weights.cu", builder.kernel("conv3x3_weights"), geometry.grid, geometry.BLOCK,
                   Tiled(In(x), geometry.tiling(x.shape[3])), Tiled(In(dy), geometry.tiling(dy.shape[3])), Out(parts),
                   *map(ctypes.c_int, (x.shape[1], x.shape[3], geometry.padded_rows)), geometry.ring,
                   shared_bytes=geometry.shared_bytes, flops=builder.problem("wgrad", node, x, dw, dy).flops)
    sum_parts(builder, node, parts, dw)


OPERATORS = (
    Operator("Conv3x3Weights", ("out_grad", "data"), attrs=CONVOLUTION, outputs=("weight_grad",),
             form_of="ConvolutionWgrad", body=lambda b: [b.wgrad(b["out_grad"], b["data"])], forward="Convolution",
             fused=True),
)
RULES = (("ConvolutionWgrad", conv3x3_weights),)
LAUNCHES: Launches = {"Conv3x3Weights": wgrad}
