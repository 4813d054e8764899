"""ResNet's first convolution in 16-bit types, in training: forward with the sums of its output, and the gradient of its
weights fused with the gradient of its output.

    before    image, weight -> Convolution `conv` -> x -> BatchNormStatistics -> sums
    after     image, weight -> StemFprop `conv` -> x, sums

    before    dy, winner, x -> BatchNormReluMaxPoolBackwardApply -> dx;  dx, image -> ConvolutionWgrad `dw`
    after     dy, winner, x, image -> StemWgrad `dw`

The kernels are for 7x7 with stride 2 from 3 or 4 channels to 64, in NHWC. cuDNN has no statistics for 4 channels and,
in bfloat16, no fast engine either. The gradient of the network's largest tensor is not written. Hopper GPUs have their
own kernels (stem_forward.cu, stem_weights.cu).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches, require, rows_and_channels
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import Size, count
from graph_passes.executors.cuda.kernels.batch_norm_relu_max_pool import (
    BACKWARD,
    Image,
    backward_apply_body,
    backward_apply_shapes,
    compute_backward_apply,
)
from graph_passes.executors.cuda.kernels.batch_norm_relu_max_pool import WINDOW as POOLING_WINDOW
from graph_passes.executors.cuda.kernels.convolution import with_statistics
from graph_passes.executors.cuda.operands import In, Out, Scratch
from graph_passes.graph import Node
from graph_passes.operators import Operator, window
from graph_passes.operators.base import Array, NodeView, Shape, Shapes, known
from graph_passes.operators.batch_norm import ATTRIBUTES
from graph_passes.operators.body import Body
from graph_passes.operators.convolution import CONVOLUTION, convolution_shapes, convolution_wgrad

_CUDA = Declarations("stem.cu")
FILTERS, SIZE = _CUDA.values("FILTERS", "SIZE")
WINDOW = ((SIZE, SIZE), (2, 2), (3, 3), (1, 1))  # kernel, stride, pad, dilation
CHANNELS = (3, 4)  # channels of the images; three are padded to four
STEM_BLOCK: Size = (_CUDA.value("THREADS"), 1, 1)
OUT_ROWS, IN_ROWS = _CUDA.values("OUT_ROWS", "IN_ROWS")  # rows of an item of work
STATIC_BYTES = 3100  # bytes of static shared memory, which `stem_work` does not count
SHARE = FILTERS * SIZE * _CUDA.value("ROW_OF_K")  # floats of the weights' gradient that each block writes




def stem_fprop(table: Candidates, sums: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a BatchNormStatistics `sums`."""
    for convolution in with_statistics(table, sums):
        if _fits(convolution, table.shapes.get(convolution.node.inputs[0])):
            yield convolution.node.derive("StemFprop", convolution.node.name, convolution.node.inputs)


