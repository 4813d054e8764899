"""Checks the structure of MXNet parameter files before MXNet reads them. MXNet's C++ code would use the memory and time
that a damaged length demands, even if the file is small.

Numbers are little-endian. The format is that of `NDArray::Save` in MXNet 1.9.1 (src/ndarray/ndarray.cc), or one of its
two predecessors, which occur in files of the model zoo:

    0x112, 0 (uint64 each)
    number of arrays (uint64), then each
        version 2, 3  magic (uint32), storage (int32, 0: dense), shape; nothing more if it has no axes
        version 1     magic (uint32), shape
        before        shape only, with the number of axes in the place of the magic
        device (2 int32), type (int32), elements
    number of names (uint64), then each: length (uint64), bytes

A shape is the number of axes (int32) and their lengths, int64 (before version 1: uint32).
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

MAGIC = 0x112
V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
# MXNet's type flag -> bytes
ITEM_BYTES = {0: 4, 1: 8, 2: 2, 3: 1, 4: 4, 5: 1, 6: 8, 7: 1, 8: 2, 9: 2, 10: 4, 11: 8, 12: 2}
MOST_AXES = 32
DEVICES, MOST_DEVICES = (1, 2, 3, 5), 1024  # CPU, GPU, pinned and shared CPU memory; the highest device number


def check(path: Path) -> None:
    """Raise ValueError unless the whole file has this structure."""
    with path.open("rb") as file:
        walk = _Walk(file, path.stat().st_size)
        if walk.number("Q") != MAGIC or walk.number("Q"):
            raise ValueError("it does not begin like a file of MXNet")
        arrays = walk.number("Q")
        for _ in range(arrays):
            _pass_array(walk)
        names = walk.number("Q")
        if names not in (0, arrays):
            raise ValueError(f"it has {names} names for {arrays} arrays")
        for _ in range(names):
            walk.skip(walk.number("Q"))
        if walk.left:
            raise ValueError(f"{walk.left} bytes follow its end")


def _pass_array(walk: _Walk) -> None:
    magic = walk.number("I")
    if magic in (V2, V3) and walk.number("i"):
        raise ValueError("an array is sparse")
    axes = walk.number("i") if magic in (V1, V2, V3) else magic
    if axes == (-1 if magic == V3 else 0):  # an array without a shape
        return
    if not 0 <= axes <= MOST_AXES:
        raise ValueError(f"an array has {axes} axes")
    shape = [walk.number("q" if magic in (V1, V2, V3) else "I") for _ in range(axes)]
    device, number = walk.number("i"), walk.number("i")
    if device not in DEVICES or not 0 <= number < MOST_DEVICES:
        raise ValueError(f"an array was on the device {number} of kind {device}")
    item = ITEM_BYTES.get(walk.number("i"), 0)
    if not item or min(shape, default=0) < 0:
        raise ValueError(f"an array has a type or shape ({shape}) that MXNet does not have")
    walk.skip(item * math.prod(shape))


class _Walk:
    """A cursor in a file; `left`: the number of bytes after the cursor."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self.left = file, size

    def number(self, kind: str) -> int:
        """Read the next number, of a `struct` type."""
        size = struct.calcsize(kind)
        self._take(size)
        (value,) = struct.unpack(f"<{kind}", self._file.read(size))
        return int(value)

    def skip(self, size: int) -> None:
        self._take(size)
        self._file.seek(size, 1)

    def _take(self, size: int) -> None:
        if size > self.left:
            raise ValueError(f"{size} bytes should follow, but only {self.left} do")
        self.left -= size
