"""Source for TFRecord files of tf.train.Example, the format of TensorFlow's ImageNet scripts and of TFDS.

A record is `length (uint64), its checksum (uint32), payload, the payload's checksum`, little-endian. The payload is a
protocol buffer. We read only the parts that lead to the image and its label:

    Example { Features features = 1 }                  Features { map<string, Feature> feature = 1 }
    Feature { BytesList bytes_list = 1 | FloatList float_list = 2 | Int64List int64_list = 3 }
    BytesList { repeated bytes value = 1 }             Int64List { repeated int64 value = 1 [packed] }

Sources: tensorflow/core/lib/io/record_writer.h, tensorflow/core/example/example.proto and feature.proto, and 'Encoding'
in the documentation of Protocol Buffers.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from pipelines.crc32c import masked_crc32c
from pipelines.errors import DataError
from pipelines.files import open_file
from pipelines.options import AUTO, FirstLabel
from pipelines.recordio import ChecksumError
from pipelines.sources.base import ONE_HOT_REMARK, check_label, data_folder, one_hot_class
from pipelines.sources.folders import some
from pipelines.sources.shards import Entry, ShardSource, shard_name

# Feature names in TensorFlow's own ImageNet scripts, in TFDS, and in Kaggle's 'Petals to the Metal' (flowers).
IMAGE_KEYS = (b"image/encoded", b"image")
LABEL_KEYS = (b"image/class/label", b"label", b"class")
# The kind of a label is the number of its key in LABEL_KEYS, or one of these.
ONE_HOT, DAMAGED = len(LABEL_KEYS), -1

_LENGTH = struct.Struct("<Q")
_HEADER_BYTES, _FOOTER_BYTES = 12, 4
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5  # wire types
_CHANGED = "the bytes of its record do not fit their checksum"
_KINDS = [*(key.decode() for key in LABEL_KEYS), "one-hot vectors"]

T = TypeVar("T")
Stretch = tuple[int, int]  # begin and end, in bytes of the file


class TFRecordSource(ShardSource):
    """Images in TFRecord shards.

    `image/class/label` counts from 1, as in TensorFlow's ImageNet scripts (where 0 is the background), unless a
    training image has the label 0. The training images decide for all splits; `first_label` overrides this.

    Args:
        files: the shards.
        num_classes: the least number of classes, if there is no classes.txt.
        first_label: "0" or "1", the label of the first class; "auto": decided as above.
        train: the training shards, if `files` are another split of the data set.
    """

    INDEX_VERSION = 4

    def __init__(self, files: list[Path], num_classes: int | None = None, first_label: FirstLabel = AUTO,
                 train: Sequence[Path] = ()) -> None:
        self.first_label, self._train = first_label, list(train)
        self._broken: dict[int, str] = {}  # damaged image found while labels were counted -> its fault in words
        super().__init__(files, num_classes)

    @staticmethod
    def scan(file: Path) -> list[Entry]:
        try:
            with open_file(file) as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return [_read_record(data, record, file) for record in _records(data, file)]
        except ValueError:
            raise DataError(f"{file}: is empty; write it anew") from None
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror}); check the disk and permissions") from None

    def count_from_zero(self, labels: np.ndarray) -> np.ndarray:
        usable = self._kind != DAMAGED
        for i in np.flatnonzero(~usable).tolist():
            self._broken[i] = _CHANGED
        self.kind = kind = self._one_kind(usable)
        lowest, highest = (self._outermost(choose, labels, usable) for choose in (np.min, np.max))
        if kind == ONE_HOT:
            self.remarks = [ONE_HOT_REMARK.format(self.path)]
            return np.where(usable, labels, -1)
        first = self._first(kind, lowest, highest)
        if lowest < first:
            which = int(np.flatnonzero(usable & (labels == lowest))[0])
            raise DataError(f"{self.name(which)}: has the label {lowest}, but labels count from {first} in this data "
                            f"set: leave such images out, or give --first-label {lowest}")
        if kind == 0:
            self.first_label = "1" if first else "0"
        if kind == 0 or first:
            self.remarks = [f"{data_folder(self.files[0].parent)}: labels ({_KINDS[kind]}) count from {first} "
                            "(--first-label)"]
        return np.where(usable, labels - first, -1)

    def _one_kind(self, usable: np.ndarray) -> int:
        """The kind that all labels share; raises DataError if there are several kinds."""
        kinds = [kind for kind in np.unique(self._kind[usable]).tolist() if self._any_whole(self._kind == kind, usable)]
        if len(kinds) > 1:
            one, other = (_KINDS[kind] for kind in kinds[:2])
            raise DataError(f"{self.path}: some of its labels are {one} and some {other}, which may count from "
                            "different numbers; write the shards anew with one kind")
        if not kinds:
            raise DataError(f"{self.path}: no record matches its checksum; download the files again")
        return int(kinds[0])

    def _outermost(self, choose: Callable[[np.ndarray], np.ndarray], labels: np.ndarray, usable: np.ndarray) -> int:
        """The lowest or highest label of an undamaged record; a damaged label must not decide for all others."""
        while not self._any_whole(labels == (value := choose(labels[usable])), usable):
            pass
        return int(value)

    def _any_whole(self, which: np.ndarray, usable: np.ndarray) -> bool:
        """Whether one of these records is undamaged; damaged records found during the search are marked as unusable."""
        for i in np.flatnonzero(which & usable).tolist():
            if self._is_whole(i):
                return True
            usable[i] = False
        return False

    def _is_whole(self, i: int) -> bool:
        try:
            self.check_record(i)
        except ChecksumError as error:
            self._broken[i] = str(error)
        return i not in self._broken

    def _first(self, kind: int, lowest: int, highest: int) -> int:
        """The label of the first class. Raises DataError if it cannot be determined."""
        if self.first_label != AUTO:
            return int(self.first_label)
        if self._train:
            train = TFRecordSource(self._train)
            if train.kind != kind:
                raise DataError(f"{self.path}: its labels are {_KINDS[kind]}, but those of the training images are "
                                f"{_KINDS[train.kind]}, which may count from a different number: give --first-label 0 "
                                "or 1")
            return int(train.first_label) if train.first_label != AUTO else 0
        if kind:  # TFDS and Kaggle's flowers count from 0
            return 0
        if lowest > 0 and highest + 1 == len(self.classes):
            raise DataError(f"{self.path}: its labels are {lowest} to {highest}, and classes.txt lists "
                            f"{len(self.classes)} classes: they may count from 0 or from 1, so give --first-label 0 "
                            "or 1")
        if lowest == 0 and highest == len(self.classes) > 0:
            raise DataError(f"{self.path}: its labels are 0 to {highest}, one more than the {highest} classes of "
                            "classes.txt: if 0 is the background, list it first, or leave its images out")
        return int(lowest > 0)

    def check_record(self, i: int) -> None:
        file, begin = self._maps[self._file[i]], int(self._begin[i])
        header = file.stretch(begin, _HEADER_BYTES)
        size = _LENGTH.unpack(header[: _LENGTH.size].tobytes())[0]
        end = begin + _HEADER_BYTES + size
        if not _fits(header, _LENGTH.size) or end + _FOOTER_BYTES > file.size:
            raise ChecksumError("the length of its record does not match its checksum")
        if not _fits(file.stretch(begin + _HEADER_BYTES, size + _FOOTER_BYTES), size):
            raise ChecksumError(_CHANGED)

    def label(self, i: int) -> int:
        if i in self._broken:
            raise ChecksumError(self._broken[i])
        return super().label(i)

    def feed(self, i: int) -> np.ndarray:
        if i in self._broken:
            raise ChecksumError(self._broken[i])
        return super().feed(i)

    def identity(self, i: int, fully: bool = False) -> str:
        return f"{shard_name(self.files[self._file[i]])}, image at byte {self._offset[i]}"

    def name(self, i: int) -> str:
        return f"{self.files[self._file[i]]}, image at byte {self._offset[i]}"


def is_tfrecord(path: Path) -> bool:
    """Whether a file is named like train-00000-of-01024, imagenet2012-train.tfrecord-00000-of-01024, train.tfrecord,
    train.tfrecords or train.tfrec."""
    return re.search(r"\.tfrec(?:ords?)?$|-\d{5}-of-\d{5}$", path.name.lower()) is not None


def _fits(stretch: np.ndarray, size: int) -> bool:
    """Whether the first `size` bytes match the checksum stored behind them."""
    stored = int.from_bytes(stretch[size : size + _FOOTER_BYTES].tobytes(), "little")
    return bool(masked_crc32c(stretch[None, :size])[0] == stored)


def _records(data: mmap.mmap, file: Path) -> list[Stretch]:
    """Find the payloads of all records. Raises DataError if a record's length does not match its checksum."""
    if data[:2] == b"\x1f\x8b":
        raise DataError(f"{file}: is compressed with gzip, but images must be read from its middle; unpack it")
    found: list[Stretch] = []
    end = offset = 0
    # stops at zeros, which do not advance `offset`
    while offset + _HEADER_BYTES <= len(data) and (not found or end > found[-1][0]):
        begin = offset + _HEADER_BYTES
        end = begin + _LENGTH.unpack_from(data, offset)[0]
        offset = end + _FOOTER_BYTES
        found.append((begin, end))
    headers = np.frombuffer(b"".join(data[begin - _HEADER_BYTES : begin] for begin, _ in found), np.uint8)
    headers = headers.reshape(-1, _HEADER_BYTES)
    stored = headers[:, _LENGTH.size :].copy().view("<u4")[:, 0]
    wrong = np.flatnonzero(masked_crc32c(headers[:, : _LENGTH.size]) != stored)
    if len(wrong):
        raise DataError(f"{file}: is damaged or not a TFRecord file (the length of the record at byte "
                        f"{found[wrong[0]][0] - _HEADER_BYTES} does not fit its checksum); download it again")
    if offset != len(data):
        last = found.pop()[0] - _HEADER_BYTES if offset > len(data) else offset
        raise DataError(f"{file}: is truncated or not a TFRecord file (the record at byte {last} goes beyond its "
                        f"{len(data)} bytes); download it again")
    return found


