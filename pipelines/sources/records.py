"""RecordIO files as a source of images."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from pipelines.errors import DataError
from pipelines.recordio import BrokenRecordError, Record, RecordFile, index_path, read_index, record_names
from pipelines.sources.base import ONE_HOT_REMARK, Source, check_label, one_hot_class, read_classes

_NUM_KEPT_RECORDS = 1 << 17
_SMALL_FILE = 1 << 28  # bytes; a smaller file is fetched from the disk as a whole
# number of records whose offset and label are checked when a file is opened; all others are checked when they are read
_NUM_SPOT_CHECKS = 1024


def find(path: Path, split: str) -> list[Path]:
    """Find PATH if it ends in .rec, PATH/SPLIT.rec or PATH/SPLIT/SPLIT.rec."""
    if path.suffix == ".rec":
        return [path] if path.is_file() else []
    return [found for found in (path / f"{split}.rec", path / split / f"{split}.rec") if found.is_file()][:1]


def class_number(labels: Sequence[float], num_labels: int, name: Callable[[], str]) -> float:
    """The class number of a record. Raises DataError if it has several labels that are not a one-hot vector.

    Args:
        labels: the record's labels.
        num_labels: the required number of labels: 1, or the length of the one-hot vectors.
        name: returns the record's name for a message.
    """
    if (number := len(labels)) != num_labels:
        plural = "s" * (number > 1)
        raise DataError(f"{name()} has {number} label{plural}, where {num_labels} {'is' if num_labels == 1 else 'are'} "
                        "expected: write all records with one class number")
    return labels[0] if number == 1 else float(one_hot_class(labels, name()))


class RecordSource(Source):
    """A RecordIO file."""

    feeds = "bytes"

    def __init__(self, path: Path, num_classes: int | None = None):
        self.path = path
        self._keys, self._offsets = read_index(index_path(path))
        self._name = record_names(path, self._keys, self._offsets)
        self._file = RecordFile(path)
        # The cache parses a record's header once for image and label, and the headers of a small data set once for all
        # epochs: parsing takes as long as decoding a thumbnail. The cache keeps views of 0.2 kB each.
        self._record = lru_cache(_NUM_KEPT_RECORDS)(self._parse)
        self._is_small = len(self._file.bytes) <= _SMALL_FILE
        if self._is_small:
            self._file.read_ahead(0, len(self._file.bytes))
        starts = np.append(np.unique(self._offsets), len(self._file.bytes))
        self._ends = starts[np.searchsorted(starts, self._offsets, side="right").clip(max=len(starts) - 1)]
        self.classes = read_classes(path.parent)
        self._num_labels = self._first_num_labels()
        self._spot_check()
        self.remarks = [*[ONE_HOT_REMARK.format(path)] * (self._num_labels > 1), *self._left_out()]
        if not self.classes:
            # Without a list of classes, the number of classes is `num_classes`, or follows from the labels, which needs
            # the header of every record.
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
        return class_number(self._record(i).labels, self._num_labels, lambda: self.name(i))

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
        """The number of labels in the first readable record; 1 if there is none."""
        for i in range(len(self)):
            with contextlib.suppress(BrokenRecordError):
                return len(self._record(i).labels)
        return 1

    def _parse(self, i: int) -> Record:
        return self._file.read(int(self._offsets[i]))

    def _labels(self) -> Iterator[int]:
        """Yield the labels of all records except broken ones, which fail when they are loaded. Raises DataError."""
        for i in range(len(self)):
            with contextlib.suppress(BrokenRecordError):
                label = self._class(i)
                check_label(label, self.name(i))
                yield int(label)

    def _left_out(self) -> list[str]:
        """Remarks about records that the index lacks or repeats; for a big file, from a sample of its records."""
        if self._is_small:
            return index_remarks(self.path, self._offsets, self._file.count(self._offsets))
        lacking = 0 if self._offsets.min() > 0 else None
        for i in (int(self._offsets.argmax()), *self._spots()):
            with contextlib.suppress(BrokenRecordError):
                if (end := self._file.end(int(self._offsets[i]))) < self._ends[i]:
                    lacking = end
        return index_remarks(self.path, self._offsets, None, lacking)

    def _spots(self) -> list[int]:
        """The places in the index of some records, evenly spaced."""
        return np.unique(np.linspace(0, len(self) - 1, _NUM_SPOT_CHECKS, dtype=np.int64)).tolist()

    def _spot_check(self) -> None:
        """Detect a wrong index when the file is opened, without reading the whole file if it is big."""
        for i in self._spots():
            try:
                self._class(i)
                if self.classes:
                    self.label(i)
            except BrokenRecordError as error:
                raise DataError(
                    f"{index_path(self.path)}: does not fit {self.path.name} (key {self._keys[i]}: {error}); "
                    f"put the right index there, or repair it with `python -m pipelines verify --write-clean`"
                ) from None


def index_remarks(path: Path, offsets: np.ndarray, num_records: int | None, lacking: int | None = None) -> list[str]:
    """Remarks about an index that lacks records of its file or names some records twice.

    Both are signs of an index that was cut off or doubled at the end of a line. `num_records` is the number of records
    in the file, if known; otherwise `lacking` is the byte at which a missing record may begin, if one was found.
    """
    index, num_named = index_path(path), len(np.unique(offsets))
    remarks = []
    if num_named < len(offsets):
        remarks.append(f"{index}: {len(offsets) - num_named:,} of its {len(offsets):,} lines name a record that "
                       "another line names too: these images come more than once")
    is_known = index.with_name(index.name + ".orig").exists()  # verify --write-clean left records out
    way_out = "" if is_known else (f"; for all of them remove {index.name} and let `python -m pipelines verify {path} "
                                   "--write-clean` write it anew")
    if num_records is not None and num_named < num_records:
        remarks.append(f"{index}: the index has {num_named:,} of the file's {num_records:,} records, the others are "
                       f"left out{way_out}")
    if lacking is not None:
        remarks.append(f"{index}: the index lacks records of the file, such as the one at byte {lacking:,}; they are "
                       f"left out{way_out}")
    return remarks
