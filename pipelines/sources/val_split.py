"""Images of a data set without a split for validation, set aside for it (`--val-split`)."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict

import numpy as np

from pipelines.errors import DataError
from pipelines.recordio import BrokenRecordError
from pipelines.sources.base import Chosen, Source

_HASHES = 2**64


def set_aside(source: Source, fraction: float) -> np.ndarray:
    """Which images are for validation: bool (number of images). Raises DataError where no class can spare one.

    An image is where the hash of its class and its file's name is in the lowest `fraction` of all hashes. So each class
    gives about that part, and an image stays on its side whatever becomes of the others, and wherever the folder is.
    Only a class too small for that is seen to: of its highest hash it keeps an image to train on, and if it has two,
    that of its lowest is for validation.
    """
    hashes: dict[int, dict[int, int]] = defaultdict(dict)  # class -> image -> hash
    for i in range(len(source)):
        try:
            label = source.label(i)
        except BrokenRecordError:
            continue  # it is met where training looks for it
        hashes[label][i] = _hash(f"{source.classes[label][0]}/{os.path.basename(source.name(i))}")
    chosen = np.zeros(len(source), np.bool_)
    for of_class in hashes.values():
        lowest, highest = min(of_class, key=of_class.__getitem__), max(of_class, key=of_class.__getitem__)
        chosen[[i for i, value in of_class.items() if value < fraction * _HASHES]] = True
        chosen[lowest] = True
        chosen[highest] = False  # the only image of a class, too
    if not chosen.any():
        raise DataError(f"{source.path}: no class has two images, one to train on and one for --val-split "
                        f"{fraction:g}: add images, or train without validation (--validate-every 0)")
    return chosen


def part(source: Source, split: str, fraction: float) -> Source:
    """The images of "train" or "val". Raises DataError."""
    for_val = set_aside(source, fraction)
    return Chosen(source, np.flatnonzero(for_val if split == "val" else ~for_val).tolist())


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(os.fsencode(text), digest_size=8).digest(), "big")
