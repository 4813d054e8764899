"""TFRecord files of tf.train.Example as a source: what TensorFlow's ImageNet scripts and TFDS write.

A record is `length (uint64), its checksum (uint32), payload, the payload's checksum`, little-endian. The payload is a
protocol buffer, of which only what leads to the image and its label is read here:

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
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipelines.errors import DataError
from pipelines.files import open_file
from pipelines.sources.base import check_label
from pipelines.sources.folders import some
from pipelines.sources.shards import Entry, ShardSource

# Feature names of TensorFlow's own ImageNet scripts, and of TFDS.
IMAGE_KEYS = (b"image/encoded", b"image")
LABEL_KEYS = (b"image/class/label", b"label")

_LENGTH = struct.Struct("<Q")
_HEADER_BYTES, _FOOTER_BYTES = 12, 4
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5  # wire types

Stretch = tuple[int, int]  # begin and end, bytes of the file


class TFRecordSource(ShardSource):
    """Images in TFRecord shards. Labels that begin at 1, as those of TensorFlow's ImageNet scripts do (0 stands for
    the background there), are counted from 0."""

    @staticmethod
    def scan(file: Path) -> list[Entry]:
        try:
            with open_file(file) as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return [_read_example(data, record, file) for record in _records(data, file)]
        except ValueError:
            raise DataError(f"{file}: is empty; write it anew") from None
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror}); check the disk and permissions") from None

    def count_from_zero(self, labels: np.ndarray) -> np.ndarray:
        return labels + 1 if labels.min() < 0 else labels  # `scan` took the background off where there was none

    def describe(self, file: Path, offset: int) -> str:
        return f"{file}, image at byte {offset}"


def is_tfrecord(path: Path) -> bool:
    """train-00000-of-01024, imagenet2012-train.tfrecord-00000-of-01024, train.tfrecord, train.tfrecords."""
    return re.search(r"\.tfrecords?$|-\d{5}-of-\d{5}$", path.name) is not None


def _records(data: mmap.mmap, file: Path) -> Iterator[Stretch]:
    """The payloads of all records."""
    if data[:2] == b"\x1f\x8b":
        raise DataError(f"{file}: is compressed with gzip, and images are read from the middle of shards; unpack it")
    offset = 0
    while offset < len(data):
        begin = offset + _HEADER_BYTES
        end = begin + _LENGTH.unpack_from(data, offset)[0] if begin <= len(data) else begin
        offset = end + _FOOTER_BYTES
        if offset > len(data):
            raise DataError(f"{file}: is truncated or no TFRecord file (the record at byte {begin - _HEADER_BYTES} "
                            f"ends behind its {len(data)} bytes); download it again")
        yield begin, end


def _read_example(data: mmap.mmap, record: Stretch, file: Path) -> Entry:
    where = f"{file}: the record at byte {record[0] - _HEADER_BYTES}"
    try:
        entries = [dict(_fields(data, entry)) for features in _values(data, record, 1) for entry in
                   _values(data, features, 1)]
        features_of = {data[slice(*entry[1])]: entry.get(2, (0, 0)) for entry in entries}
        image = _first(data, features_of, IMAGE_KEYS, list_field=1)
        label = _first(data, features_of, LABEL_KEYS, list_field=3)
        number = _varint(data, label[0])[0] if label else 0
        number -= (number >= 1 << 63) * (1 << 64)  # int64
    except (IndexError, KeyError):
        raise DataError(f"{where} holds no tf.train.Example; give files of those") from None
    if not (image and label):
        known = some(sorted(ascii(key[:40].decode(errors="replace"))[1:-1] for key in features_of)) or "nothing"
        raise DataError(f"{where} has the features {known}; an image (bytes) is looked for as {_words(IMAGE_KEYS)}, a "
                        f"class number (int64) as {_words(LABEL_KEYS)}: write the files anew with these")
    if number < 0:
        raise DataError(f"{where} has the label {number}, which no class has; leave images without a label out")
    check_label(number, where)
    return Entry(image[0], image[1] - image[0], number - (LABEL_KEYS[0] in features_of))


def _words(keys: tuple[bytes, ...]) -> str:
    return " or ".join(key.decode() for key in keys)


def _first(data: mmap.mmap, features: dict[bytes, Stretch], keys: tuple[bytes, ...], list_field: int) -> Stretch | None:
    """The first value of the first feature of these names whose list has that type."""
    for key in keys:
        for values in _values(data, features.get(key, (0, 0)), list_field):
            for value in _values(data, values, 1):
                return value
    return None


def _values(data: mmap.mmap, message: Stretch, field: int) -> Iterator[Stretch]:
    return (value for number, value in _fields(data, message) if number == field)


def _fields(data: mmap.mmap, message: Stretch) -> Iterator[tuple[int, Stretch]]:
    """Numbers and values of a message's fields; raises IndexError for what is no message."""
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
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
