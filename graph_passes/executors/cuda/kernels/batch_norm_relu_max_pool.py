"""BatchNorm + ReLU fused with the 3x3 max pooling with stride 2 of ResNet's stem, in training: both halves. The
network's largest activation and its gradient are not written.

`winner` is the place of the maximum in its window (row * 3 + column), or NOBODY if no value is above 0: ReLU then lets
no gradient through. `data_at_winner` is the data at that place, so that the sums of the backward pass need not search
for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from graph_passes.executors.cuda.builder import (
    APPLY_BLOCK,
    REDUCE_BLOCK,
    Builder,
    Launches,
    padded_rows,
    rows_and_channels,
)
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import count
from graph_passes.executors.cuda.kernels.batch_norm import about_mean, require_gamma
from graph_passes.executors.cuda.operands import In, InOut, Out, Scratch
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import Operator
from graph_passes.operators.base import SECOND_GRAD, SINGLE_GRAD, Array, NodeView, Shape, Shapes, known, total
from graph_passes.operators.batch_norm import (
    ATTRIBUTES,
    RUNNING,
    Statistics,
    channels_of,
    data_gradient,
    gradient_sums,
    running_statistics,
    scaled,
    to_saved,
)
from graph_passes.operators.batch_norm_halves import statistics_of, sums_shape
from graph_passes.operators.body import Body
from graph_passes.operators.pooling import POOLING, max_pooling, max_pooling_backward, pooled_shape
from graph_passes.operators.windows import Places

_CUDA = Declarations("batch_norm_relu_max_pool.cu")
NOBODY = _CUDA.value("NOBODY")  # value of `winner` if no place of the window wins
WINDOW = {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1)}  # attributes of the pooling
STRIP = _CUDA.value("STRIP")  # output rows per thread




def batch_norm_relu_max_pool(graph: Graph) -> Graph:
    """Fuse the halves of a BatchNorm + ReLU with the 3x3 max pooling with stride 2 that is its only reader, in NHWC.

        before    x, sums -> BatchNormReluApply `bn` -> MaxPoolingTrain -> y, winner
        after     x, sums -> BatchNormReluMaxPool `bn` -> y, saved, ..., winner, data_at_winner

        before    dy, winner -> MaxPoolingBackward -> BatchNormReluBackwardReduce, BatchNormReluBackwardApply -> dx
        after     dy, winner, data_at_winner -> BatchNormReluMaxPoolBackwardReduce -> dgamma, dbeta
                  dy, winner, x, dgamma, dbeta -> BatchNormReluMaxPoolBackwardApply -> dx

    The output of BatchNorm + ReLU, the network's largest activation, is not written. Its gradient is not written
    either.
    """
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    for norm in graph:
        pool = graph.sole_reader(Ref(norm.name), "MaxPoolingTrain") if norm.op == "BatchNormReluApply" else None
        if pool is None or not _fits(norm, pool):
            continue
        attrs = {**pool.attrs, **norm.attrs}
        apply = Node("BatchNormReluMaxPool", norm.name, norm.inputs, attrs)
        moved |= {pool.output(role): apply.output(role) for role in ("output", "winner")}
        nodes += [apply, *_both_halves(graph, norm, pool, apply)]
    return graph.replace(nodes, moved)


def _fits(norm: Node, pool: Node) -> bool:
    return (pool["layout"] == "NHWC" and norm["axis"] in (3, -1) and not pool["global_pool"]
            and all(pool[name] == value for name, value in WINDOW.items()))


def _both_halves(graph: Graph, norm: Node, pool: Node, apply: Node) -> list[Node]:
    """Both halves, under the names of the BatchNorm's halves."""
    (back,) = (reader for reader in graph.consumers[pool.output("winner")] if reader.op == "MaxPoolingBackward")
    reduction, old_apply = (next(reader for reader in graph.consumers[norm.output("saved")] if reader.op.endswith(half))
                            for half in ("BackwardReduce", "BackwardApply"))
    dy, _, *second = back.inputs
    winner, at_winner, saved = (apply.output(role) for role in ("winner", "data_at_winner", "saved"))
    sums = Node("BatchNormReluMaxPoolBackwardReduce", reduction.name, (dy, winner, at_winner, saved, *second),
                {**apply.attrs, "single_grad": back["single_grad"]})
    dgamma, dbeta, *dz = sums.refs()
    inputs = (*(dz or [dy]), winner, norm.input("data"), norm.input("gamma"), saved, dgamma, dbeta)
    return [sums, Node("BatchNormReluMaxPoolBackwardApply", old_apply.name, inputs, apply.attrs)]


