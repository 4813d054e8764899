"""RecordIO files as a source of images."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from pipelines.errors import DataError
from pipelines.recordio import BrokenRecordError, Record, RecordFile, index_path, read_index, record_names
from pipelines.sources.base import ONE_HOT_REMARK, Source, check_label, one_hot_class, read_classes

_NUM_KEPT_RECORDS = 1 << 17
_SMALL_FILE = 1 << 28  # bytes; fetched from the disk at once
_NUM_SPOT_CHECKS = 1024  # records whose place and label are checked when a file is opened; the others when read


def find(path: Path, split: str) -> list[Path]:
    """PATH.rec, PATH/train.rec or PATH/train/train.rec."""
    if path.suffix == ".rec":
        return [path] if path.is_file() else []
    return [found for found in (path / f"{split}.rec", path / split / f"{split}.rec") if found.is_file()][:1]


def class_number(record: Record, num_labels: int, name: str) -> float:
    """The label of a record, which is to be the number of a class. Raises DataError where there are several, but for
    one-hot vectors.

    Args:
        record: what the file holds.
        num_labels: how many labels it must have: 1, or the length of the one-hot vectors.
        name: the record, in messages.
    """
    if (number := len(record.labels)) != num_labels:
        plural = "s" * (number > 1)
        raise DataError(f"{name} has {number} label{plural}, where {num_labels} {'is' if num_labels == 1 else 'are'} "
                        "expected: write all records with one class number")
    return record.label if number == 1 else float(one_hot_class(record.labels, name))


class RecordSource(Source):
    """A RecordIO file."""

    feeds = "bytes"

    def __init__(self, path: Path, num_classes: int | None = None):
        self.path = path
        self._keys, self._offsets = read_index(index_path(path))
        self._name = record_names(path, self._keys.tolist(), self._offsets.tolist())
        self._file = RecordFile(path)
        # A record's header is parsed once for its image and its label, and small data sets are parsed once for all
        # epochs: for thumbnails it takes as long as decoding. What is kept are views, 0.2 kB each.
        self._record = lru_cache(_NUM_KEPT_RECORDS)(self._parse)
        self._is_small = len(self._file.bytes) <= _SMALL_FILE
        if self._is_small:
            self._file.read_ahead(0, len(self._file.bytes))
        starts = np.append(np.unique(self._offsets), len(self._file.bytes))
        self._ends = starts[np.searchsorted(starts, self._offsets, side="right").clip(max=len(starts) - 1)]
        self.classes = read_classes(path.parent)
        self._num_labels = self._first_num_labels()
        if self._num_labels > 1:
            self.remarks = [ONE_HOT_REMARK.format(path)]
        self._spot_check()
        if not self.classes:
            # No list of classes: as many as asked for, or as the labels need (reads the header of every record).
            count = max(num_classes or 1 + max(self._labels()), self._num_labels)
            self.classes = [(str(label), str(label)) for label in range(count)]

    def __len__(self) -> int:
        return len(self._offsets)

    def name(self, i: int) -> str:
        return self._name(i)

    def label(self, i: int) -> int:
        label = self._class(i)
        if not (0 <= label < len(self.classes) and label == int(label)):
            raise DataError(
                f"{self.name(i)}: label {label:g} is outside the {len(self.classes)} classes (0 to "
                f"{len(self.classes) - 1}); check classes.txt, or list all such records with "
                f"`python -m pipelines verify`"
            )
        return int(label)

    def _class(self, i: int) -> float:
        return class_number(self._record(i), self._num_labels, self.name(i))

    def feed(self, i: int) -> np.ndarray:
        return self._record(i).image

    def read(self, i: int) -> np.ndarray:
        return self._record(i).image

    def check(self, indices: Iterable[int]) -> None:
        self._file.check()

    def read_ahead(self, indices: Iterable[int]) -> None:
        for i in () if self._is_small else indices:
            self._file.read_ahead(int(self._offsets[i]), int(self._ends[i] - self._offsets[i]))

    def _first_num_labels(self) -> int:
        """How many labels the first record has that can be read."""
        for i in range(len(self)):
            with contextlib.suppress(BrokenRecordError):
                return len(self._record(i).labels)
        return 1

    def _parse(self, i: int) -> Record:
        return self._file.read(int(self._offsets[i]))

    def _labels(self) -> Iterator[int]:
        """Of all records but broken ones, which are met when their images are wanted. Raises DataError."""
        for i in range(len(self)):
            with contextlib.suppress(BrokenRecordError):
                label = self._class(i)
                check_label(label, self.name(i))
                yield int(label)

    def _spot_check(self) -> None:
        """Notice a wrong index when the file is opened, without touching all of a big file."""
        for i in np.unique(np.linspace(0, len(self) - 1, _NUM_SPOT_CHECKS, dtype=np.int64)):
            try:
                self._class(int(i))
                if self.classes:
                    self.label(int(i))
            except BrokenRecordError as error:
                raise DataError(
                    f"{index_path(self.path)}: does not fit {self.path.name} (key {self._keys[i]}: {error}); "
                    f"put the right index there, or mend it with `python -m pipelines verify --write-clean`"
                ) from None
