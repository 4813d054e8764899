"""Fuses the BatchNorm of a projection shortcut with the BatchNorm + add + ReLU that adds the shortcut, forward and
backward, both halves.

    before    x_2 -> BatchNormApply -> shortcut;  x, shortcut -> BatchNormAddReluApply `bn` -> y, saved, ..., mask
    after     x, x_2 -> BatchNormPairApply `bn` -> y, saved, ..., mask, saved_2, ...

    before    dy, x, mask -> BatchNormAddReluBackwardReduce -> dgamma, dbeta, dz -> BatchNormBackwardApply -> dx
              dz, x_2 -> BatchNormBackwardReduce -> dgamma_2, dbeta_2 -> BatchNormBackwardApply -> dx_2
    after     dy, x, x_2, mask -> BatchNormPairBackwardReduce -> dgamma, dbeta, dz, dgamma_2, dbeta_2
              dz, x, x_2, ... -> BatchNormPairBackwardApply -> dx, dx_2

Neither BatchNorm's output is written, and dz is read once for both. If `bn` has stochastic depth, all three nodes read
the factors of `bn`. Each of the three nodes can be used without the other two. Names that end in `_2` belong to the
shortcut's BatchNorm.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import (
    APPLY_BLOCK,
    REDUCE_BLOCK,
    Builder,
    Launches,
    padded_rows,
    rows_and_channels,
)
from graph_passes.executors.cuda.kernel_library import count
from graph_passes.executors.cuda.kernels.batch_norm import Second, about_mean, require_gamma
from graph_passes.executors.cuda.kernels.dropout import drops, factors_of
from graph_passes.executors.cuda.operands import In, InOut, Out
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node, Ref
from graph_passes.operators import Operator
from graph_passes.operators.base import GRAD_STRIDE, SECOND_GRAD, SINGLE_GRAD
from graph_passes.operators.batch_norm import ATTRIBUTES, RUNNING
from graph_passes.operators.body import Body
from graph_passes.operators.dropout import FACTORS, dropping

_SAME = ("eps", "momentum", "fix_gamma", "axis")  # attributes that must be equal in both BatchNorms


def pair(table: Candidates, norm: Candidate) -> Iterator[Node]:
    """Yield the node that fuses the BatchNormAddReluApply `norm` with the BatchNorm of its shortcut."""
    factors = [] if norm["no_factors"] else [norm.input("factors")]
    for shortcut in table.makers(norm.input("addend"), "BatchNormApply"):
        if _agree(norm, shortcut):
            inputs = (*norm.node.inputs[:6], *shortcut.node.inputs, *factors)
            yield norm.node.derive("BatchNormPairApply", norm.node.name, inputs)


def pair_of_reductions(table: Candidates, other: Candidate) -> Iterator[Node]:
    """Yield the node that fuses `other`, the shortcut's BatchNormBackwardReduce, with the reduction of the sum's
    BatchNorm."""
    for one in table.makers(other.input("out_grad"), "BatchNormAddReluBackwardReduce"):
        if other["single_grad"] and _agree(one, other):
            both = (half.input(role) for half in (one, other) for role in ("data", "saved"))
            last = one.node.inputs[5:]  # the factors of stochastic depth and the second gradient, if there are any
            yield one.node.derive("BatchNormPairBackwardReduce", one.node.name,
                                  (one.input("out_grad"), one.input("mask"), *both, *last))


def pair_of_gradients(table: Candidates, other: Candidate) -> Iterator[Node]:
    """Yield the node that fuses `other`, the shortcut's BatchNormBackwardApply, with the BackwardApply of the sum's
    BatchNorm.

    `other` must not read the data of the sum's BatchNorm: this distinguishes the shortcut's node.
    """
    gradient = other.input("masked_grad")
    for reduction in table.makers(gradient, "BatchNormAddReluBackwardReduce"):
        if other.input("data") == reduction.input("data") or not other["no_factors"]:
            continue
        for one in table.readers(gradient, "BatchNormBackwardApply"):
            if one.input("data") == reduction.input("data") and _agree(one, other):
                factors = [] if one["no_factors"] else [one.input("factors")]
                inputs = (gradient, *_of_one(one), *_of_one(other), *factors)
                yield one.node.derive("BatchNormPairBackwardApply", one.node.name, inputs)


def always_paired(price: Callable[[Candidates], Sequence[float]]) -> Callable[[Candidates], Sequence[float]]:
    """Prices with which the sums of both BatchNorms are always taken together. GPUs that exchange sums must all choose
    the same kernels for the sums, although each GPU measures other times.
    """
    def prices(table: Candidates) -> list[float]:
        pairs = [each.made for each in table if each.op == "BatchNormPairBackwardReduce"]
        return [math.inf if any(each.made & pair and not each.made >= pair for pair in pairs) else of_each
                for each, of_each in zip(table, price(table), strict=True)]

    return prices


def _agree(one: Candidate, other: Candidate) -> bool:
    return all(one[name] == other[name] for name in _SAME)


def _of_one(apply: Candidate) -> list[Ref]:
    return [apply.input(role) for role in ("data", "gamma", "saved", "gamma_grad", "beta_grad")]


# --- bodies ---


def apply_body(b: Body) -> list[Any]:
    one, other = b.statistics(), b.statistics("_2")
    z = b.add(b.dropped(b.normalised(one[0])), b.normalised(other[0], "_2"))
    return [b.relu(z), *one, b.mask(z), *other]


def _reduce_body(b: Body) -> list[Any]:
    gradient = b.gate(b.total(b["out_grad"]), b["mask"])
    return [*b.reduced(b.dropped(gradient)), gradient, *b.reduced(gradient, "_2")]


def _backward_apply_body(b: Body) -> list[Any]:
    return [b.norm_grad(b.dropped(b["masked_grad"])), b.norm_grad(b["masked_grad"], "_2")]


# --- launches ---


def _inputs(builder: Builder, node: Node, *roles: str) -> list[Buffer]:
    """For each role: the input of the sum's BatchNorm, then the input of the shortcut's BatchNorm."""
    return list(chain.from_iterable((builder.input(node, role), builder.input(node, f"{role}_2")) for role in roles))


def _outputs(builder: Builder, node: Node, *roles: str) -> list[Buffer]:
    return list(chain.from_iterable((builder.output(node, role), builder.output(node, f"{role}_2")) for role in roles))


def apply(builder: Builder, node: Node) -> None:
    """Launch the output, from both inputs and their sums."""
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
    """Launch the sums of both BatchNorms, and the masked gradient."""
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
    """Launch the gradients of both inputs, from the masked gradient and the sums. Without stochastic depth the dbeta of
    both BatchNorms are equal.
    """
    dz, x = builder.input(node, "masked_grad"), _inputs(builder, node, "data")
    dx, dx_2 = _outputs(builder, node, "data_grad")
    rows, channels = rows_and_channels(node, x[0])
    builder.launch(node, "batch_norm_pair.cu", builder.kernel("batch_norm_pair_backward_apply", drops(node)),
                   builder.grid(rows, channels, blocks_per_multiprocessor=2), APPLY_BLOCK,
                   *map(In, x), In(dz), Out(dx, over=dz), Out(dx_2),
                   *map(In, _inputs(builder, node, "saved", "gamma", "gamma_grad")),
                   In(builder.input(node, "beta_grad")), count(rows), ctypes.c_int(channels),
                   In(builder.input(node, "beta_grad_2") if drops(node) else None), *factors_of(builder, node, rows))


def both(*names: str) -> tuple[str, ...]:
    """The names for the sum's BatchNorm, then the names for the shortcut's BatchNorm."""
    return (*names, *(f"{name}_2" for name in names))


_SUMS = ("gamma_grad", "beta_grad")
_ATTRIBUTES = ATTRIBUTES | dropping(["factors"])
# Outputs of the first node.
APPLIED = ("output", "saved", *RUNNING, "mask", "saved_2", *(f"{name}_2" for name in RUNNING))

OPERATORS = (
    Operator("BatchNormPairApply", (*both("data", "sums", "gamma", "beta", *RUNNING), "factors"), attrs=_ATTRIBUTES,
             outputs=APPLIED, optional=FACTORS, aux=both(*RUNNING), body=apply_body, forward="BatchNormAddRelu",
             plain=True, fused=True),
    Operator("BatchNormPairBackwardReduce", ("out_grad", "mask", *both("data", "saved"), "factors", "out_grad_2"),
             attrs=_ATTRIBUTES | SINGLE_GRAD | GRAD_STRIDE,
             outputs=(*_SUMS, "masked_grad", *(f"{name}_2" for name in _SUMS)), optional={**SECOND_GRAD, **FACTORS},
             in_place={"masked_grad": ("out_grad",)}, body=_reduce_body, forward="BatchNormAddRelu",
             plain=True, fused=True),
    Operator("BatchNormPairBackwardApply", ("masked_grad", *both("data", "gamma", "saved", *_SUMS), "factors"),
             attrs=_ATTRIBUTES, outputs=("data_grad", "data_grad_2"), optional=FACTORS,
             in_place={"data_grad": ("masked_grad",)}, body=_backward_apply_body, forward="BatchNormAddRelu",
             plain=True, fused=True),
)
RULES = (("BatchNormAddReluApply", pair), ("BatchNormBackwardReduce", pair_of_reductions),
         ("BatchNormBackwardApply", pair_of_gradients))
LAUNCHES: Launches = {
    "BatchNormPairApply": padded_rows(apply),
    "BatchNormPairBackwardReduce": padded_rows(backward_reduce),
    "BatchNormPairBackwardApply": padded_rows(backward_apply),
}
