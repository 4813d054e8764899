"""Reads and writes RecordIO, MXNet's format of one file for many images; reading uses memory mapping.

A record is `magic, flag and length, payload, padding to 4 bytes`. Integers are little-endian uint32; the upper three
bits of the second are the flag. If a payload contains the magic number at a multiple of 4, the payload is split there
into parts without the magic number (flags 1, 2 ... 2, 3; an unsplit record has flag 0). The payload of an image is
`flag, label, id, id2` (uint32, float32, two uint64), then `flag` float32 labels if flag > 0, then the encoded image.
The index is a text file with a line `key <tab> offset` for each record. Source: dmlc-core's recordio.h and
mxnet/recordio.py.
"""

from __future__ import annotations

import functools
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pipelines.errors import DataError
from pipelines.files import MappedFile, read_file

MAGIC = 0xCED7230A
_MAGIC_BYTES = struct.pack("<I", MAGIC)
_RECORD_HEADER = struct.Struct("<II")
_IMAGE_HEADER = struct.Struct("<IfQQ")
_MAX_LENGTH = (1 << 29) - 1  # bytes in one part: three of the 32 bits hold the flag


class Record(NamedTuple):
    """One image of a RecordIO file."""

    image: np.ndarray  # uint8, the encoded image; usually a view into the mapped file
    labels: tuple[float, ...]  # at least one

    @property
    def label(self) -> float:
        """The first label."""
        return self.labels[0]


class BrokenRecordError(ValueError):
    """The file holds no whole record at an offset of the index; the message says what the file has at this offset."""


class ChecksumError(BrokenRecordError):
    """The bytes of a record do not match its checksum."""


def index_path(record_path: Path) -> Path:
    """The path of a RecordIO file's index: its name with the suffix .idx."""
    return record_path.with_suffix(".idx")


def read_index(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read the keys and byte offsets of an index file: two int64 arrays in the file's order."""
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
        warnings.simplefilter("error")  # NumPy only prints a warning if it stops before the end of the text
        try:
            numbers = np.fromstring(text.decode("ascii"), dtype=np.int64, sep=" ")
        except (UnicodeDecodeError, ValueError, DeprecationWarning):
            numbers = np.empty(0, np.int64)
    if numbers.size == 0 or numbers.size % 2:
        raise DataError(f"{path}: not an index of a RecordIO file (lines of key, tab, offset); write it anew")
    return numbers[0::2], numbers[1::2]


def record_names(path: Path, keys: ArrayLike, offsets: ArrayLike) -> Callable[[int], str]:
    """A function that names the i-th record of an index for messages.

    The name is the record's key; if several records share a key, it also has the byte offset.
    """
    keys, offsets = np.asarray(keys), np.asarray(offsets)

    @functools.cache  # computed on demand: an index may have millions of keys, and few runs need a name
    def repeated() -> frozenset[int]:
        values, times = np.unique(keys, return_counts=True)
        return frozenset(values[times > 1].tolist())

    def name(i: int) -> str:
        return f"{path} record {keys[i]}" + f" (byte {offsets[i]})" * (int(keys[i]) in repeated())

    return name


class RecordFile(MappedFile):
    """Random access to the records of a .rec file by their byte offsets. Images are views into the mapped file."""

    def read(self, offset: int) -> Record:
        """Read the record at a byte offset; raises BrokenRecordError."""
        payload, _ = self._payload(offset)
        if len(payload) < _IMAGE_HEADER.size:
            raise BrokenRecordError(f"a record of {len(payload)} bytes has no room for an image header")
        num_labels, label, _, _ = _IMAGE_HEADER.unpack_from(payload.data)
        start = _IMAGE_HEADER.size + 4 * num_labels
        if start > len(payload):
            raise BrokenRecordError(f"its header announces {num_labels} labels, more than the record holds")
        labels = struct.unpack_from(f"<{num_labels}f", payload.data, _IMAGE_HEADER.size) if num_labels else (label,)
        return Record(payload[start:], labels)

    def scan(self) -> Iterator[int]:
        """Yield the offsets of all whole records from the start of the file; damaged stretches are skipped."""
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
        """The byte at which the record at `offset` ends and the next one begins; raises BrokenRecordError."""
        return self._payload(offset)[1]

    def count(self, known: np.ndarray) -> int:
        """The number of whole records in the file; `known` holds the byte offsets of some or all.

        If the known records are unsplit and fill the file without a gap, their number is returned at once. Otherwise
        the whole file is scanned.
        """
        starts = np.unique(known)
        ends = np.append(starts[1:], len(self.bytes))
        if starts[0] == 0 and not (starts % 4).any() and starts[-1] + _RECORD_HEADER.size <= len(self.bytes):
            words = self.bytes[: len(self.bytes) // 4 * 4].view("<u4")
            lengths = words[starts // 4 + 1].astype(np.int64)  # lengths, valid if the flag is 0
            whole = (words[starts // 4] == MAGIC) & (starts + _RECORD_HEADER.size + (lengths + 3) // 4 * 4 == ends)
            if whole.all():
                return len(starts)
        return sum(1 for _ in self.scan())

    def _next_magic(self, offset: int) -> int:
        """The next offset, a multiple of 4, that holds the magic number; -1 if there is none."""
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
    """Pack an image into the bytes of one whole record, ready to be appended to a .rec file."""
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
    """Split a payload at every magic number at a multiple of 4, because readers would take it for the start of a
    record.
    """
    parts, start, search = [], 0, 0
    while (found := payload.find(_MAGIC_BYTES, search)) >= 0:
        if found % 4:
            search = found + 1
        else:
            parts.append(payload[start:found])
            start = search = found + 4
    return [*parts, payload[start:]]
