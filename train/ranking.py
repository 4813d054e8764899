"""The most likely classes of images, from their probabilities."""

from __future__ import annotations

import numpy as np

# faster than sorting: one pass over the probabilities takes 0.3 us for 1,000 classes, sorting them takes 72 us (one
# core)
MOST_PASSES = 100


def most_likely(probabilities: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """The `top` largest probabilities of each row of (N, classes). Returns classes (N, top) and probabilities (N, top),
    the largest first. Among equal probabilities the first class comes first.
    """
    if top > MOST_PASSES:
        classes = np.argsort(-probabilities, axis=1, kind="stable")[:, :top]
    else:
        left, images = probabilities.copy(), np.arange(len(probabilities))
        classes = np.empty((len(left), top), np.int64)
        for rank in range(top):
            classes[:, rank] = left.argmax(axis=1)
            left[images, classes[:, rank]] = -np.inf
    return classes, np.take_along_axis(probabilities, classes, axis=1)