def _read_record(data: mmap.mmap, record: Stretch, file: Path) -> Entry:
    begin, end = record
    try:
        return _read_example(data, record, file)
    except DataError:
        if _fits(np.frombuffer(data[begin : end + _FOOTER_BYTES], np.uint8), end - begin):
            raise
        return Entry(begin, end - begin, -1, begin - _HEADER_BYTES, DAMAGED)


def _read_example(data: mmap.mmap, record: Stretch, file: Path) -> Entry:
    where = f"{file}: the record at byte {record[0] - _HEADER_BYTES}"
    try:
        entries = [dict(_fields(data, entry)) for features in _values(data, record, 1) for entry in
                   _values(data, features, 1)]
        features_of = {data[slice(*entry[1])]: entry.get(2, (0, 0)) for entry in entries}
        _, images = _first_with(features_of, IMAGE_KEYS, lambda feature: list(_bytes(data, feature)))
        kind, numbers = _first_with(features_of, LABEL_KEYS, lambda feature: list(_integers(data, feature)))
    except (IndexError, KeyError):
        raise DataError(f"{where} holds no tf.train.Example; give files of tf.train.Example") from None
    if not (images and numbers):
        known = some(sorted(ascii(key[:40].decode(errors="replace"))[1:-1] for key in features_of)) or "nothing"
        raise DataError(f"{where} has the features {known}; it needs an image (bytes) as {_words(IMAGE_KEYS)}, and a "
                        f"class number (int64) as {_words(LABEL_KEYS)}: write the files anew with these names")
    if len(images) > 1:
        raise DataError(f"{where} has {len(images)} images; write the files anew with one image in each record")
    number = numbers[0]
    if len(numbers) > 1:
        kind, number = ONE_HOT, one_hot_class(numbers, where)
    if number < 0:
        raise DataError(f"{where} has the label {number}, and no label may be negative; leave out images without a "
                        "label")
    check_label(number, where)
    (begin, end), = images
    return Entry(begin, end - begin, number, record[0] - _HEADER_BYTES, kind)


