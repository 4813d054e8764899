"""Which operation and how strong: against the tables of torchvision and timm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipelines import ImageTransform
from pipelines.operations import Operation
from pipelines.policies import AUTOAUGMENT, OPERATIONS, TIMM_OPERATIONS, Draws, chosen
from pipelines.transform import MOST_OPERATIONS

TORCHVISION = {"".join(word.capitalize() for word in operation.name.split("_")): operation for operation in Operation}
FACTORS = (Operation.BRIGHTNESS, Operation.COLOR, Operation.CONTRAST, Operation.SHARPNESS)
SIGNED = (Operation.SHEAR_X, Operation.SHEAR_Y, Operation.TRANSLATE_X, Operation.TRANSLATE_Y, Operation.ROTATE, *FACTORS)


def draws(count: int, **columns: np.ndarray | float) -> Draws:
    """Random ones, but for some columns of all operations: which, strength, sign, whether."""
    rng = np.random.default_rng(5)
    uniform = rng.random((count, MOST_OPERATIONS, 4), np.float32)
    for name, values in columns.items():
        uniform[:, :, ["which", "strength", "sign", "whether"].index(name)] = np.reshape(values, (-1, 1))
    return Draws(uniform, rng.standard_normal((count, MOST_OPERATIONS), np.float32))


def every_operation_and_strength(num_operations: int, num_strengths: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The draws that choose them: which, strength and sign."""
    which, strength, sign = np.meshgrid(np.arange(num_operations), np.arange(num_strengths), [0.2, 0.8])
    return tuple(each.ravel() for each in ((which + 0.5) / num_operations, (strength + 0.5) / num_strengths, sign))


def table(transform: ImageTransform, size: int) -> dict[Operation, list[float]]:
    """The magnitudes of each operation, all that occur, in their order."""
    which, strength, sign = every_operation_and_strength(len(OPERATIONS), 31)
    operation, magnitude = next(chosen(transform, draws(len(which), which=which, strength=strength, sign=sign), size, size))
    return {each: sorted(set(np.round(magnitude[operation == each], 9))) for each in OPERATIONS}


def test_trivialaugment_is_that_of_the_paper():
    """arXiv:2103.10158, table 1, column "wide"; posterize to 2 bits, as in torchvision and the authors' code."""
    magnitudes = table(ImageTransform(auto_augment="trivialaugment"), 224)
    largest = {Operation.SHEAR_X: 0.99, Operation.TRANSLATE_Y: 32, Operation.ROTATE: 135, Operation.COLOR: 1.99}
    for operation, value in largest.items():
        assert max(magnitudes[operation]) == pytest.approx(value)
        assert min(magnitudes[operation]) == pytest.approx(2 - value if operation in FACTORS else -value)
        assert len(magnitudes[operation]) == 61
    assert magnitudes[Operation.POSTERIZE] == [2, 3, 4, 5, 6, 7, 8]
    assert magnitudes[Operation.SOLARIZE] == pytest.approx(np.arange(31) * 8.5)


@pytest.mark.parametrize("policy, size, largest", [
    ("trivialaugment", 224, 30), ("randaugment", 224, 30), ("randaugment", 331, 30), ("autoaugment", 176, 9),
])
def test_magnitudes_against_torchvision(policy, size, largest):
    autoaugment = pytest.importorskip("torchvision.transforms.autoaugment")
    theirs = {"trivialaugment": autoaugment.TrivialAugmentWide, "randaugment": autoaugment.RandAugment,
              "autoaugment": autoaugment.AutoAugment}[policy]()
    arguments = [largest + 1] if policy == "trivialaugment" else [largest + 1, (size, size)]
    space = theirs._augmentation_space(*arguments)
    if policy == "autoaugment":
        def as_ours(step):
            return TORCHVISION[step[0]], step[1], step[2] or 0

        assert tuple(tuple(map(as_ours, pair)) for pair in theirs.policies) == AUTOAUGMENT
    else:
        assert [TORCHVISION[name] for name in space] == list(OPERATIONS)
    for name, (values, signed) in space.items():
        operation = TORCHVISION[name]
        assert signed == (operation in SIGNED)
        if not values.ndim or operation not in OPERATIONS:
            continue
        for number, value in enumerate(values.tolist()):
            given = int(value) if "TRANSLATE" in operation.name else value  # as they call their functions
            wanted = {given, -given} if signed else {given}
            wanted = {1 + each for each in wanted} if operation in FACTORS else wanted
            assert magnitudes_of(policy, operation, number, size) == pytest.approx(sorted(wanted), abs=1e-4)


def magnitudes_of(policy: str, operation: Operation, number: int, size: int) -> list[float]:
    which = (OPERATIONS.index(operation) + 0.5) / len(OPERATIONS)
    if policy == "autoaugment":
        pairs = [(k, i) for k, pair in enumerate(AUTOAUGMENT) for i, step in enumerate(pair)
                 if step[0] == operation and step[2] == number]
        if not pairs:
            pytest.skip("")
    transform = ImageTransform(auto_augment=policy)
    if policy == "randaugment":
        transform = replace(transform, randaugment_magnitude=float(number))
    given = draws(2, which=which, strength=(number + 0.5) / 31, sign=np.array([0.1, 0.9]))
    operations, magnitudes = next(chosen(transform, given, size, size))
    assert (operations == operation).all()
    return sorted(set(magnitudes))
