"""What is random in a training pass, as a function of where the run stands: a resumed run draws what an unbroken one
does.

The executors do what is drawn (`graph_passes.executors.Draws`).
"""

from __future__ import annotations

import numpy as np

from graph_passes.executors import Draws
from train.config import Config

# Tell these random numbers from each other, and from those that the loader draws from the same seed.
_MIXUP, _MASKS = 0x6D69787570, 0x6D61736B73


def draw(config: Config, epoch: int, batch: int, rank: int = 0) -> Draws:
    """The draws of one process for a batch of an epoch."""
    place = config.seed, epoch, batch, rank
    mixup, seed = 1.0, 0
    if config.mixup:
        drawn = float(np.random.default_rng([_MIXUP, *place]).beta(config.mixup, config.mixup))
        # Partners are exchanged when lambda and 1 - lambda are, so the larger of the two stands for both.
        mixup = max(drawn, 1 - drawn)
    if config.stochastic_depth or config.dropout:
        seed = int(np.random.default_rng([_MASKS, *place]).integers(2**64, dtype=np.uint64))
    return Draws(mixup=mixup, seed=seed)
