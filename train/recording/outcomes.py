"""What a network makes of images, counted: which class it takes for which, how sure it is, its surest mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_BINS = 15  # of equal width, from 0 to 1: Guo et al., section 2
NUM_MISTAKES = 24
UNEVEN = 2  # from here on accuracy says more of some classes than of others


@dataclass(frozen=True)
class Outcomes:
    """Of some images. A thousand classes need no matrix of a million counts: what is kept is the pairs that occur, and
    processes can send each other that."""

    pairs: np.ndarray  # int64 (P, 3): true class, the class taken for, images (at least one); in order
    bins: np.ndarray  # float64 (NUM_BINS, 3): images whose guess has such a probability, the right ones, sum of these
    mistakes: np.ndarray  # int64 (M, 3): image of the split, true class, the class taken for; the surest first
    sureness: np.ndarray  # float64 (M,): the probabilities of these guesses

    @classmethod
    def of(cls, probabilities: np.ndarray, labels: np.ndarray, images: Sequence[int]) -> Outcomes:
        """Of a batch: probabilities (N, classes), labels (N,), and which images of the split these are (N, or none).

        Of equally likely classes the first is the guess, as in the executors' top-1.
        """
        labels = labels.astype(np.int64)
        guesses = probabilities.argmax(axis=1) if len(labels) else np.zeros(0, np.int64)
        # Not a number where the network's weights are not: the guess is worth nothing.
        sureness = np.nan_to_num(probabilities[np.arange(len(labels)), guesses].astype(np.float64))
        is_right = guesses == labels
        which = np.clip(np.ceil(NUM_BINS * sureness).astype(int) - 1, 0, NUM_BINS - 1)  # bin m is (m / M, (m + 1) / M]
        bins = [np.bincount(which, weights, NUM_BINS) for weights in (None, is_right, sureness)]
        wrong = np.flatnonzero(~is_right) if len(images) else np.zeros(0, np.int64)
        rows = [np.asarray(images, np.int64)[wrong], labels[wrong], guesses[wrong]]
        pairs = _counted(labels, guesses, np.ones(len(labels)))
        return cls(pairs, np.stack(bins, axis=1).astype(np.float64),
                   *_surest(np.stack(rows, axis=1), sureness[wrong]))

    @classmethod
    def together(cls, parts: Sequence[Outcomes]) -> Outcomes:
        """Of the images of all parts, at least one, whatever their order."""
        pairs = _counted(*np.concatenate([part.pairs for part in parts]).T)
        return cls(pairs, np.sum([part.bins for part in parts], axis=0),
                   *_surest(np.concatenate([part.mistakes for part in parts]),
                            np.concatenate([part.sureness for part in parts])))

    @property
    def num_images(self) -> int:
        return int(self.pairs[:, 2].sum())

    @property
    def calibration_error(self) -> float:
        """The expected calibration error: the mean distance of probability and accuracy, over bins weighted by their
        images. Source: Guo et al., arXiv:1706.04599, equation 3."""
        return float(np.abs(self.bins[:, 1] - self.bins[:, 2]).sum() / self.num_images)

    @property
    def balanced_accuracy(self) -> float:
        """Each class counting the same: the mean over the classes, of those that have images, of the share of a class's
        images that is taken for it (recall)."""
        images, right, _ = self.by_class(1 + int(self.pairs[:, :2].max()))
        return float((right[images > 0] / images[images > 0]).mean())

    @property
    def is_uneven(self) -> bool:
        """Whether a class has at least UNEVEN times the images of another one that has some."""
        images, *_ = self.by_class(1 + int(self.pairs[:, :2].max()))
        return bool(images.max() >= UNEVEN * images[images > 0].min())

    def by_class(self, num_classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each class (num_classes,): its images, those of them taken for it, and all that are taken for it."""
        true, guess, count = self.pairs.T
        is_right = true == guess
        found = (np.bincount(each, weights, num_classes)
                 for each, weights in ((true, count), (true[is_right], count[is_right]), (guess, count)))
        images, right, guessed = (counts.astype(np.int64) for counts in found)
        return images, right, guessed

    def confusion(self, num_classes: int) -> np.ndarray:
        """int64 (num_classes, num_classes): images of the row's class that are taken for the column's."""
        matrix = np.zeros((num_classes, num_classes), np.int64)
        matrix[self.pairs[:, 0], self.pairs[:, 1]] = self.pairs[:, 2]
        return matrix

    def confused(self, count: int) -> np.ndarray:
        """The rows of `pairs` of different classes with the most images, `count` at most."""
        wrong = self.pairs[self.pairs[:, 0] != self.pairs[:, 1]]
        return wrong[np.argsort(-wrong[:, 2], kind="stable")[:count]]


def _counted(true: np.ndarray, guess: np.ndarray, count: np.ndarray) -> np.ndarray:
    """`Outcomes.pairs` of pairs that may occur several times."""
    classes = max(true.max(initial=0), guess.max(initial=0)) + 1
    # One number for each pair: NumPy takes 20 times as long to find equal rows.
    pairs, place = np.unique(true * classes + guess, return_inverse=True)
    counts = np.bincount(place, count, len(pairs))
    return np.stack([*np.divmod(pairs, classes), counts.astype(np.int64)], axis=1)


def _surest(mistakes: np.ndarray, sureness: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first NUM_MISTAKES by their probability, of equal ones by their image."""
    order = np.lexsort((mistakes[:, 0], -sureness))[:NUM_MISTAKES]
    return mistakes[order], sureness[order]
