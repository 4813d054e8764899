"""Counts of a network's predictions, against plain loops and distributions with known calibration."""

from __future__ import annotations

import numpy as np
import pytest

from train.recording.outcomes import NUM_BINS, NUM_MISTAKES, Outcomes


def draw(rng: np.random.Generator, count: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (count, classes) and labels (count,) in the executors' format."""
    return rng.dirichlet(np.full(classes, 0.3), count).astype(np.float32), rng.integers(0, classes, count).astype("f")


@pytest.mark.parametrize("classes", [2, 7, 300])
def test_counts_against_loops(classes: int, rng: np.random.Generator) -> None:
    probabilities, labels = draw(rng, 400, classes)
    images = rng.permutation(400).tolist()
    found = Outcomes.of(probabilities, labels, images)
    matrix, mistakes = np.zeros((classes, classes), int), []
    bins = np.zeros((NUM_BINS, 3))
    for row, label, image in zip(probabilities, labels.astype(int), images, strict=True):
        guess = int(np.argmax(row))
        matrix[label, guess] += 1
        place = next(m for m in range(NUM_BINS) if m / NUM_BINS < row[guess] <= (m + 1) / NUM_BINS)
        bins[place] += 1, guess == label, row[guess]
        mistakes += [(-row[guess], image, label, guess)] * int(guess != label)
    np.testing.assert_array_equal(found.confusion(classes), matrix)
    np.testing.assert_allclose(found.bins, bins)
    mistakes = sorted(mistakes)[:NUM_MISTAKES]
    assert found.mistakes.tolist() == [list(rest) for _, *rest in mistakes]
    np.testing.assert_allclose(found.sureness, [-p for p, *_ in mistakes])
    images_of, right, guessed = found.by_class(classes)
    np.testing.assert_array_equal(images_of, matrix.sum(axis=1))
    np.testing.assert_array_equal(right, matrix.diagonal())
    np.testing.assert_array_equal(guessed, matrix.sum(axis=0))
    off = matrix - np.diag(matrix.diagonal())
    most = found.confused(5)
    assert most[:, 2].tolist() == sorted(off.ravel().tolist(), reverse=True)[: len(most)]
    assert len(most) == min(5, (off > 0).sum())
    assert all(off[true, guess] == count for true, guess, count in most)


def test_parts_are_as_the_whole_in_any_order(rng: np.random.Generator) -> None:
    """Batches of several sizes, one of them empty, of two processes."""
    probabilities, labels = draw(rng, 200, 40)
    whole = Outcomes.of(probabilities, labels, range(200))
    cuts = [slice(0, 7), slice(7, 7), slice(7, 90), slice(90, 200)]
    parts = [Outcomes.of(probabilities[cut], labels[cut], range(200)[cut]) for cut in cuts]
    together = Outcomes.together([Outcomes.together(parts[2:]), Outcomes.together(parts[:2])])
    for name in ("pairs", "mistakes"):
        np.testing.assert_array_equal(getattr(together, name), getattr(whole, name))
        assert getattr(together, name).dtype == np.int64
    np.testing.assert_allclose(together.bins, whole.bins)
    np.testing.assert_allclose(together.sureness, whole.sureness)
    assert together.num_images == 200
    nothing = Outcomes.together(parts[1:2])
    assert (nothing.num_images, nothing.pairs.shape, nothing.mistakes.shape) == (0, (0, 3), (0, 3))


def test_a_process_without_images_changes_nothing(rng: np.random.Generator) -> None:
    probabilities, labels = draw(rng, 9, 4)
    some = Outcomes.of(probabilities, labels, range(9))
    none = Outcomes.together([Outcomes.of(probabilities[:0], labels[:0], [])])
    np.testing.assert_array_equal(Outcomes.together([none, some, none]).pairs, some.pairs)


def two_classes(sureness: np.ndarray, is_right: np.ndarray) -> Outcomes:
    """Guesses of these probabilities; every guess is class 1."""
    return Outcomes.of(np.stack([1 - sureness, sureness], axis=1), is_right.astype("f"), range(len(sureness)))


@pytest.mark.parametrize(("sureness", "accuracy", "error"), [
    (0.8, 0.8, 0.0), (0.9, 0.6, 0.3), (0.6, 1.0, 0.4), (1.0, 0.0, 1.0),
])
def test_calibration_error_of_one_probability(sureness: float, accuracy: float, error: float) -> None:
    is_right = np.arange(1000) < 1000 * accuracy
    found = two_classes(np.full(1000, sureness), is_right)
    assert found.calibration_error == pytest.approx(error, abs=1e-9)


def test_calibration_error_of_known_distributions(rng: np.random.Generator) -> None:
    """If guesses are right as often as their probability p says, only random deviations remain. If they are wrong twice
    as often, the error is the mean of 1 - p."""
    sureness = rng.uniform(0.5001, 1, 200_000)
    calibrated = two_classes(sureness, rng.uniform(size=len(sureness)) < sureness)
    assert calibrated.calibration_error < 0.005  # 15 bins of 25,000: a deviation of 0.003 each
    too_sure = two_classes(sureness, rng.uniform(size=len(sureness)) < 1 - 2 * (1 - sureness))
    assert too_sure.calibration_error == pytest.approx(0.25, abs=0.005)


def test_bins_hold_their_upper_bound_and_what_is_no_number() -> None:
    sureness = np.array([8 / 15, 1.0, 0.9999999])
    assert two_classes(sureness, np.ones(3)).bins[:, 0].nonzero()[0].tolist() == [7, 14]
    broken = Outcomes.of(np.full((2, 3), np.nan, "f"), np.array([0, 2], "f"), [0, 1])
    assert broken.num_images == 2 and np.isfinite(broken.calibration_error)


def test_balanced_accuracy_is_the_mean_of_the_classes() -> None:
    """Classes 0, 1 and 3 have 8, 2 and 4 images, of which 6, 2 and 1 are right; class 2 has none, but is guessed."""
    labels = np.repeat([0, 1, 3], [8, 2, 4])
    guesses = np.array([0] * 6 + [1, 3] + [1, 1] + [3, 2, 2, 0])
    found = Outcomes.of(np.eye(5, dtype="f")[guesses], labels.astype("f"), range(14))
    assert found.balanced_accuracy == pytest.approx((6 / 8 + 2 / 2 + 1 / 4) / 3)
    assert found.is_uneven


@pytest.mark.parametrize(("sizes", "is_uneven"), [((5, 5, 0, 5), False), ((5, 9), False), ((5, 10), True)])
def test_uneven_classes(sizes: tuple[int, ...], is_uneven: bool) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    probabilities = np.full((len(labels), len(sizes)), 1 / len(sizes), "f")  # all are predicted as class 0
    assert Outcomes.of(probabilities, labels.astype("f"), range(len(labels))).is_uneven == is_uneven