def stem_wgrad(table: Candidates, wgrad: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a ConvolutionWgrad `wgrad`."""
    image = wgrad.input("data")
    if _fits(wgrad, table.shapes.get(image)):
        for before in table.makers(wgrad.input("out_grad"), "BatchNormReluMaxPoolBackwardApply"):
            yield before.node.derive("StemWgrad", wgrad.node.name, (*before.node.inputs, image), **wgrad.node.attrs)


def _fits(convolution: Candidate, data: Shape | None) -> bool:
    node = convolution.node
    return (data is not None and window(node) == WINDOW and node["num_filter"] == FILTERS and data[3] in CHANNELS
            and data[2] % 2 == 0 and node["layout"] == "NHWC" and "dtype" in node.attrs)


# --- what is computed ---


def _stem_wgrad(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    image = known(node, shapes, 7)
    weight, data = convolution_shapes(node, image)
    inputs, _ = backward_apply_shapes(_pooling_of(node), [None, None, data, *[None] * 4])
    return [*inputs, image], [weight]


def _pooling_of(node: NodeView) -> NodeView:
    """The gradient that a StemWgrad computes internally, as a node without inputs."""
    attrs = {**POOLING_WINDOW, "layout": node["layout"], **{name: node[name] for name in ATTRIBUTES}}
    pooling: NodeView = node.replace(op="BatchNormReluMaxPoolBackwardApply", attrs=attrs)
    return pooling


def _compute_stem_wgrad(node: NodeView, *inputs: Array) -> list[Array]:
    *of_norm, image = inputs
    (dy,) = compute_backward_apply(_pooling_of(node), *of_norm)
    return [convolution_wgrad(node, dy, image)]


def _wgrad_body(b: Body) -> list[Any]:
    (gradient,) = backward_apply_body(b)
    return [b.wgrad(gradient, b["image"])]


# --- launches ---


def stem_work(out_shape: Shape) -> tuple[int, int, int, int]:
    """How stem.cu divides an output (N, H, W, 64). Returns work items, tiles of 16 pixels in a row, and the bytes of
    shared memory for an item's rows of the image and of the output's gradient."""
    images, height, width, filters = out_shape
    tiles = -(-width // 16)
    return (images * -(-height // OUT_ROWS), tiles, IN_ROWS * (16 * tiles + 3) * 16,
            OUT_ROWS * 16 * tiles * filters * 2)


def _require_support(builder: Builder, node: Node, out_shape: Shape) -> None:
    """Raise GraphError if these kernels do not support the GPU or need more shared memory than the GPU has."""
    _, _, image_bytes, gradient_bytes = stem_work(out_shape)
    needed = image_bytes + max(image_bytes, gradient_bytes) + STATIC_BYTES
    require(builder.gpu.capability >= (8, 0) and needed <= builder.gpu.max_shared_bytes, node,
            "is not for this GPU's kernels of the stem")


def fprop(builder: Builder, node: Node) -> None:
    """Launch the convolution with the sums of its output."""
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    _require_support(builder, node, y.shape)
    items, tiles, image_bytes, _ = stem_work(y.shape)
    blocks = min(builder.gpu.num_multiprocessors, items)
    builder.launch(node, "stem.cu", builder.kernel("stem_fprop"), (blocks, 1, 1), STEM_BLOCK, In(x), In(w), Out(y),
                   Out(builder.output(node, "sums")), builder.partials(blocks * FILTERS * 3), builder.tickets,
                   Image.of(x, y), count(items), ctypes.c_int(tiles), shared_bytes=2 * image_bytes,
                   flops=builder.problem("fprop", node, x, w, y).flops)


class Wgrad(NamedTuple):
    """Arguments of the weight-gradient kernels besides x, image and dz."""

    of_norm: list[In]
    sizes: tuple[Image, Image, ctypes.c_uint32]
    flops: int

    @classmethod
    def of(cls, builder: Builder, node: Node) -> Wgrad:
        x, dz, image = (builder.input(node, role) for role in ("data", "out_grad", "image"))
        rows, _ = rows_and_channels(node, x)
        of_norm = [In(builder.input(node, role)) for role in ("winner", "saved", "gamma", "gamma_grad", "beta_grad")]
        return cls(of_norm, (Image.of(image, x), Image.of(x, dz), count(rows)),
                   builder.problem("wgrad", node, image, builder.output(node), x).flops)


def wgrad(builder: Builder, node: Node) -> None:
    """Launch the gradient of the weights, including the gradient of the convolution's output."""
    x, dz, image = (builder.input(node, role) for role in ("data", "out_grad", "image"))
    given = Wgrad.of(builder, node)
    _require_support(builder, node, x.shape)
    items, tiles, image_bytes, gradient_bytes = stem_work(x.shape)
    blocks = min(2 * builder.gpu.num_multiprocessors, items)
    shares = builder.partials(blocks * SHARE)
    builder.launch(node, "stem.cu", builder.kernel("stem_wgrad"), (blocks, 1, 1), STEM_BLOCK, In(image), In(x),
                   In(dz), *given.of_norm, shares, *given.sizes, count(items), ctypes.c_int(tiles),
                   shared_bytes=image_bytes + gradient_bytes, flops=given.flops)
    sum_shares(builder, node, shares, blocks)


def sum_shares(builder: Builder, node: Node, shares: Scratch, blocks: int) -> None:
    """Launch the sum of the parts of the gradient that the blocks have written."""
    builder.launch(node, "stem.cu", builder.kernel("stem_wgrad_sum"), (FILTERS * SIZE, 1, 1), (32, 8, 1),
                   shares, Out(builder.output(node)), ctypes.c_int(blocks))


STEM_FPROP = Operator("StemFprop", ("data", "weight"), attrs=CONVOLUTION, outputs=("output", "sums"),
                      body=lambda b: b.with_sums(b.conv(b["data"], b["weight"])), forward="Convolution",
                      plain=True, fused=True)
STEM_WGRAD = Operator("StemWgrad", (*BACKWARD, "image"), _stem_wgrad, _compute_stem_wgrad, CONVOLUTION | ATTRIBUTES,
                      ("weight_grad",), body=_wgrad_body, forward="Convolution", plain=True,
                      fused=True)
OPERATORS = (STEM_FPROP, STEM_WGRAD)
RULES = (("BatchNormStatistics", stem_fprop), ("ConvolutionWgrad", stem_wgrad))
LAUNCHES: Launches = {"StemFprop": fprop, "StemWgrad": wgrad}
