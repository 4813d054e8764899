"""Chooses the operation for each image, and the strength of the operation: TrivialAugment, RandAugment and AutoAugment.

A policy is a function of random numbers that are drawn elsewhere. Its constants come from torchvision's
transforms/autoaugment.py, and for "randaugment-timm" from timm's data/auto_augment.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np

from pipelines.operations import FAMILIES, Operation
from pipelines.transform import ImageTransform


class Draws(NamedTuple):
    """A policy's random numbers for each of N images and each of up to MOST_OPERATIONS operations in sequence."""

    uniform: np.ndarray  # (N, MOST_OPERATIONS, 4) float32 in [0, 1) for: operation, strength, sign, apply or not
    normal: np.ndarray  # (N, MOST_OPERATIONS) float32 with mean 0 and variance 1; only randaugment-timm reads it


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
# Cubuk et al., arXiv:1805.09501, table 9 (ImageNet): pairs of (operation, probability, magnitude from 0 to 9).
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
TIMM_PROBABILITY = 0.5  # probability of each operation
# RandAugment and AutoAugment were designed with translations of up to 150 pixels in images of 331 pixels.
TRANSLATION = 150 / 331

Chosen = tuple[np.ndarray, np.ndarray]  # (N,) Operation, (N,) magnitude of the operation


def num_operations(transform: ImageTransform) -> int:
    """The number of operations that the policy applies to an image in sequence."""
    return {
        "none": 0,
        "trivialaugment": 1,
        "randaugment": transform.randaugment_operations,
        "randaugment-timm": transform.randaugment_operations,
        "autoaugment": 2,
    }[transform.auto_augment]


def families(transform: ImageTransform) -> frozenset[str]:
    """The families of the operations that the policy may choose."""
    used: Collection[Operation] = {
        "trivialaugment": OPERATIONS,
        "randaugment": OPERATIONS,
        "randaugment-timm": TIMM_OPERATIONS,
        "autoaugment": {operation for pair in AUTOAUGMENT for operation, _, _ in pair},
    }[transform.auto_augment]
    return frozenset(FAMILIES[operation] for operation in used if operation in FAMILIES)


def fill(transform: ImageTransform) -> float:
    """The grey level for pixels outside an image: black in torchvision, the mean colour in timm."""
    return round(sum(transform.mean_colour) / 3) if transform.auto_augment == "randaugment-timm" else 0


def chosen(transform: ImageTransform, draws: Draws, height: int, width: int) -> Iterator[Chosen]:
    """Yield the operations on images of `height` x `width` pixels, in their order."""
    policies: dict[str, Callable[..., Chosen]] = {
        "trivialaugment": _trivialaugment,
        "randaugment": _randaugment,
        "randaugment-timm": _randaugment_timm,
        "autoaugment": _autoaugment,
    }
    for number in range(num_operations(transform)):
        yield policies[transform.auto_augment](transform, draws, number, height, width)


def _trivialaugment(_: ImageTransform, draws: Draws, number: int, height: int, width: int) -> Chosen:
    """Müller and Hutter, arXiv:2103.10158: one operation from the wide search space, at a random one of 31 strengths.
    """
    which, strength, sign, _ = draws.uniform[:, number].T
    operation = _one_of(OPERATIONS, which)
    level = np.floor(strength * 31) / 30
    return operation, wide(operation, level, sign, height, width)


def _randaugment(transform: ImageTransform, draws: Draws, number: int, height: int, width: int) -> Chosen:
    """arXiv:1909.13719: all operations are equally likely, and have one fixed strength out of 31."""
    which, _, sign, _ = draws.uniform[:, number].T
    operation = _one_of(OPERATIONS, which)
    level = np.full(len(sign), transform.randaugment_magnitude / 30)
    return operation, standard(operation, level, sign, height, width)


def _autoaugment(_: ImageTransform, draws: Draws, number: int, height: int, width: int) -> Chosen:
    """arXiv:1805.09501: one of 25 pairs of operations; each operation is applied with its own probability."""
    _, _, sign, whether = draws.uniform[:, number].T
    pair = _one_of(range(len(AUTOAUGMENT)), draws.uniform[:, 0, 0])
    operation, probability, bin_of_ten = np.array([pair[number] for pair in AUTOAUGMENT])[pair].T
    operation = np.where(whether < probability, operation, Operation.IDENTITY).astype(int)
    return operation, standard(operation, bin_of_ten / 9, sign, height, width)


def wide(operation: np.ndarray, level: np.ndarray, sign: np.ndarray, height: int, width: int) -> np.ndarray:
    """Magnitudes (N,) of TrivialAugment for `level` from 0 to 1; `sign` below 1/2 means plus, otherwise minus."""
    return _magnitude(operation, level, sign, 0.99, 135, 0.99, 6, (32, 32))


def standard(operation: np.ndarray, level: np.ndarray, sign: np.ndarray, height: int, width: int) -> np.ndarray:
    """Magnitudes (N,) of RandAugment and AutoAugment for images of `height` x `width` pixels; arguments as in `wide`.
    """
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
    """Magnitudes (N,) from the largest magnitude of each operation; the formulas are torchvision's."""
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
    """timm's `rand-mM-mstdS-inc1`: each operation is applied with probability 1/2, at strength M out of 10 plus normal
    noise; all operations become more severe as M grows."""
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
        # At the largest strength timm keeps 0 bits, a black image, which Pillow refuses since version 12; we keep 1.
        (Operation.POSTERIZE,): np.maximum(4 - _whole(4 * level), 1),
        (Operation.SOLARIZE,): 256 - _whole(256 * level),
        (Operation.SOLARIZE_ADD,): _whole(110 * level),
    }
    return operation, _by_operation(operation, by_operation)


def _one_of(choices: tuple[Operation, ...] | range, uniform: np.ndarray) -> np.ndarray:
    return np.array(choices)[(uniform * len(choices)).astype(int)]


def _whole(value: np.ndarray) -> np.ndarray:
    """Round down; rounding to 6 digits first keeps 15.9999999, which stands for 16, at 16."""
    return np.floor(np.round(value, 6))


def _by_operation(operation: np.ndarray, magnitudes: dict[tuple[Operation, ...], np.ndarray]) -> np.ndarray:
    of_each = np.zeros((len(Operation), len(operation)))
    for operations, values in magnitudes.items():
        of_each[list(operations)] = values
    return of_each[operation, np.arange(len(operation))]
