"""Sets images aside for validation in a data set without a validation split (`--val-split`)."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np

from pipelines.errors import DataError
from pipelines.options import GroupBy
from pipelines.recordio import BrokenRecordError
from pipelines.sources.base import Chosen, Source, nfc

_HASHES = 2**64
_FAR_OFF = 3  # standard deviations of a class's share under random choice


class SetAside(NamedTuple):
    """The images that are set aside for validation."""

    chosen: np.ndarray  # bool (number of images)
    remarks: list[str]  # remarks for the user about the classes' shares


def set_aside(source: Source, fraction: float, group_by: GroupBy = "image") -> SetAside:
    """Choose images for validation. Raises DataError if no class can spare one.

    A unit is an image, or with `group_by` "folder" all images of a folder. A unit is hashed by its class and its name
    within the data set. It is for validation if the hash is in the lowest `fraction` of all hash values. So each class
    gives about this fraction, and a unit stays on its side when other images change or the data are moved.

    Small classes need corrections. If no unit of a class is for validation, the unit with the lowest hash is moved to
    validation. If all units are for validation, the unit with the highest hash, perhaps the only unit, goes back to
    training.
    """
    of_unit, units_of = _units(source, group_by)
    hashes = {unit: _hash(unit) for unit in of_unit}
    val = {unit for unit, value in hashes.items() if value < fraction * _HASHES}
    for units in units_of.values():
        if len(units) > 1 and val.isdisjoint(units):
            val.add(min(units, key=hashes.__getitem__))
    for units in units_of.values():  # done last, because training images of a class matter more than validation images
        if val.issuperset(units):
            val.discard(max(units, key=hashes.__getitem__))
    if not val:
        two = "two images" if group_by == "image" else "images of two folders"
        raise DataError(f"{source.path}: no class has {two}, one to train on and one for --val-split "
                        f"{fraction:g}: add images, or train without validation (--validate-every 0)")
    chosen = np.zeros(len(source), np.bool_)
    chosen[[i for unit in val for i in of_unit[unit]]] = True
    return SetAside(chosen, _remarks(source, fraction, units_of, val))


def _units(source: Source, group_by: GroupBy) -> tuple[dict[str, list[int]], dict[int, dict[str, int]]]:
    """The images of each unit; and for each class its units, with the number of the class's images in each unit."""
    of_unit: dict[str, list[int]] = defaultdict(list)
    units_of: dict[int, dict[str, int]] = defaultdict(Counter)
    for i in range(len(source)):
        try:
            label = source.label(i)
        except BrokenRecordError:
            continue  # reported when training loads the image
        folder = source.classes[label][0]
        group = source.group(i) if group_by == "folder" else ""
        unit = f"group {group}" if group else f"{folder}/{source.identity(i)}"
        if group_by == "image" and unit in of_unit:
            unit = f"{folder}/{source.identity(i, fully=True)}"
        of_unit[unit].append(i)
        units_of[label][unit] += 1
    return of_unit, units_of


def _remarks(source: Source, fraction: float, units_of: dict[int, dict[str, int]], val: set[str]) -> list[str]:
    """A remark about classes whose validation share is far from the requested fraction."""
    far = []
    for label, units in sorted(units_of.items()):
        total, count = sum(units.values()), sum(number for unit, number in units.items() if unit in val)
        if total == 1:
            continue
        wanted = min(max(fraction * total, 1), total - 1)
        if not count or abs(count - wanted) > _FAR_OFF * math.sqrt(total * fraction * (1 - fraction)):
            far.append(f"{source.class_names[label]} {count:,} of {total:,}")
    if not far:
        return []
    named = ", ".join(far if len(far) <= 8 else [*far[:8], f"and {len(far) - 8:,} more classes"])
    return [f"{source.path}: some classes have a validation share far from --val-split {fraction:g}: {named}"]


def part(source: Source, split: str, fraction: float, group_by: GroupBy = "image") -> Source:
    """The images of the split "train" or "val". Raises DataError."""
    for_val, remarks = set_aside(source, fraction, group_by)
    found = Chosen(source, np.flatnonzero(for_val if split == "val" else ~for_val).tolist())
    found.remarks = [*source.remarks, *remarks]
    return found


def _hash(text: str) -> int:
    """The hash of a unit, equal for a copy of the data on a system that writes names in another form of Unicode."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(nfc(text)), digest_size=8).digest(), "big")
