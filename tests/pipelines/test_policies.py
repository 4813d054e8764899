"""The choice of operations and their strengths, against the tables of torchvision and timm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipelines import ImageTransform
from pipelines.operations import Operation
from pipelines.policies import AUTOAUGMENT, OPERATIONS, TIMM_OPERATIONS, Draws, chosen, standard, wide
from pipelines.transform import MOST_OPERATIONS

TORCHVISION = {"".join(word.capitalize() for word in operation.name.split("_")): operation for operation in Operation}
FACTORS = (Operation.BRIGHTNESS, Operation.COLOR, Operation.CONTRAST, Operation.SHARPNESS)
WARPS = (Operation.SHEAR_X, Operation.SHEAR_Y, Operation.TRANSLATE_X, Operation.TRANSLATE_Y, Operation.ROTATE)


def draws(count: int, **columns: np.ndarray | float) -> Draws:
    """Random draws, with given columns for all operations: which, strength, sign, whether."""
    rng = np.random.default_rng(5)
    uniform = rng.random((count, MOST_OPERATIONS, 4), np.float32)
    for name, values in columns.items():
        uniform[:, :, ["which", "strength", "sign", "whether"].index(name)] = np.reshape(values, (-1, 1))
    return Draws(uniform, rng.standard_normal((count, MOST_OPERATIONS), np.float32))


def every_operation_and_strength(num_operations: int, num_strengths: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws that choose every operation with every strength and sign."""
    which, strength, sign = np.meshgrid(np.arange(num_operations), np.arange(num_strengths), [0.2, 0.8])
    return tuple(each.ravel() for each in ((which + 0.5) / num_operations, (strength + 0.5) / num_strengths, sign))


def table(transform: ImageTransform, size: int) -> dict[Operation, list[float]]:
    """All magnitudes of each operation that occur, sorted."""
    which, strength, sign = every_operation_and_strength(len(OPERATIONS), 31)
    given = draws(len(which), which=which, strength=strength, sign=sign)
    operation, magnitude = next(chosen(transform, given, size, size))
    return {each: sorted(set(np.round(magnitude[operation == each], 9))) for each in OPERATIONS}


def test_trivialaugment_is_that_of_the_paper():
    """arXiv:2103.10158, table 1, column "wide"; posterize goes down to 2 bits, as in torchvision and the authors'
    code."""
    magnitudes = table(ImageTransform(auto_augment="trivialaugment"), 224)
    largest = {Operation.SHEAR_X: 0.99, Operation.TRANSLATE_Y: 32, Operation.ROTATE: 135, Operation.COLOR: 1.99}
    for operation, value in largest.items():
        assert max(magnitudes[operation]) == pytest.approx(value)
        assert min(magnitudes[operation]) == pytest.approx(2 - value if operation in FACTORS else -value)
        assert len(magnitudes[operation]) == 61
    assert magnitudes[Operation.POSTERIZE] == [2, 3, 4, 5, 6, 7, 8]
    assert magnitudes[Operation.SOLARIZE] == pytest.approx(np.arange(31) * 8.5)


@pytest.mark.parametrize("name, magnitudes, size", [
    ("TrivialAugmentWide", wide, 224), ("RandAugment", standard, 224), ("RandAugment", standard, 331),
    ("AutoAugment", standard, 176),
])
def test_against_torchvision(name, magnitudes, size):
    autoaugment = pytest.importorskip("torchvision.transforms.autoaugment")
    theirs = getattr(autoaugment, name)()
    num_bins = 10 if name == "AutoAugment" else 31
    space = theirs._augmentation_space(*([num_bins] if name == "TrivialAugmentWide" else [num_bins, (size, size)]))
    if name == "AutoAugment":
        ours = tuple(tuple((TORCHVISION[step[0]], step[1], step[2] or 0) for step in pair) for pair in theirs.policies)
        assert ours == AUTOAUGMENT
    else:
        assert [TORCHVISION[each] for each in space] == list(OPERATIONS)
    for operation_name, (values, signed) in space.items():
        operation = TORCHVISION[operation_name]
        assert signed == (operation in WARPS + FACTORS)
        for number, value in enumerate(values.tolist() if values.ndim else []):
            # Translations are whole pixels. torchvision's 16.0 of TrivialAugment is 15.999998, which truncates to 15.
            given = int(value + 1e-4) if "TRANSLATE" in operation.name else value
            wanted = np.array([given, -given if signed else given]) + (operation in FACTORS)
            level, sign = np.full(2, number / (num_bins - 1)), np.array([0.1, 0.9])
            got = magnitudes(np.full(2, operation), level, sign, size, size)
            np.testing.assert_allclose(got, wanted, atol=2e-5)  # theirs are float32
            if operation is Operation.SOLARIZE:
                np.testing.assert_array_equal(np.ceil(got), np.ceil(wanted))  # equal thresholds invert the same pixels


