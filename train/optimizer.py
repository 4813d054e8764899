"""The optimizer of a run: by the name in its configuration, made by the executor; and moving averages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from graph_passes import optimizers
from graph_passes.executors import Executor
from graph_passes.optimizers import Optimizer
from train.config import Config


def make_optimizer(executor: Executor, config: Config) -> Optimizer:
    """The optimizer of the configuration, for all parameters of the executor."""
    rule = optimizers.create(config.optimizer, vars(config))
    return executor.create_optimizer(rule, config.ema_decay > 0, config.clip_norm)


def ema_decay(decay: float, step: int) -> float:
    """Decay of the moving averages at optimizer step `step`, counted from 0: `decay`, but less in the first steps, so
    that the average is of the weights so far and not of the initial ones.

    Source: tf.train.ExponentialMovingAverage, min(decay, (1 + n) / (10 + n)), with n = step - 1.
    """
    return min(decay, step / (9 + step))


@contextlib.contextmanager
def ema_in_use(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the network computes with the averages, if there are any."""
    if not optimizer.ema:
        yield
        return
    optimizer.swap_ema()
    try:
        yield
    finally:
        optimizer.swap_ema()
