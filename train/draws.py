"""What is random in a training pass, as a function of where the run stands: a resumed run draws what an unbroken one
does.

The executors do what is drawn (`graph_passes.executors.Draws`).
"""

from __future__ import annotations

import numpy as np

from graph_passes.executors import Draws
from train.config import Config

_STREAM = 0x6D69787570  # tells these random numbers from those that the loader draws from the same seed


def draw(config: Config, epoch: int, batch: int, rank: int = 0) -> Draws:
    """The draws of one process for a batch of an epoch."""
    if not config.mixup:
        return Draws()
    rng = np.random.default_rng([_STREAM, config.seed, epoch, batch, rank])
    drawn = float(rng.beta(config.mixup, config.mixup))
    # Partners are exchanged when lambda and 1 - lambda are, so the larger of the two stands for both.
    return Draws(mixup=max(drawn, 1 - drawn))