# --- what is computed ---


def _apply_shapes(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes)
    channels, pooled = channels_of(node, data), pooled_shape(node, data)
    kept = [(2, *channels), channels, channels]
    return [data, sums_shape(shapes[1], channels), *[channels] * 4], [pooled, *kept, pooled, pooled]


def _reduce_shapes(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    pooled = known(node, shapes)
    channels = channels_of(node, pooled)
    second = [] if node["single_grad"] else [pooled]
    return [pooled, pooled, pooled, (2, *channels), *second], [channels, channels, *second]


def backward_apply_shapes(node: NodeView, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    data = known(node, shapes, 2)
    channels, pooled = channels_of(node, data), pooled_shape(node, data)
    return [pooled, pooled, data, channels, (2, *channels), channels, channels], [data]


def _compute_apply(node: NodeView, x: Array, sums: Array, gamma: Array, beta: Array, mean: Array,
                   var: Array) -> list[Array]:
    batch = statistics_of(sums, x)
    saved = to_saved(node, batch)
    largest, winner = max_pooling(node, scaled(node, x, gamma, beta, saved))
    windows = np.stack([Places(node, x.shape).padded(x)[region] for _, region in Places(node, x.shape)])
    at_winner = np.take_along_axis(windows, winner[None], axis=0)[0]
    winner = np.where(largest > 0, winner, NOBODY).astype(np.uint8)
    moving = running_statistics(node, Statistics(mean, var), batch)
    return [np.maximum(largest, 0), saved, *moving, winner, at_winner]


def _compute_reduce(node: NodeView, dy: Array, winner: Array, at_winner: Array, saved: Array,
                    dy2: Array | None = None) -> Sequence[Array]:
    dz = np.where(winner == NOBODY, 0, total(dy, dy2))
    sums = gradient_sums(node, dz, at_winner, saved)
    return sums if node["single_grad"] else [*sums, dz]


def compute_backward_apply(node: NodeView, dz: Array, winner: Array, x: Array, gamma: Array, saved: Array,
                            dgamma: Array, dbeta: Array) -> list[Array]:
    return [data_gradient(node, max_pooling_backward(node, dz, winner, x.shape), x, gamma, saved, (dgamma, dbeta))]


def _apply_body(b: Body) -> list[Any]:
    statistics = b.statistics()
    y = b.relu(b.normalised(statistics[0]))
    largest, winner = b.pooled(y)
    return [largest, *statistics, b.winner_above_0(winner, y), b.at_winner(b["data"], winner)]


def _reduce_body(b: Body) -> list[Any]:
    gradient, winner = b.total(b["out_grad"]), b["winner"]
    sums = b.norm_sums(b.unpooled(gradient, winner), b.data_of(b["data_at_winner"]), b["saved"])
    return [*sums, *([b.gate_at_winner(gradient, winner)] if b.has("out_grad_2") else [])]


def backward_apply_body(b: Body) -> list[Any]:
    return [b.norm_grad(b.unpooled(b["out_grad"], b["winner"]))]


# --- launches ---


class Image(ctypes.Structure):
    """`Image` of batch_norm_relu_max_pool.cuh."""

    _fields_ = _CUDA.fields("Image")

    @classmethod
    def of(cls, x: Buffer, y: Buffer) -> Image:
        """The arguments for a pooling from one NHWC tensor to another."""
        return cls(*x.shape[1:3], *y.shape[1:3])


def apply(builder: Builder, node: Node) -> None:
    """Launch the output of the pooling, from the BatchNorm's input and its sums."""
    require_gamma(node)
    x, sums, y = builder.input(node, "data"), builder.input(node, "sums"), builder.output(node)
    rows, channels = rows_and_channels(node, x)
    images, height, width, _ = y.shape
    strips = images * -(-height // STRIP) * width
    builder.launch(node, "batch_norm_relu_max_pool.cu", builder.kernel("batch_norm_relu_max_pool"),
                   builder.grid(strips, channels, blocks_per_multiprocessor=3), APPLY_BLOCK,
                   In(x), In(sums), about_mean(sums), In(builder.input(node, "gamma")), In(builder.input(node, "beta")),
                   Out(y),
                   *(Out(builder.output(node, role)) for role in ("winner", "data_at_winner", "saved")),
                   *(InOut(builder.input(node, role)) for role in ("moving_mean", "moving_var")),
                   ctypes.c_float(node["eps"]), ctypes.c_float(node["momentum"]), Image.of(x, y), count(rows),
                   count(strips), ctypes.c_int(channels))


def backward_reduce(builder: Builder, node: Node) -> None:
    """Launch the sums of the BatchNorm's backward pass. If the pooling's output has two gradients, also their masked
    sum."""
    dy, dy2 = builder.input(node, "out_grad"), builder.optional_input(node, "out_grad_2", "single_grad")
    outputs, channels = rows_and_channels(node, dy)
    # in this case the masked sum is not written
    dz = Out(builder.output(node, "masked_grad"), over=dy) if dy2 else Scratch(dy)
    grid = builder.reduce_grid(outputs, channels)
    builder.launch(node, "batch_norm_relu_max_pool.cu",
                   builder.kernel("batch_norm_relu_max_pool_backward_reduce", dy2 is not None), grid, REDUCE_BLOCK,
                   In(builder.input(node, "data_at_winner")), In(dy), In(dy2), In(builder.input(node, "winner")), dz,
                   In(builder.input(node, "saved")), Out(builder.output(node, "gamma_grad")),
                   Out(builder.output(node, "beta_grad")), builder.partials(2 * channels * grid[1]), builder.tickets,
                   count(outputs), ctypes.c_int(channels))


def backward_apply(builder: Builder, node: Node) -> None:
    """Launch the gradient of the BatchNorm's input, from the masked gradient and the sums."""
    x, dz = builder.input(node, "data"), builder.input(node, "out_grad")
    rows, channels = rows_and_channels(node, x)
    squares = x.shape[0] * -(-x.shape[1] // 2) * -(-x.shape[2] // 2)
    builder.launch(node, "batch_norm_relu_max_pool.cu", builder.kernel("batch_norm_relu_max_pool_backward_apply"),
                   builder.grid(squares, channels, blocks_per_multiprocessor=2), APPLY_BLOCK,
                   In(x), In(dz), In(builder.input(node, "winner")), Out(builder.output(node)),
                   *(In(builder.input(node, role)) for role in ("saved", "gamma", "gamma_grad", "beta_grad")),
                   Image.of(x, dz), count(rows), count(squares), ctypes.c_int(channels))


_SUMS = ("gamma_grad", "beta_grad")
BACKWARD = ("out_grad", "winner", "data", "gamma", "saved", *_SUMS)  # inputs of the second half of the backward pass

OPERATORS = (
    Operator("BatchNormReluMaxPool", ("data", "sums", "gamma", "beta", *RUNNING), _apply_shapes, _compute_apply,
             POOLING | ATTRIBUTES, ("output", "saved", *RUNNING, "winner", "data_at_winner"), aux=RUNNING,
             body=_apply_body, forward="BatchNormRelu", fused=True),
    Operator("BatchNormReluMaxPoolBackwardReduce", ("out_grad", "winner", "data_at_winner", "saved", "out_grad_2"),
             _reduce_shapes, _compute_reduce, POOLING | ATTRIBUTES | SINGLE_GRAD, (*_SUMS, "masked_grad"),
             {**SECOND_GRAD, "masked_grad": "single_grad"}, in_place={"masked_grad": ("out_grad",)},
             body=_reduce_body, forward="BatchNormRelu", fused=True),
    # `out_grad` is `masked_grad` if that exists: the winners determine where ReLU let the gradient through.
    Operator("BatchNormReluMaxPoolBackwardApply", BACKWARD, backward_apply_shapes, compute_backward_apply,
             POOLING | ATTRIBUTES, ("data_grad",), body=backward_apply_body, forward="BatchNormRelu", fused=True),
)
LAUNCHES: Launches = {
    "BatchNormReluMaxPool": padded_rows(apply),
    "BatchNormReluMaxPoolBackwardReduce": padded_rows(backward_reduce),
    "BatchNormReluMaxPoolBackwardApply": padded_rows(backward_apply),
}
