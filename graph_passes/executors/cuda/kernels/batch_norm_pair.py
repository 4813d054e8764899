"""A BatchNormAddRelu and the BatchNorm that it adds, a projection shortcut's, as one."""

from __future__ import annotations

import ctypes
from itertools import chain

from graph_passes.executors.cuda.builder import APPLY_BLOCK, REDUCE_BLOCK, Builder, Launches, rows_and_channels
from graph_passes.executors.cuda.kernel_library import count
from graph_passes.executors.cuda.kernels.batch_norm import about_mean, require_gamma
from graph_passes.executors.cuda.kernels.dropout import drops, factors_of
from graph_passes.executors.cuda.kernels.second_grad import Second
from graph_passes.executors.cuda.operands import In, InOut, Out
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node


def _inputs(builder: Builder, node: Node, *roles: str) -> list[Buffer]:
    """Of both BatchNorms: each role of the one, then of the shortcut's."""
    return list(chain.from_iterable((builder.input(node, role), builder.input(node, f"{role}_2")) for role in roles))


def _outputs(builder: Builder, node: Node, *roles: str) -> list[Buffer]:
    return list(chain.from_iterable((builder.output(node, role), builder.output(node, f"{role}_2")) for role in roles))


def apply(builder: Builder, node: Node) -> None:
    """The output, from both inputs and their sums."""
    require_gamma(node)
    x = _inputs(builder, node, "data")
    rows, channels = rows_and_channels(node, x[0])
    sums = _inputs(builder, node, "sums")
    builder.launch(node, "batch_norm_pair.cu", builder.kernel("batch_norm_pair_apply", drops(node)),
                   builder.grid(rows, channels), APPLY_BLOCK, *map(In, x), *map(In, sums), *map(about_mean, sums),
                   *map(In, _inputs(builder, node, "gamma", "beta")),
                   Out(builder.output(node)), Out(builder.output(node, "mask")),
                   *map(Out, _outputs(builder, node, "saved")),
                   *map(InOut, _inputs(builder, node, "moving_mean", "moving_var")),
                   ctypes.c_float(node["eps"]), ctypes.c_float(node["momentum"]), count(rows), ctypes.c_int(channels),
                   *factors_of(builder, node, rows))


def backward_reduce(builder: Builder, node: Node) -> None:
    """The sums of both, and the masked gradient."""
    dy, x = builder.input(node, "out_grad"), _inputs(builder, node, "data")
    second = Second.of(builder, node)
    rows, channels = rows_and_channels(node, x[0])
    grid = builder.reduce_grid(rows, channels)
    flags = second.kind, drops(node)
    builder.launch(node, "batch_norm_pair.cu", builder.kernel("batch_norm_pair_backward_reduce", *flags), grid,
                   REDUCE_BLOCK, *map(In, x), In(dy), In(second.grad), In(builder.input(node, "mask")),
                   Out(builder.output(node, "masked_grad"), over=dy), *map(In, _inputs(builder, node, "saved")),
                   *map(Out, _outputs(builder, node, "gamma_grad", "beta_grad")),
                   builder.partials((3 + drops(node)) * channels * grid[1]), builder.tickets, count(rows),
                   ctypes.c_int(channels), *factors_of(builder, node, rows), second.grid)


def backward_apply(builder: Builder, node: Node) -> None:
    """The gradients of both inputs, from the masked gradient and the sums, of which dbeta is the same for both where
    nothing is dropped."""
    dz, x = builder.input(node, "masked_grad"), _inputs(builder, node, "data")
    dx, dx_2 = _outputs(builder, node, "data_grad")
    rows, channels = rows_and_channels(node, x[0])
    builder.launch(node, "batch_norm_pair.cu", builder.kernel("batch_norm_pair_backward_apply", drops(node)),
                   builder.grid(rows, channels, blocks_per_multiprocessor=2), APPLY_BLOCK,
                   *map(In, x), In(dz), Out(dx, over=dz), Out(dx_2),
                   *map(In, _inputs(builder, node, "saved", "gamma", "gamma_grad")),
                   In(builder.input(node, "beta_grad")), count(rows), ctypes.c_int(channels),
                   In(builder.input(node, "beta_grad_2") if drops(node) else None), *factors_of(builder, node, rows))


LAUNCHES: Launches = {
    "BatchNormPairApply": apply,
    "BatchNormPairBackwardReduce": backward_reduce,
    "BatchNormPairBackwardApply": backward_apply,
}
