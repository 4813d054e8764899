"""Removes the initial values from BatchNorm's running statistics.

Each batch updates a running statistic r to momentum * r + (1 - momentum) * batch. r starts as 0 (a mean) or 1 (a
variance). After n batches r still contains the share s = momentum^n of its initial value: 28 % after 12 batches with a
momentum of 0.9, where most variances are far below 1. Training uses r itself. Validation, checkpoints and everything
made from them use

    (r - s * initial) / (1 - s)

like Adam's averages (Kingma and Ba, arXiv:1412.6980, section 3). A moving average of r (`--ema-decay`) contains the
moving average of s. Statistics from trained weights, and frozen statistics, contain no share of initial values and are
not changed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from graph_passes import roles
from graph_passes.executors import Executor
from graph_passes.operators.batch_norm import BATCH_NORMS, RUNNING

LEAST = 2.0**-24  # a smaller share of the initial value 1 is below fp32's rounding

Arrays = dict[str, np.ndarray]
Shares = dict[str, float]


class _Rule(NamedTuple):
    momentum: float
    initial: float


class InitialShares:
    """The shares of initial values in a run's statistics, until they become negligible.

    `own`: the shares of the running statistics, by name; `averaged`: the shares of their moving averages.
    """

    def __init__(self, executor: Executor) -> None:
        """Start from the values in `executor`. Statistics that differ from the initial values have been trained before,
        and have no share."""
        self._rules = {name: _Rule(use.node["momentum"], float(use.input == "moving_var"))
                       for name, use in roles.uses(executor.graph).items()
                       if use.input in RUNNING and name not in executor.frozen}
        live = executor.aux if self._rules else {}
        self.own: Shares = {name: 1.0 for name, rule in self._rules.items()
                            if (executor.to_canonical(name, live[name]) == rule.initial).all()}
        self.averaged: Shares = dict(self.own)

    def restore(self, own: Shares, averaged: Shares) -> None:
        """Restore the shares of a checkpoint."""
        self.own, self.averaged = dict(own), dict(averaged)

    def step(self, batches: int, ema_decay: float) -> None:
        """Update the shares after an optimizer step with `batches` batches and this decay of the moving averages."""
        if not self.own and not self.averaged:
            return
        own = {name: share * self._rules[name].momentum**batches for name, share in self.own.items()}
        averaged = {name: ema_decay * self.averaged.get(name, 0.0) + (1 - ema_decay) * own.get(name, 0.0)
                    for name in self.averaged | own}
        self.own, self.averaged = ({name: share for name, share in shares.items() if share >= LEAST}
                                   for shares in (own, averaged))

    def divide_out(self, statistics: Mapping[str, np.ndarray], shares: Shares) -> tuple[Arrays, Arrays]:
        """Remove the shares from canonical statistics. Returns the results, and the original values of the statistics
        that have a share.
        """
        biased = {name: statistics[name] for name in shares}
        unbiased = {name: _without(array, shares[name], self._rules[name].initial) for name, array in biased.items()}
        return unbiased, biased

    @contextlib.contextmanager
    def divided_out(self, executor: Executor, is_averaged: bool) -> Iterator[None]:
        """A context in which the executor's running statistics have no shares. `is_averaged`: they are currently the
        moving averages."""
        shares = self.averaged if is_averaged else self.own
        if not shares:
            yield
            return
        # MXNet's BatchNorm updates its statistics asynchronously, unseen by a reader of the array
        executor.synchronize()
        live = executor.aux
        unbiased, biased = self.divide_out({name: executor.to_canonical(name, live[name]) for name in shares}, shares)
        _write(executor, unbiased)
        try:
            yield
        finally:
            _write(executor, biased)


def without_variance(executor: Executor, image_size: int, processes: int = 1) -> list[str]:
    """BatchNorms that get only one value per channel, with images of this size on each of `processes` processes that
    share statistics. The value equals its mean, so the normalised output is always 0 before gamma and beta.
    """
    images, *_, channels = executor.input_shapes["data"]
    graph = executor.graph
    shapes = graph.infer_shapes(executor.input_shapes | {"data": (images, image_size, image_size, channels)})
    return [node.name for node in graph if node.op in BATCH_NORMS and not node["use_global_stats"]
            and processes * math.prod(shape := shapes[node.inputs[0]]) == shape[node["axis"]]]


def _without(array: np.ndarray, share: float, initial: float) -> np.ndarray:
    if share == 1:  # share 1: no batch has been processed yet
        return array
    values = (array - share * np.float64(initial)) / (1 - share)
    # keeps rounding from making a variance negative
    return np.maximum(values, 0.0 if initial else -np.inf).astype(array.dtype)


def _write(executor: Executor, statistics: Arrays) -> None:
    live = executor.aux
    for name, array in statistics.items():
        live[name][:] = executor.from_canonical(name, array)
