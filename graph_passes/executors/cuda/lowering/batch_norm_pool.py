"""The BatchNormRelu and the max pooling of ResNet's stem as one, in training: the network's largest activation and its
gradient are not written."""

from __future__ import annotations

import ctypes
import math

from graph_passes.executors.cuda.kernels import count
from graph_passes.executors.cuda.lowering.builder import APPLY_BLOCK, REDUCE_BLOCK, Builder, rows_and_channels
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators import window
from graph_passes.operators_backward import forward_node


class Image(ctypes.Structure):
    """`Image` of batch_norm_pool.cuh."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("height", "width", "out_height", "out_width"))

    @classmethod
    def of(cls, x: Buffer, y: Buffer) -> Image:
        """From a tensor to another one, both NHWC."""
        return cls(*x.shape[1:3], *y.shape[1:3])


def pool_behind(builder: Builder, node: Node) -> Node | None:
    """The 3x3 max pooling with stride 2 that alone reads a BatchNormRelu in training, as in ResNet's stem."""
    readers = builder.readers(node)
    if node.op != "BatchNormReluTrain" or len(readers) != 1 or readers[0].op != "MaxPoolingTrain":
        return None
    size = window(forward_node(readers[0]))
    return readers[0] if size[:3] == ((3, 3), (2, 2), (1, 1)) else None


def apply(builder: Builder, node: Node, pool: Node, sums: Buffer) -> None:
    """The output of the pooling, from the input and its sums."""
    x, gamma, beta, running_mean, running_var = (builder.input(node, index) for index in range(5))
    rows, channels = rows_and_channels(node, x)
    saved = builder.output(node, 1)
    y, winner = builder.output(pool, 0), builder.output(pool, 1)
    x_winner = Buffer(f"{pool.name}:x_winner", y.shape, y.dtype)
    builder.fusions.pooled[pool.name] = x_winner
    outputs = math.prod(y.shape[:-1])
    builder.launch(node, "batch_norm_pool.cu", builder.kernel("batch_norm_relu_max_pool"),
                   builder.grid(outputs, channels), APPLY_BLOCK,
                   (x, sums, gamma, beta, y, winner, x_winner, saved, running_mean, running_var,
                    ctypes.c_float(node["eps"]), ctypes.c_float(node["momentum"]), Image.of(x, y), count(rows),
                    count(outputs), ctypes.c_int(channels)),
                   (x, sums, gamma, beta), (y, winner, x_winner, saved))


def backward_reduce(builder: Builder, node: Node, pool: Node) -> Buffer:
    """The sums of the BatchNorm's backward pass; `pool` is the MaxPoolingBackward. Returns dz, the gradient of the
    pooling's output."""
    x, saved = builder.input(node, 1), builder.input(node, 3)
    dgamma, dbeta = builder.output(node, 1), builder.output(node, 2)
    dy, winner = builder.input(pool, 0), builder.input(pool, 1)
    dy2 = None if pool["single_grad"] else builder.input(pool, 2)
    x_winner = builder.fusions.pooled[pool.inputs[1].node]
    _, channels = rows_and_channels(node, x)
    outputs = math.prod(dy.shape[:-1])
    dz = Buffer(f"{pool.name}:dz", dy.shape, dy.dtype) if dy2 else dy
    builder.launch(node, "batch_norm_pool.cu",
                   builder.kernel("batch_norm_relu_max_pool_backward_reduce", dy2 is not None),
                   builder.reduce_grid(outputs, channels), REDUCE_BLOCK,
                   (x_winner, dy, dy2, winner, dz, saved, dgamma, dbeta, builder.partials, builder.persistent.tickets,
                    count(outputs), ctypes.c_int(channels)),
                   (x_winner, dy, dy2, winner, saved), (dz if dy2 else None, dgamma, dbeta),
                   in_place=(dy, dz) if dy2 else None)
    return dz


def backward_apply(builder: Builder, node: Node, pool: Node, dz: Buffer) -> None:
    """The gradient of the BatchNorm's input, from dz and the sums."""
    x, gamma, saved = (builder.input(node, index) for index in (1, 2, 3))
    winner = builder.input(pool, 1)
    dx, dgamma, dbeta = (builder.output(node, index) for index in range(3))
    rows, channels = rows_and_channels(node, x)
    squares = x.shape[0] * -(-x.shape[1] // 2) * -(-x.shape[2] // 2)
    builder.launch(node, "batch_norm_pool.cu", builder.kernel("batch_norm_relu_max_pool_backward_apply"),
                   builder.grid(squares, channels, blocks_per_multiprocessor=2), APPLY_BLOCK,
                   (x, dz, winner, dx, saved, gamma, dgamma, dbeta, Image.of(x, dz), count(rows), count(squares),
                    ctypes.c_int(channels)),
                   (x, dz, winner, saved, gamma, dgamma, dbeta), (dx,))
