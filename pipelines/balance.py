"""Chooses an epoch's images so that classes of unequal size are drawn more equally often (`--balance`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def draw_balanced(images_by_class: Sequence[np.ndarray], balance: float, rng: np.random.Generator) -> np.ndarray:
    """Draw as many images as the data set has, class by class, with repetitions.

    A class of n images is drawn in proportion to n ** (1 - balance): 1 is class-balanced sampling, 0.5 square-root
    sampling (Mahajan et al., arXiv:1805.00932, section 2.2). Within a class, the counts of any two images differ by at
    most one.

    Args:
        images_by_class: the numbers of each class's images; no class is empty.
        balance: from 0 to 1.
        rng: the source of randomness.
    """
    sizes = np.array([len(images) for images in images_by_class])
    shares = sizes ** (1 - balance)
    wanted = shares * (sizes.sum() / shares.sum())
    counts = np.floor(wanted).astype(int)
    # Rounding down leaves some images over. They go to the classes that lost most by rounding; ties are broken anew in
    # each epoch.
    left = sizes.sum() - counts.sum()
    counts[np.lexsort((rng.permutation(len(sizes)), (counts - wanted).round(9)))[:left]] += 1
    return np.concatenate([_draw(images, count, rng) for images, count in zip(images_by_class, counts, strict=True)])


def _draw(images: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `count` images of a class; the counts of any two images differ by at most one."""
    whole, rest = divmod(int(count), len(images))
    return np.concatenate([np.tile(images, whole), rng.permutation(images)[:rest]])
