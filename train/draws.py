"""What is random in a training pass, as a function of where the run stands: a resumed run draws what an unbroken one
does.

The executors do what is drawn (`graph_passes.executors.Draws`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from graph_passes.executors import Box, Draws
from train.config import Config
from train.schedule import image_size_in

# Tell these random numbers from each other, and from those that the loader draws from the same seed.
_MIXING, _MASKS = 0x6D69787570, 0x6D61736B73


def draw(config: Config, epoch: int, batch: int, rank: int = 0) -> Draws:
    """The draws of one process for a batch of an epoch."""
    place = config.seed, epoch, batch, rank
    drawn = _draw_mixing(config, epoch, place)
    if config.stochastic_depth or config.dropout:
        seed = np.random.default_rng([_MASKS, *place]).integers(2**64, dtype=np.uint64)
        drawn = drawn._replace(seed=int(seed))
    return drawn


def _draw_mixing(config: Config, epoch: int, place: Sequence[int]) -> Draws:
    """How images of a batch are mixed, if they are. `place`: of the batch, which decides on it."""
    if not (config.mixup or config.cutmix):
        return Draws()
    rng = np.random.default_rng([_MIXING, *place])
    if config.cutmix and (not config.mixup or rng.random() < config.cutmix_share):
        return Draws(cutmix=_draw_box(config.cutmix, image_size_in(config, epoch), rng))
    drawn = float(rng.beta(config.mixup, config.mixup))
    # Partners are exchanged when lambda and 1 - lambda are, so the larger of the two stands for both.
    return Draws(mixup=max(drawn, 1 - drawn))


def _draw_box(alpha: float, size: int, rng: np.random.Generator) -> Box:
    """CutMix's box in images of `size` x `size` pixels: of the area 1 - lambda, lambda from Beta(alpha, alpha), with
    its centre anywhere, less what is outside of the image; as timm and torchvision draw it (arXiv:1905.04899, eq. 2).
    """
    half = int(0.5 * size * math.sqrt(1 - rng.beta(alpha, alpha)))
    y, x = (int(centre) for centre in rng.integers(size, size=2))
    return Box(max(y - half, 0), max(x - half, 0), min(y + half, size), min(x + half, size))
