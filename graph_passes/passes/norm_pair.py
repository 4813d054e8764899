"""The BatchNorm of a projection shortcut and the BatchNorm + add + ReLU that adds it become one operator.

    before    x_2 -> BatchNormApply -> shortcut;  x, shortcut -> BatchNormAddReluApply `bn` -> y, saved, ..., mask
    after     x, x_2 -> BatchNormPairApply `bn` -> y, saved, ..., mask, saved_2, ...

    before    dy, x, mask -> BatchNormAddReluBackwardReduce -> dgamma, dbeta, dz -> BatchNormBackwardApply -> dx
              dz, x_2 -> BatchNormBackwardReduce -> dgamma_2, dbeta_2 -> BatchNormBackwardApply -> dx_2
    after     dy, x, x_2, mask -> BatchNormPairBackwardReduce -> dgamma, dbeta, dz, dgamma_2, dbeta_2
              dz, x, x_2, ... -> BatchNormPairBackwardApply -> dx, dx_2

Neither BatchNorm's output is written, and dz is read once for both. All three read the factors of images that are
dropped, if `bn` has some. Each of the three can be taken without the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node, Ref

_SAME = ("eps", "momentum", "fix_gamma", "axis")  # what both must agree in


def norm_pair(table: Candidates, norm: Candidate) -> Iterator[Node]:
    """Of a BatchNormAddReluApply."""
    factors = [] if norm["no_factors"] else [norm.input("factors")]
    for shortcut in table.makers(norm.input("addend"), "BatchNormApply"):
        if _agree(norm, shortcut):
            inputs = (*norm.node.inputs[:6], *shortcut.node.inputs, *factors)
            yield norm.node.derive("BatchNormPairApply", norm.node.name, inputs)


def norm_pair_reduce(table: Candidates, other: Candidate) -> Iterator[Node]:
    """Of the shortcut's BatchNormBackwardReduce."""
    for one in table.makers(other.input("out_grad"), "BatchNormAddReluBackwardReduce"):
        if other["single_grad"] and _agree(one, other):
            both = (half.input(role) for half in (one, other) for role in ("data", "saved"))
            last = one.node.inputs[5:]  # factors of images that are dropped, and the second gradient, if there are any
            yield one.node.derive("BatchNormPairBackwardReduce", one.node.name,
                                  (one.input("out_grad"), one.input("mask"), *both, *last))


def norm_pair_apply(table: Candidates, other: Candidate) -> Iterator[Node]:
    """Of the shortcut's BatchNormBackwardApply: the one that does not read the data of the sum's BatchNorm."""
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
    """Prices for which the sums of both BatchNorms are taken together: where GPUs exchange sums, all of them must
    exchange the same, whatever their clocks say."""
    def prices(table: Candidates) -> list[float]:
        pairs = [each.made for each in table if each.op == "BatchNormPairBackwardReduce"]
        return [math.inf if any(each.made & pair and not each.made >= pair for pair in pairs) else of_each
                for each, of_each in zip(table, price(table), strict=True)]

    return prices


def _agree(one: Candidate, other: Candidate) -> bool:
    return all(one[name] == other[name] for name in _SAME)


def _of_one(apply: Candidate) -> list[Ref]:
    return [apply.input(role) for role in ("data", "gamma", "saved", "gamma_grad", "beta_grad")]