def test_randaugment_takes_each_operation_equally_often():
    transform = ImageTransform(auto_augment="randaugment", randaugment_operations=3, randaugment_magnitude=15.0)
    steps = list(chosen(transform, draws(14_000), 100, 200))
    assert len(steps) == 3
    for operation, magnitude in steps:
        counts = np.bincount(operation, minlength=len(Operation))
        assert set(np.flatnonzero(counts)) == set(OPERATIONS)
        assert abs(counts[list(OPERATIONS)] - 1000).max() < 150  # standard deviation 30
        assert set(magnitude[operation == Operation.ROTATE]) == {15, -15}
        assert set(magnitude[operation == Operation.TRANSLATE_X]) == {45, -45}  # 150 / 331 of 200, its half
        assert set(magnitude[operation == Operation.TRANSLATE_Y]) == {22, -22}
    assert 0.05 < (steps[0][0] == steps[1][0]).mean() < 0.1  # 1 in 14: drawn independently


def test_autoaugment_takes_pairs_with_their_probabilities():
    first, second = chosen(ImageTransform(auto_augment="autoaugment"), draws(50_000), 100, 100)
    for number, (operation, magnitude) in enumerate((first, second)):
        wanted = sum(pair[number][1] for pair in AUTOAUGMENT) / len(AUTOAUGMENT)
        assert abs((operation != Operation.IDENTITY).mean() - wanted) < 0.01
        share = sum(pair[number][1] for pair in AUTOAUGMENT if pair[number][0] is Operation.EQUALIZE) / len(AUTOAUGMENT)
        assert abs((operation == Operation.EQUALIZE).mean() - share) < 0.01
        assert set(magnitude[operation == Operation.POSTERIZE]) <= {4.0, 5.0, 6.0}
    # Operations come in pairs: sharpness is only followed by inversion, or by nothing.
    assert set(second[0][first[0] == Operation.SHARPNESS]) == {Operation.IDENTITY, Operation.INVERT}


def test_timm_randaugment():
    """`rand-m7-mstd0-inc1`: the results of timm's data/auto_augment.py for level 7 (of 10)."""
    transform = ImageTransform(auto_augment="randaugment-timm", randaugment_magnitude=7.0)
    (operation, magnitude), _ = chosen(transform, draws(40_000), 100, 200)
    assert abs((operation == Operation.IDENTITY).mean() - 0.5) < 0.01
    counts = np.bincount(operation, minlength=len(Operation))[list(TIMM_OPERATIONS)]
    assert counts.sum() == (operation != Operation.IDENTITY).sum() and abs(counts - 40_000 / 30).max() < 180
    wanted = {
        Operation.ROTATE: {21, -21}, Operation.POSTERIZE: {2}, Operation.SOLARIZE: {77}, Operation.SOLARIZE_ADD: {77},
        Operation.COLOR: {0.37, 1.63}, Operation.SHARPNESS: {0.37, 1.63}, Operation.SHEAR_X: {-0.21, 0.21},
        Operation.TRANSLATE_X: {-63, 63}, Operation.TRANSLATE_Y: {-31.5, 31.5}, Operation.INVERT: {0},
    }  # fmt: skip
    for each, magnitudes in wanted.items():
        assert sorted(set(np.round(magnitude[operation == each], 6))) == pytest.approx(sorted(magnitudes))

    noisy = replace(transform, randaugment_magnitude_std=0.5)
    (operation, magnitude), (_, others) = chosen(noisy, draws(40_000), 100, 200)
    levels = np.abs(magnitude[operation == Operation.ROTATE]) / 3
    assert abs(levels.mean() - 7) < 0.06 and abs(levels.std() - 0.5) < 0.05
    assert (magnitude != others).any()
    strongest = replace(transform, randaugment_magnitude=10.0, randaugment_magnitude_std=0.5)
    (operation, magnitude), _ = chosen(strongest, draws(40_000), 100, 200)
    assert np.abs(magnitude[operation == Operation.ROTATE]).max() == 30, "never beyond the largest"
    assert magnitude[operation == Operation.COLOR].min() == pytest.approx(0.1)
