"""The random choices of a training pass, as a function of epoch and batch: a resumed run makes the same choices as an
uninterrupted run.

The executors apply these choices (`graph_passes.executors.Draws`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from graph_passes.executors import Box, Draws
from train.config import Config
from train.schedule import image_size_in

# Constants that keep the two random streams apart from each other, and from the loader's stream, which has the same
# seed.
_MIXING, _MASKS = 0x6D69787570, 0x6D61736B73


def draw(config: Config, epoch: int, batch: int, rank: int = 0) -> Draws:
    """The random choices of one process for a batch of an epoch."""
    place = config.seed, epoch, batch, rank
    drawn = _draw_mixing(config, epoch, place)
    if config.stochastic_depth or config.dropout:
        seed = np.random.default_rng([_MASKS, *place]).integers(2**64, dtype=np.uint64)
        drawn = drawn._replace(seed=int(seed))
    return drawn


def _draw_mixing(config: Config, epoch: int, place: Sequence[int]) -> Draws:
    """Draw how the images of a batch are mixed, if at all. `place`: the batch's position, which determines the choice.
    """
    if not (config.mixup or config.cutmix):
        return Draws()
    rng = np.random.default_rng([_MIXING, *place])
    if config.cutmix and (not config.mixup or rng.random() < config.cutmix_share):
        return Draws(cutmix=_draw_box(config.cutmix, image_size_in(config, epoch), rng))
    drawn = float(rng.beta(config.mixup, config.mixup))
    # Exchanging lambda and 1 - lambda only exchanges the two images, so the larger of the two numbers is used.
    return Draws(mixup=max(drawn, 1 - drawn))


def _draw_box(alpha: float, size: int, rng: np.random.Generator) -> Box:
    """Draw CutMix's box in images of `size` x `size` pixels. Its area is 1 - lambda, with lambda from Beta(alpha,
    alpha); its centre is uniform, and parts outside the image are cut off. As in timm and torchvision
    (arXiv:1905.04899, eq. 2).
    """
    half = int(0.5 * size * math.sqrt(1 - rng.beta(alpha, alpha)))
    y, x = (int(centre) for centre in rng.integers(size, size=2))
    return Box(max(y - half, 0), max(x - half, 0), min(y + half, size), min(x + half, size))
