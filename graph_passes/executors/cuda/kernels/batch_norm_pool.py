"""The BatchNormRelu and the max pooling of ResNet's stem as one, in training."""

from __future__ import annotations

import ctypes

from graph_passes.executors.cuda.builder import APPLY_BLOCK, REDUCE_BLOCK, Builder, Launches, rows_and_channels
from graph_passes.executors.cuda.kernel_library import count
from graph_passes.executors.cuda.kernels.batch_norm import about_mean, require_gamma
from graph_passes.executors.cuda.operands import In, InOut, Out, Scratch
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node

STRIP = 8  # of batch_norm_pool.cu: rows of the output that a thread makes


class Image(ctypes.Structure):
    """`Image` of batch_norm_pool.cuh."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("height", "width", "out_height", "out_width"))

    @classmethod
    def of(cls, x: Buffer, y: Buffer) -> Image:
        """From a tensor to another one, both NHWC."""
        return cls(*x.shape[1:3], *y.shape[1:3])


def apply(builder: Builder, node: Node) -> None:
    """The output of the pooling, from the BatchNorm's input and its sums."""
    require_gamma(node)
    x, sums, y = builder.input(node, "data"), builder.input(node, "sums"), builder.output(node)
    rows, channels = rows_and_channels(node, x)
    images, height, width, _ = y.shape
    strips = images * -(-height // STRIP) * width
    builder.launch(node, "batch_norm_pool.cu", builder.kernel("batch_norm_relu_max_pool"),
                   builder.grid(strips, channels, blocks_per_multiprocessor=3), APPLY_BLOCK,
                   In(x), In(sums), about_mean(sums), In(builder.input(node, "gamma")), In(builder.input(node, "beta")),
                   Out(y),
                   *(Out(builder.output(node, role)) for role in ("winner", "data_at_winner", "saved")),
                   *(InOut(builder.input(node, role)) for role in ("moving_mean", "moving_var")),
                   ctypes.c_float(node["eps"]), ctypes.c_float(node["momentum"]), Image.of(x, y), count(rows),
                   count(strips), ctypes.c_int(channels))


def backward_reduce(builder: Builder, node: Node) -> None:
    """The sums of the BatchNorm's backward pass; of two gradients of the pooling's output also the masked sum."""
    dy, dy2 = builder.input(node, "out_grad"), builder.optional_input(node, "out_grad_2", "single_grad")
    outputs, channels = rows_and_channels(node, dy)
    dz = Out(builder.output(node, "masked_grad"), over=dy) if dy2 else Scratch(dy)  # which is not written then
    grid = builder.reduce_grid(outputs, channels)
    builder.launch(node, "batch_norm_pool.cu",
                   builder.kernel("batch_norm_relu_max_pool_backward_reduce", dy2 is not None), grid, REDUCE_BLOCK,
                   In(builder.input(node, "data_at_winner")), In(dy), In(dy2), In(builder.input(node, "winner")), dz,
                   In(builder.input(node, "saved")), Out(builder.output(node, "gamma_grad")),
                   Out(builder.output(node, "beta_grad")), builder.partials(2 * channels * grid[1]), builder.tickets,
                   count(outputs), ctypes.c_int(channels))


def backward_apply(builder: Builder, node: Node) -> None:
    """The gradient of the BatchNorm's input, from the masked gradient and the sums."""
    x, dz = builder.input(node, "data"), builder.input(node, "out_grad")
    rows, channels = rows_and_channels(node, x)
    squares = x.shape[0] * -(-x.shape[1] // 2) * -(-x.shape[2] // 2)
    builder.launch(node, "batch_norm_pool.cu", builder.kernel("batch_norm_relu_max_pool_backward_apply"),
                   builder.grid(squares, channels, blocks_per_multiprocessor=2), APPLY_BLOCK,
                   In(x), In(dz), In(builder.input(node, "winner")), Out(builder.output(node)),
                   *(In(builder.input(node, role)) for role in ("saved", "gamma", "gamma_grad", "beta_grad")),
                   Image.of(x, dz), count(rows), count(squares), ctypes.c_int(channels))


LAUNCHES: Launches = {
    "BatchNormPoolApply": apply,
    "BatchNormPoolBackwardReduce": backward_reduce,
    "BatchNormPoolBackwardApply": backward_apply,
}
