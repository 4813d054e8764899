"""Reads the files of a data set: text files that hold names, and large files that are mapped into memory."""

from __future__ import annotations

import errno
import io
import mmap
import os
import shutil
import stat
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from common.content import refused_as
from common.files import write_bytes
from pipelines import bus_error
from pipelines.errors import DataError

_MOST_WORDS = 300  # characters that we quote of a library's error
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_file(path: Path, mode: Literal["rb", "ab"] = "rb") -> BinaryIO:
    """Open a file to read or append bytes. Raises OSError, also for a named pipe or a device: reading such a file could
    block forever.
    """
    try:
        return open(path, mode, opener=_open_without_waiting)
    except ValueError:
        check_is_file(path)  # raises with a clear message
        raise


def read_file(path: Path) -> bytes:
    """All bytes of a file; raises OSError like `open_file`."""
    with open_file(path) as file:
        return file.read()


def understood(path: Path, problem: str, way_out: str) -> AbstractContextManager[None]:
    """A context in which a library reads a file: any error about the content becomes a DataError of `problem` and
    `way_out`."""

    def refusal(error: Exception) -> DataError:
        words = " ".join(str(error).split())[:_MOST_WORDS].encode(errors="backslashreplace").decode()
        words = "".join(letter if letter.isprintable() else "?" for letter in words)
        said = words if " " in words else f"{type(error).__name__} {words}".strip()  # a KeyError's text is only the key
        return DataError(f"{path}: {problem} ({said}); {way_out}")

    return refused_as(refusal)


def check_is_file(path: Path | str | bytes) -> None:
    """Raise OSError if the path does not exist or is not a regular file."""
    try:
        status = os.stat(path)
    except ValueError:
        raise OSError(errno.EINVAL, "its name holds a NUL", os.fsdecode(path)) from None
    _check_mode(status, path)


def _open_without_waiting(path: str, flags: int) -> int:
    try:
        # Without O_NONBLOCK, opening a pipe waits until another process opens the other end.
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError:
        check_is_file(path)  # gives a clear message for a socket; the system's message is "No such device or address"
        raise
    try:
        _check_mode(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_mode(status: os.stat_result, path: Path | str | bytes) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"{kind}, not a file", os.fsdecode(path))


def write_text(path: Path, text: str) -> None:
    """Write or replace a UTF-8 text file in one step. Raises OSError, and DataError if a name in the text is not
    UTF-8."""
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        line = text[: error.start].count("\n")
        raise DataError(
            f"{path}: cannot hold {text.splitlines()[line]!a}, which is not UTF-8; rename that file or folder"
        ) from None
    write_bytes(path, content)


def link_beside(path: Path, name: str) -> None:
    """Give a file a second name in its folder by a symbolic link, so that the second name also names a later
    replacement of the file.

    Copies the file if the file system has no links. Does nothing if the name exists already. Raises OSError.
    """
    link = path.with_name(name)
    if link.exists():
        return
    try:
        link.symlink_to(path.name)
    except OSError:
        shutil.copy2(path, link)


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that a user may have written; raises DataError."""
    try:
        text = read_file(path).decode("utf-8-sig")  # Windows editors put a byte order mark first
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check path and permissions") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    if (place := text.find("\0")) >= 0:
        line = text.count("\n", 0, place) + 1
        raise DataError(f"{path} line {line}: holds a NUL, so the file is damaged; restore it")
    return lines_of(text)


def lines_of(text: str) -> list[str]:
    """The lines of a text, as text editors show them: `str.splitlines` is not used, because it also ends a line at
    characters that a name may contain, such as U+2028.
    """
    return io.StringIO(text, newline=None).read().removesuffix("\n").split("\n") if text else []


class MappedFile:
    """A file mapped into memory, which is read without a copy.

    The operating system fetches a page when a thread first touches it, or earlier after `read_ahead`. Raises DataError
    for a file that is empty or cannot be read. If the file loses bytes later, because it is cut short or its disk
    fails, the lost bytes are read as zeros; so call `check` after reading.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_damaged = False
        try:
            with open_file(path) as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise DataError(f"{path}: is empty; write it anew") from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); check path and permissions") from None
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.address, self.size = self.bytes.ctypes.data, len(self.bytes)
        bus_error.survive(self)

    def stretch(self, offset: int, size: int) -> np.ndarray:
        """A view of `size` bytes from `offset` on."""
        return self.bytes[offset : offset + size]

    def check(self) -> None:
        """Raise DataError if the file has lost bytes since it was opened."""
        if (size := self.map.size()) < self.size:
            raise DataError(f"{self.path}: had {self.size:,} bytes when it was opened and has {size:,} now; put the "
                            "whole file back, and do not write to data that is in use")
        if self.is_damaged:
            raise DataError(f"{self.path}: some of its bytes can no longer be read; check the disk, or copy the file "
                            "again")

    def read_ahead(self, offset: int, size: int) -> None:
        """Ask the system to read these bytes from the disk in the background, as they will be needed soon."""
        if not 0 <= offset < self.size:
            return  # the index is damaged; reading the record will report it
        start = offset - offset % mmap.PAGESIZE
        self.map.madvise(mmap.MADV_WILLNEED, start, min(offset + size, len(self.map)) - start)