def _words(keys: tuple[bytes, ...]) -> str:
    return " or ".join(key.decode() for key in keys)


def _first_with(
    features: dict[bytes, Stretch], keys: tuple[bytes, ...], values_of: Callable[[Stretch], list[T]]
) -> tuple[int, list[T]]:
    """The number and the values of the first key whose feature has values."""
    found = ((number, values_of(features.get(key, (0, 0)))) for number, key in enumerate(keys))
    return next(((number, values) for number, values in found if values), (0, []))


def _bytes(data: mmap.mmap, feature: Stretch) -> Iterator[Stretch]:
    for values in _values(data, feature, 1):
        yield from _values(data, values, 1)


def _integers(data: mmap.mmap, feature: Stretch) -> Iterator[int]:
    for values in _values(data, feature, 3):
        for at, end in _values(data, values, 1):  # a field has one number, or several packed numbers
            while at < end:
                number, at = _varint(data, at)
                yield number - (number >= 1 << 63) * (1 << 64)  # converts to a signed 64-bit number
            if at > end:
                raise IndexError


def _values(data: mmap.mmap, message: Stretch, field: int) -> Iterator[Stretch]:
    return (value for number, value in _fields(data, message) if number == field)


def _fields(data: mmap.mmap, message: Stretch) -> Iterator[tuple[int, Stretch]]:
    """Yield the number and the byte range of each field of a message; raises IndexError for an invalid message."""
    at, end = message
    while at < end:
        tag, at = _varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            stop = _varint(data, at)[1]
        elif wire_type == _DELIMITED:
            size, at = _varint(data, at)
            stop = at + size
        elif wire_type in (_FIXED64, _FIXED32):
            stop = at + (8 if wire_type == _FIXED64 else 4)
        else:
            raise IndexError
        if stop > end:
            raise IndexError
        yield number, (at, stop)
        at = stop


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """Read a varint (seven bits per byte, lowest bits first); returns it and the byte after it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        if shift > 63:  # a varint has at most ten bytes
            raise IndexError
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
