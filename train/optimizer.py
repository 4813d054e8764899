"""The optimizer of a run, which the executor creates by its name, and moving averages of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from graph_passes import optimizers
from graph_passes.executors import Executor
from graph_passes.optimizers import Optimizer
from train.config import Config


def make_optimizer(executor: Executor, config: Config) -> Optimizer:
    """Create the configured optimizer for all parameters of the executor."""
    rule = optimizers.create(config.optimizer, vars(config))
    return executor.create_optimizer(rule, config.ema_decay > 0, config.clip_norm)


def ema_decay(decay: float, step: int) -> float:
    """Decay of the moving averages at optimizer step `step`, counted from 0. The decay is `decay`, but lower in the
    first steps, so that the average soon forgets the initial weights.

    Source: tf.train.ExponentialMovingAverage, min(decay, (1 + n) / (10 + n)), with n = step - 1.
    """
    return min(decay, step / (9 + step))


@contextlib.contextmanager
def ema_in_use(optimizer: Optimizer) -> Iterator[None]:
    """A context in which the network uses the moving averages, if the run keeps any."""
    if not optimizer.ema:
        yield
        return
    optimizer.swap_ema()
    try:
        yield
    finally:
        optimizer.swap_ema()
