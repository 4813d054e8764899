"""Mixup (Zhang et al., arXiv:1710.09412): every image of a batch is mixed with another one, and its label likewise.

The executors do the mixing (`Executor.forward_backward`); here lambda is drawn.
"""

from __future__ import annotations

import numpy as np

_STREAM = 0x6D69787570  # tells these random numbers from those that the loader draws from the same seed


def draw_lambda(alpha: float, seed: int, epoch: int, batch: int, rank: int = 0) -> float:
    """Lambda of one batch, of the distribution Beta(alpha, alpha), or 1 without mixup (alpha 0).

    A function of its arguments alone, so that a resumed run draws what an unbroken one does. Since partners are
    exchanged when lambda and 1 - lambda are, the larger of the two stands for both.
    """
    if alpha == 0:
        return 1.0
    drawn = float(np.random.default_rng([_STREAM, seed, epoch, batch, rank]).beta(alpha, alpha))
    return max(drawn, 1 - drawn)
