"""BatchNorm's running statistics without what they still hold of their initial values.

Each batch makes r = momentum * r + (1 - momentum) * batch of a running statistic r, which begins as 0 (a mean) or 1
(a variance). So after n batches r holds the share s = momentum^n of that beginning: 28 % after 12 batches with a
momentum of 0.9, where most variances are far below 1.
Training goes on with r as it is; validation, checkpoints and what is made of them use

    (r - s * initial) / (1 - s)

as Adam does with its averages (Kingma and Ba, arXiv:1412.6980, section 3). A moving average of r (`--ema-decay`) holds
the same moving average of s. Statistics of trained weights, and frozen ones, have no such share and stay as they are.
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

LEAST = 2.0**-24  # a smaller share of an initial 1 is less than fp32's rounding of it

Arrays = dict[str, np.ndarray]
Shares = dict[str, float]


class _Rule(NamedTuple):
    momentum: float
    initial: float


class InitialShares:
    """The shares that a run's statistics hold of their initial values, as long as they matter.

    `own`: of the running statistics, by name; `averaged`: of their moving averages.
    """

    def __init__(self, executor: Executor) -> None:
        """For a run that begins with the values that `executor` holds: statistics that differ from the initial values
        have been trained before."""
        self._rules = {name: _Rule(use.node["momentum"], float(use.input == "moving_var"))
                       for name, use in roles.uses(executor.graph).items()
                       if use.input in RUNNING and name not in executor.frozen}
        live = executor.aux if self._rules else {}
        self.own: Shares = {name: 1.0 for name, rule in self._rules.items()
                            if (executor.to_canonical(name, live[name]) == rule.initial).all()}
        self.averaged: Shares = dict(self.own)

    def restore(self, own: Shares, averaged: Shares) -> None:
        """Take over those of a checkpoint."""
        self.own, self.averaged = dict(own), dict(averaged)

    def step(self, batches: int, ema_decay: float) -> None:
        """After an optimizer step with so many batches, and with this decay of the moving averages."""
        if not self.own and not self.averaged:
            return
        own = {name: share * self._rules[name].momentum**batches for name, share in self.own.items()}
        averaged = {name: ema_decay * self.averaged.get(name, 0.0) + (1 - ema_decay) * own.get(name, 0.0)
                    for name in self.averaged | own}
        self.own, self.averaged = ({name: share for name, share in shares.items() if share >= LEAST}
                                   for shares in (own, averaged))

    def divide_out(self, statistics: Mapping[str, np.ndarray], shares: Shares) -> tuple[Arrays, Arrays]:
        """Canonical statistics without their shares, and as they are, those that have one."""
        biased = {name: statistics[name] for name in shares}
        unbiased = {name: _without(array, shares[name], self._rules[name].initial) for name, array in biased.items()}
        return unbiased, biased

    @contextlib.contextmanager
    def divided_out(self, executor: Executor, is_averaged: bool) -> Iterator[None]:
        """Inside, the executor has its running statistics without their shares. `is_averaged`: they are the moving
        averages at present."""
        shares = self.averaged if is_averaged else self.own
        if not shares:
            yield
            return
        executor.synchronize()  # MXNet's BatchNorm writes its statistics behind the back of whoever reads an array
        live = executor.aux
        unbiased, biased = self.divide_out({name: executor.to_canonical(name, live[name]) for name in shares}, shares)
        _write(executor, unbiased)
        try:
            yield
        finally:
            _write(executor, biased)


def without_variance(executor: Executor, image_size: int, processes: int = 1) -> list[str]:
    """The BatchNorms that are trained on a single value per channel, in a batch of images of this size on each of so
    many processes that share statistics. It is its own mean, so they make 0 of it, whatever comes before them."""
    images, *_, channels = executor.input_shapes["data"]
    graph = executor.graph
    shapes = graph.infer_shapes(executor.input_shapes | {"data": (images, image_size, image_size, channels)})
    return [node.name for node in graph if node.op in BATCH_NORMS and not node["use_global_stats"]
            and processes * math.prod(shape := shapes[node.inputs[0]]) == shape[node["axis"]]]


def _without(array: np.ndarray, share: float, initial: float) -> np.ndarray:
    if share == 1:  # no batch yet
        return array
    values = (array - share * np.float64(initial)) / (1 - share)
    return np.maximum(values, 0.0 if initial else -np.inf).astype(array.dtype)  # rounding makes no variance negative


def _write(executor: Executor, statistics: Arrays) -> None:
    live = executor.aux
    for name, array in statistics.items():
        live[name][:] = executor.from_canonical(name, array)
