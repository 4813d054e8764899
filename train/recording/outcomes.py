"""Collects a network's predictions: counts of confusions between classes, calibration, the mistakes with the highest
probability, and a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

NUM_BINS = 15  # bins of equal width, from 0 to 1
NUM_MISTAKES = 24
NUM_SAMPLED = 24  # images whose predictions are kept, right or wrong
UNEVEN = 2  # ratio of class sizes from which plain accuracy depends too much on the large classes


@dataclass(frozen=True)
class Outcomes:
    """Counted predictions for some images. Only pairs of classes that occur are stored, so that a thousand classes need
    no matrix of a million counts. The counts are therefore small enough to send between processes.
    """

    pairs: np.ndarray  # int64 (P, 3): true class, predicted class, images (at least one); sorted
    # float64 (NUM_BINS, 3), per bin of the guess's probability: images, right guesses, sum of the probabilities
    bins: np.ndarray
    # int64 (M, 3): index of the image in the split, true class, predicted class; the highest probability first
    mistakes: np.ndarray
    sureness: np.ndarray  # float64 (M,): the probabilities of the wrong guesses
    # The same columns and probabilities, (S, 3) and (S,), for images chosen beforehand, right or wrong; sorted by
    # image.
    sample: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    sample_sureness: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, probabilities: np.ndarray, labels: np.ndarray, images: Sequence[int],
           sampled: Sequence[int] = ()) -> Outcomes:
        """The outcomes of a batch: probabilities (N, classes), labels (N,), and the images' indices in the split (N, or
        empty). `sampled`: the indices of images whose predictions are kept in any case.

        Among equally likely classes the first is the guess, as in the executors' top-1.
        """
        labels = labels.astype(np.int64)
        guesses = probabilities.argmax(axis=1) if len(labels) else np.zeros(0, np.int64)
        # NaN if the network's weights are NaN: the guess then counts with probability 0.
        sureness = np.nan_to_num(probabilities[np.arange(len(labels)), guesses].astype(np.float64))
        is_right = guesses == labels
        which = np.clip(np.ceil(NUM_BINS * sureness).astype(int) - 1, 0, NUM_BINS - 1)  # bin m is (m / M, (m + 1) / M]
        bins = [np.bincount(which, weights, NUM_BINS) for weights in (None, is_right, sureness)]
        wrong = np.flatnonzero(~is_right) if len(images) else np.zeros(0, np.int64)
        kept = np.flatnonzero(np.isin(images, sampled)) if len(images) else wrong

        def rows(some: np.ndarray) -> np.ndarray:
            return np.stack([np.asarray(images, np.int64)[some], labels[some], guesses[some]], axis=1)

        pairs = _counted(labels, guesses, np.ones(len(labels)))
        return cls(pairs, np.stack(bins, axis=1).astype(np.float64), *_surest(rows(wrong), sureness[wrong]),
                   *_by_image(rows(kept), sureness[kept]))

    @classmethod
    def together(cls, parts: Sequence[Outcomes]) -> Outcomes:
        """Combine parts (at least one), in any order."""
        pairs = _counted(*np.concatenate([part.pairs for part in parts]).T)
        return cls(pairs, np.sum([part.bins for part in parts], axis=0),
                   *_surest(np.concatenate([part.mistakes for part in parts]),
                            np.concatenate([part.sureness for part in parts])),
                   *_by_image(np.concatenate([part.sample for part in parts]),
                              np.concatenate([part.sample_sureness for part in parts])))

    @property
    def num_images(self) -> int:
        return int(self.pairs[:, 2].sum())

    @property
    def calibration_error(self) -> float:
        """The expected calibration error: the mean distance between probability and accuracy over the bins, weighted by
        their images. Source: Guo et al., arXiv:1706.04599, equation 3."""
        return float(np.abs(self.bins[:, 1] - self.bins[:, 2]).sum() / self.num_images)

    @property
    def balanced_accuracy(self) -> float:
        """Balanced accuracy: the mean recall over the classes that have images."""
        images, right, _ = self.by_class(1 + int(self.pairs[:, :2].max()))
        return float((right[images > 0] / images[images > 0]).mean())

    @property
    def is_uneven(self) -> bool:
        """Whether one class has at least UNEVEN times as many images as another class that has any."""
        images, *_ = self.by_class(1 + int(self.pairs[:, :2].max()))
        return bool(images.max() >= UNEVEN * images[images > 0].min())

    def by_class(self, num_classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each class (num_classes,): its images, its correctly predicted images, and all images predicted as the
        class.
        """
        true, guess, count = self.pairs.T
        is_right = true == guess
        found = (np.bincount(each, weights, num_classes)
                 for each, weights in ((true, count), (true[is_right], count[is_right]), (guess, count)))
        images, right, guessed = (counts.astype(np.int64) for counts in found)
        return images, right, guessed

    def confusion(self, num_classes: int) -> np.ndarray:
        """The confusion matrix, int64 (num_classes, num_classes): images of the row's class that were predicted as the
        column's class.
        """
        matrix = np.zeros((num_classes, num_classes), np.int64)
        matrix[self.pairs[:, 0], self.pairs[:, 1]] = self.pairs[:, 2]
        return matrix

    def confused(self, count: int) -> np.ndarray:
        """The rows of `pairs` with two different classes and the most images; at most `count`."""
        wrong = self.pairs[self.pairs[:, 0] != self.pairs[:, 1]]
        return wrong[np.argsort(-wrong[:, 2], kind="stable")[:count]]


def _counted(true: np.ndarray, guess: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Sum up pairs that may occur several times, for `Outcomes.pairs`."""
    classes = max(true.max(initial=0), guess.max(initial=0)) + 1
    # Pairs are coded as single numbers, because NumPy takes 20 times as long to find equal rows as equal numbers.
    pairs, place = np.unique(true * classes + guess, return_inverse=True)
    counts = np.bincount(place, count, len(pairs))
    return np.stack([*np.divmod(pairs, classes), counts.astype(np.int64)], axis=1)


def _surest(mistakes: np.ndarray, sureness: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The NUM_MISTAKES mistakes with the highest probability; ties are ordered by image."""
    order = np.lexsort((mistakes[:, 0], -sureness))[:NUM_MISTAKES]
    return mistakes[order], sureness[order]


def _by_image(rows: np.ndarray, sureness: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose first column is an image, in the order of the images."""
    order = np.argsort(rows[:, 0], kind="stable")
    return rows[order], sureness[order]


def spread(total: int, count: int = NUM_SAMPLED) -> list[int]:
    """At most `count` evenly spread numbers below `total`."""
    count = min(count, total)
    return [(2 * i + 1) * total // (2 * count) for i in range(count)]
