"""RecordIO, MXNet's file of many images: reading through memory mapping, and writing.

A record is `magic, flag and length, payload, padding to 4 bytes`; integers are little-endian uint32, the upper three
bits of the second are the flag. A payload that holds the magic number at a multiple of 4 is cut there into several
parts without it (flags 1, 2 ... 2, 3; a whole record has 0). The payload of an image is `flag, label, id, id2` (uint32,
float32, two uint64), `flag` further float32 labels if flag > 0, and the encoded image. The index is a text file with a
line `key <tab> offset` for each record. Source: dmlc-core's recordio.h and mxnet/recordio.py.
"""

from __future__ import annotations

import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipelines.errors import DataError
from pipelines.files import MappedFile, read_file

MAGIC = 0xCED7230A
_MAGIC_BYTES = struct.pack("<I", MAGIC)
_RECORD_HEADER = struct.Struct("<II")
_IMAGE_HEADER = struct.Struct("<IfQQ")
_MAX_LENGTH = (1 << 29) - 1  # bytes in one part: three of the 32 bits are the flag


class Record(NamedTuple):
    """One image of a RecordIO file."""

    label: float
    image: np.ndarray  # uint8, the encoded image; usually a view into the mapped file
    labels: np.ndarray  # float32, all that the record has: one, or several of which `label` is the first


class BrokenRecordError(ValueError):
    """Where the index points, the file holds no whole record; the text says what is there instead."""


class ChecksumError(BrokenRecordError):
    """The bytes of a record are others than those that its checksum was made of."""


def index_path(record_path: Path) -> Path:
    """The index that belongs to a RecordIO file: the same name ending in .idx."""
    return record_path.with_suffix(".idx")


def read_index(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Keys and byte offsets of an index file, two int64 arrays in the file's order."""
    try:
        text = read_file(path)
    except FileNotFoundError:
        raise DataError(
            f"{path}: the index of {path.with_suffix('.rec').name} is missing; put the .idx that belongs to it there, "
            f"or write both anew with `python -m pipelines make-records`"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the file's permissions") from None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy only warns when it stops before the end of the text
        try:
            numbers = np.fromstring(text.decode("ascii"), dtype=np.int64, sep=" ")
        except (UnicodeDecodeError, ValueError, DeprecationWarning):
            numbers = np.empty(0, np.int64)
    if numbers.size == 0 or numbers.size % 2:
        raise DataError(f"{path}: not an index of a RecordIO file (lines of key, tab, offset); write it anew")
    return numbers[0::2], numbers[1::2]


def record_names(path: Path, keys: Sequence[int], offsets: Sequence[int]) -> Callable[[int], str]:
    """How messages call the records of an index, by their places in it: by their keys, and where several have the
    same, by where they are in the file, too."""
    repeated = {key for key, times in Counter(keys).items() if times > 1}

    def name(i: int) -> str:
        return f"{path} record {keys[i]}" + f" (byte {offsets[i]})" * (keys[i] in repeated)

    return name


class RecordFile(MappedFile):
    """Random access to the records of a .rec file by their byte offsets. Images are views into the mapped file."""

    def read(self, offset: int) -> Record:
        """The record at a byte offset; raises BrokenRecordError."""
        payload, _ = self._payload(offset)
        if len(payload) < _IMAGE_HEADER.size:
            raise BrokenRecordError(f"a record of {len(payload)} bytes has no room for an image header")
        num_labels, _, _, _ = _IMAGE_HEADER.unpack_from(payload.data)
        start = _IMAGE_HEADER.size + 4 * num_labels
        if start > len(payload):
            raise BrokenRecordError(f"its header announces {num_labels} labels, more than the record holds")
        labels = np.frombuffer(payload.data, "<f4", num_labels or 1, _IMAGE_HEADER.size if num_labels else 4)
        return Record(float(labels[0]), payload[start:], labels)

    def scan(self) -> Iterator[int]:
        """Offsets of all whole records from the file's beginning on; damaged stretches are passed over."""
        offset = 0
        while 0 <= offset < len(self.bytes):
            try:
                _, end = self._payload(offset)
            except BrokenRecordError:
                offset = self._next_magic(offset + 4)
                continue
            yield offset
            offset = end

    def end(self, offset: int) -> int:
        """Where the record at a byte offset ends, and the next one begins; raises BrokenRecordError."""
        return self._payload(offset)[1]

    def _next_magic(self, offset: int) -> int:
        """Where the magic number next stands at a multiple of 4; -1 if nowhere."""
        while (offset := self.map.find(_MAGIC_BYTES, offset)) % 4 and offset >= 0:
            offset += 1
        return offset

    def _payload(self, offset: int) -> tuple[np.ndarray, int]:
        parts: list[np.ndarray] = []
        while True:
            if offset < 0 or offset + _RECORD_HEADER.size > len(self.bytes):
                raise BrokenRecordError(f"offset {offset} is outside the file of {len(self.bytes)} bytes")
            magic, flag_and_length = _RECORD_HEADER.unpack_from(self.map, offset)
            flag, length = flag_and_length >> 29, flag_and_length & _MAX_LENGTH
            if magic != MAGIC or flag not in ((2, 3) if parts else (0, 1)):
                raise BrokenRecordError(f"no record begins at offset {offset}")
            start = offset + _RECORD_HEADER.size
            if start + length > len(self.bytes):
                raise BrokenRecordError(f"the record at offset {offset} is cut off by the end of the file")
            parts.append(self.bytes[start : start + length])
            offset = start + length + (-length) % 4
            if flag == 0:
                return parts[0], offset
            if flag == 3:
                return np.frombuffer(_MAGIC_BYTES.join(part.tobytes() for part in parts), np.uint8), offset


def pack_record(label: float, image: bytes, key: int) -> bytes:
    """The bytes of one whole record, ready to be appended to a .rec file."""
    payload = _IMAGE_HEADER.pack(0, label, key, 0) + image
    if len(payload) > _MAX_LENGTH:
        raise DataError(f"image {key} has {len(image)} bytes; a RecordIO record holds at most {_MAX_LENGTH}")
    parts = _split_at_magic(payload)
    flags = [0] if len(parts) == 1 else [1] + [2] * (len(parts) - 2) + [3]
    return b"".join(
        _RECORD_HEADER.pack(MAGIC, flag << 29 | len(part)) + part + bytes(-len(part) % 4)
        for flag, part in zip(flags, parts, strict=True)
    )


def _split_at_magic(payload: bytes) -> list[bytes]:
    """Cut a payload at every magic number that lies at a multiple of 4 (it would be taken for a record's beginning)."""
    parts, start, search = [], 0, 0
    while (found := payload.find(_MAGIC_BYTES, search)) >= 0:
        if found % 4:
            search = found + 1
        else:
            parts.append(payload[start:found])
            start = search = found + 4
    return [*parts, payload[start:]]
