"""Reports, at the start of a run, identical files that spoil the run: files with two labels, or files in both training
and validation.

`verify` finds all these files by reading every image. This module makes only a cheap search, and only for images that
are files. It compares sizes first, then the last bytes of files of equal size, and whole files only if these are equal,
too. With more than MOST_IMAGES, or after SECONDS, it stops: the sizes of ImageNet's 1.28 million files alone would take
minutes on a network drive.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from pipelines.recordio import BrokenRecordError
from pipelines.sources import Source

MOST_IMAGES = 100_000  # images of both splits
SECONDS = 2.0  # 2,102 files took 0.04 s (cached in memory, one core)
TAIL = 4096  # bytes at the end of a file, where images with equal headers differ


class _File(NamedTuple):
    path: str
    label: int
    is_val: bool


def remarks_on_same_images(train: Source, val: Source | None, data: str) -> list[str]:
    """Sentences on identical images in a run's splits; none if the search takes too long. `data`: the data's name for
    the user.

    `val` is None if validation is on the training images.
    """
    if len(train) + (len(val) if val else 0) > MOST_IMAGES:
        return []
    deadline = time.monotonic() + SECONDS
    try:
        groups = [_files(train, False) + (_files(val, True) if val else [])]
        for key in (_size, _tail, _digest):
            groups = [part for group in groups for part in _parted(group, key, deadline)]
    except (OSError, TimeoutError):  # images that are not files, or a slow disk
        return []
    return [*_labels(groups, data), *_leaks(groups, data)]


def _files(source: Source, is_val: bool) -> list[_File]:
    """The images of a split. Raises OSError if they are not files."""
    if len(source) and not os.path.isfile(source.name(0)):
        raise FileNotFoundError(source.name(0))
    files = []
    for i in range(len(source)):
        with contextlib.suppress(BrokenRecordError):  # reported when the image is loaded
            files.append(_File(source.name(i), source.label(i), is_val))
    return files


def _parted(group: Sequence[_File], key: Callable[[str], Hashable], deadline: float) -> Iterable[list[_File]]:
    """Sets of files of a group that have equal keys, if equal files would spoil the run. Raises OSError and
    TimeoutError.
    """
    parts: dict[Hashable, list[_File]] = defaultdict(list)
    for number, file in enumerate(group):
        if number % 64 == 0 and time.monotonic() > deadline:
            raise TimeoutError
        parts[key(file.path)].append(file)
    return [part for part in parts.values() if _two_labels(part) or _in_both(part)]


def _two_labels(files: Sequence[_File]) -> list[_File]:
    """Two files of one split with different labels; [] if there are none."""
    for is_val in (False, True):
        of_label = {file.label: file for file in reversed(files) if file.is_val == is_val}
        if len(of_label) > 1:
            return list(of_label.values())[:2]
    return []


def _in_both(files: Sequence[_File]) -> list[_File]:
    """A training and a validation file; [] unless the group has both."""
    of_split = {file.is_val: file for file in reversed(files)}
    return [of_split[False], of_split[True]] if len(of_split) > 1 else []


def _size(path: str) -> int:
    return os.stat(path).st_size


def _tail(path: str) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - TAIL, 0))
        return file.read()


def _digest(path: str) -> bytes:
    with open(path, "rb") as file:
        return hashlib.blake2b(file.read(), digest_size=16).digest()


def _labels(groups: Sequence[Sequence[_File]], data: str) -> list[str]:
    found = [pair for group in groups if (pair := _two_labels(group))]
    if not found:
        return []
    one, other = (file.path for file in found[0])
    count = "an image has" if len(found) == 1 else f"{len(found):,} images have"
    return [f"{count} two labels, as the same file is in the folders of two classes: {one} and {other} "
            f"(python -m pipelines verify {data} lists all of them)"]


def _leaks(groups: Sequence[Sequence[_File]], data: str) -> list[str]:
    count = sum(not file.is_val for group in groups if _in_both(group) for file in group)
    if not count:
        return []
    one, other = next(_in_both(group) for group in groups if _in_both(group))
    are = "a training image is" if count == 1 else f"{count:,} training images are"
    return [f"{are} also in validation, which makes its accuracy too high: {one.path} and {other.path} "
            f"(python -m pipelines verify {data} lists all of them)"]
