"""Which operation is done to which image, and how strongly: TrivialAugment, RandAugment and AutoAugment.

A policy is a function of random numbers that are drawn elsewhere. Its constants are those of its source: torchvision's
transforms/autoaugment.py, and timm's data/auto_augment.py for "randaugment-timm".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np

from pipelines.operations import FAMILIES, Operation
from pipelines.transform import ImageTransform


class Draws(NamedTuple):
    """What a policy knows by chance, for each of N images and of the operations that may follow each other."""

    uniform: np.ndarray  # (N, MOST_OPERATIONS, 4) float32 in [0, 1): which operation, how strong, which sign, whether
    normal: np.ndarray  # (N, MOST_OPERATIONS) float32, of mean 0 and variance 1; only randaugment-timm has it


# Cubuk et al., arXiv:1909.13719, table 6 (with the identity, without inversion), as torchvision numbers them.
OPERATIONS = (
    Operation.IDENTITY,
    Operation.SHEAR_X,
    Operation.SHEAR_Y,
    Operation.TRANSLATE_X,
    Operation.TRANSLATE_Y,
    Operation.ROTATE,
    Operation.BRIGHTNESS,
    Operation.COLOR,
    Operation.CONTRAST,
    Operation.SHARPNESS,
    Operation.POSTERIZE,
    Operation.SOLARIZE,
    Operation.AUTO_CONTRAST,
    Operation.EQUALIZE,
)
# timm's list "of increasing severity" (`inc1`).
TIMM_OPERATIONS = (
    Operation.AUTO_CONTRAST,
    Operation.EQUALIZE,
    Operation.INVERT,
    Operation.ROTATE,
    Operation.POSTERIZE,
    Operation.SOLARIZE,
    Operation.SOLARIZE_ADD,
    Operation.COLOR,
    Operation.CONTRAST,
    Operation.BRIGHTNESS,
    Operation.SHARPNESS,
    Operation.SHEAR_X,
    Operation.SHEAR_Y,
    Operation.TRANSLATE_X,
    Operation.TRANSLATE_Y,
)
_A, _C, _E, _I, _O, _P, _R, _S, _H, _X = (
    Operation.AUTO_CONTRAST, Operation.CONTRAST, Operation.EQUALIZE, Operation.INVERT, Operation.COLOR,
    Operation.POSTERIZE, Operation.ROTATE, Operation.SOLARIZE, Operation.SHARPNESS, Operation.SHEAR_X,
)  # fmt: skip
# Cubuk et al., arXiv:1805.09501, table 9: for ImageNet, two operations, each with its probability and magnitude of 9.
AUTOAUGMENT = (
    ((_P, 0.4, 8), (_R, 0.6, 9)),
    ((_S, 0.6, 5), (_A, 0.6, 0)),
    ((_E, 0.8, 0), (_E, 0.6, 0)),
    ((_P, 0.6, 7), (_P, 0.6, 6)),
    ((_E, 0.4, 0), (_S, 0.2, 4)),
    ((_E, 0.4, 0), (_R, 0.8, 8)),
    ((_S, 0.6, 3), (_E, 0.6, 0)),
    ((_P, 0.8, 5), (_E, 1.0, 0)),
    ((_R, 0.2, 3), (_S, 0.6, 8)),
    ((_E, 0.6, 0), (_P, 0.4, 6)),
    ((_R, 0.8, 8), (_O, 0.4, 0)),
    ((_R, 0.4, 9), (_E, 0.6, 0)),
    ((_E, 0.0, 0), (_E, 0.8, 0)),
    ((_I, 0.6, 0), (_E, 1.0, 0)),
    ((_O, 0.6, 4), (_C, 1.0, 8)),
    ((_R, 0.8, 8), (_O, 1.0, 2)),
    ((_O, 0.8, 8), (_S, 0.8, 7)),
    ((_H, 0.4, 7), (_I, 0.6, 0)),
    ((_X, 0.6, 5), (_E, 1.0, 0)),
    ((_O, 0.4, 0), (_E, 0.6, 0)),
    ((_E, 0.4, 0), (_S, 0.2, 4)),
    ((_S, 0.6, 5), (_A, 0.6, 0)),
    ((_I, 0.6, 0), (_E, 1.0, 0)),
    ((_O, 0.6, 4), (_C, 1.0, 8)),
    ((_E, 0.8, 0), (_E, 0.6, 0)),
)
TIMM_PROBABILITY = 0.5  # of each operation
# What RandAugment and AutoAugment were made with: the largest translation of images of 331 pixels was 150.
TRANSLATION = 150 / 331

Chosen = tuple[np.ndarray, np.ndarray]  # (N,) Operation, (N,) its magnitude


def num_operations(transform: ImageTransform) -> int:
    """How many follow each other."""
    return {
        "none": 0,
        "trivialaugment": 1,
        "randaugment": transform.randaugment_operations,
        "randaugment-timm": transform.randaugment_operations,
        "autoaugment": 2,
    }[transform.auto_augment]


def families(transform: ImageTransform) -> frozenset[str]:
    """Those of the operations that the policy may choose."""
    used: Collection[Operation] = {
        "trivialaugment": OPERATIONS,
        "randaugment": OPERATIONS,
        "randaugment-timm": TIMM_OPERATIONS,
        "autoaugment": {operation for pair in AUTOAUGMENT for operation, _, _ in pair},
    }[transform.auto_augment]
    return frozenset(FAMILIES[operation] for operation in used if operation in FAMILIES)


def fill(transform: ImageTransform) -> float:
    """The grey of what comes in from outside an image: torchvision's is black, timm's the mean colour."""
    return round(sum(transform.mean_colour) / 3) if transform.auto_augment == "randaugment-timm" else 0


def chosen(transform: ImageTransform, draws: Draws, height: int, width: int) -> Iterator[Chosen]:
    """The operations on images of `height` x `width` pixels, in their order."""
    policies: dict[str, Callable[..., Chosen]] = {
        "trivialaugment": _trivialaugment,
        "randaugment": _randaugment,
        "randaugment-timm": _randaugment_timm,
        "autoaugment": _autoaugment,
    }
    for number in range(num_operations(transform)):
        yield policies[transform.auto_augment](transform, draws, number, height, width)


def _trivialaugment(_: ImageTransform, draws: Draws, number: int, height: int, width: int) -> Chosen:
    """Müller and Hutter, arXiv:2103.10158: one operation of the wide space, of any of 31 strengths."""
    which, strength, sign, _ = draws.uniform[:, number].T
    operation = _one_of(OPERATIONS, which)
    level = np.floor(strength * 31) / 30
    return operation, wide(operation, level, sign, height, width)


def _randaugment(transform: ImageTransform, draws: Draws, number: int, height: int, width: int) -> Chosen:
    """arXiv:1909.13719: each operation equally likely, all of one strength of 31."""
    which, _, sign, _ = draws.uniform[:, number].T
    operation = _one_of(OPERATIONS, which)
    level = np.full(len(sign), transform.randaugment_magnitude / 30)
    return operation, standard(operation, level, sign, height, width)


def _autoaugment(_: ImageTransform, draws: Draws, number: int, height: int, width: int) -> Chosen:
    """arXiv:1805.09501: one of 25 pairs of operations, each done with its own probability."""
    _, _, sign, whether = draws.uniform[:, number].T
    pair = _one_of(range(len(AUTOAUGMENT)), draws.uniform[:, 0, 0])
    operation, probability, bin_of_ten = np.array([pair[number] for pair in AUTOAUGMENT])[pair].T
    operation = np.where(whether < probability, operation, Operation.IDENTITY).astype(int)
    return operation, standard(operation, bin_of_ten / 9, sign, height, width)


def wide(operation: np.ndarray, level: np.ndarray, sign: np.ndarray, height: int, width: int) -> np.ndarray:
    """Magnitudes (N,) of TrivialAugment at levels from 0 to 1, with signs by a number below and above 1/2."""
    return _magnitude(operation, level, sign, 0.99, 135, 0.99, 6, (32, 32))


def standard(operation: np.ndarray, level: np.ndarray, sign: np.ndarray, height: int, width: int) -> np.ndarray:
    """Magnitudes (N,) of RandAugment and AutoAugment, as `wide`, in images of `height` x `width` pixels."""
    return _magnitude(operation, level, sign, 0.3, 30, 0.9, 4, (TRANSLATION * width, TRANSLATION * height))


def _magnitude(
    operation: np.ndarray,
    level: np.ndarray,
    sign: np.ndarray,
    shear: float,
    degrees: float,
    enhance: float,
    bits: int,
    translation: tuple[float, float],
) -> np.ndarray:
    """With the largest of each operation, as torchvision has them."""
    sign = np.where(sign < 0.5, 1, -1)
    by_operation = {
        (Operation.SHEAR_X, Operation.SHEAR_Y): sign * shear * level,
        (Operation.TRANSLATE_X,): sign * _whole(translation[0] * level),
        (Operation.TRANSLATE_Y,): sign * _whole(translation[1] * level),
        (Operation.ROTATE,): sign * degrees * level,
        (Operation.BRIGHTNESS, Operation.COLOR, Operation.CONTRAST, Operation.SHARPNESS): 1 + sign * enhance * level,
        (Operation.POSTERIZE,): 8 - np.round(bits * level),
        (Operation.SOLARIZE,): np.round(255 * (1 - level), 6),
    }
    return _by_operation(operation, by_operation)


def _randaugment_timm(transform: ImageTransform, draws: Draws, number: int, height: int, width: int) -> Chosen:
    """timm's `rand-mM-mstdS-inc1`: each operation with probability 1/2, its strength M of 10 with normal noise, its
    severity growing with M."""
    which, _, sign, whether = draws.uniform[:, number].T
    operation = np.where(whether < TIMM_PROBABILITY, _one_of(TIMM_OPERATIONS, which), Operation.IDENTITY)
    noise = transform.randaugment_magnitude_std * draws.normal[:, number]
    level = np.clip(transform.randaugment_magnitude + noise, 0, 10) / 10
    sign = np.where(sign < 0.5, 1, -1)
    by_operation = {
        (Operation.SHEAR_X, Operation.SHEAR_Y): sign * 0.3 * level,
        (Operation.TRANSLATE_X,): sign * 0.45 * level * width,
        (Operation.TRANSLATE_Y,): sign * 0.45 * level * height,
        (Operation.ROTATE,): sign * 30 * level,
        (Operation.BRIGHTNESS, Operation.COLOR, Operation.CONTRAST, Operation.SHARPNESS):
            np.maximum(0.1, 1 + sign * 0.9 * level),
        # timm keeps 0 bits at the largest strength, which Pillow refuses since its version 12: a black image.
        (Operation.POSTERIZE,): np.maximum(4 - _whole(4 * level), 1),
        (Operation.SOLARIZE,): 256 - _whole(256 * level),
        (Operation.SOLARIZE_ADD,): _whole(110 * level),
    }
    return operation, _by_operation(operation, by_operation)


def _one_of(choices: tuple[Operation, ...] | range, uniform: np.ndarray) -> np.ndarray:
    return np.array(choices)[(uniform * len(choices)).astype(int)]


def _whole(value: np.ndarray) -> np.ndarray:
    """Without its fraction, whatever 16.0 has become in floating point."""
    return np.floor(np.round(value, 6))


def _by_operation(operation: np.ndarray, magnitudes: dict[tuple[Operation, ...], np.ndarray]) -> np.ndarray:
    of_each = np.zeros((len(Operation), len(operation)))
    for operations, values in magnitudes.items():
        of_each[list(operations)] = values
    return of_each[operation, np.arange(len(operation))]
