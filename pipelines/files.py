"""Files of a data set: text with names in it, and large ones that are mapped into memory."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from common.errors import UserError
from common.files import write_bytes
from pipelines import bus_error
from pipelines.errors import DataError

_MOST_WORDS = 300  # letters of what a library says
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_file(path: Path, mode: Literal["rb", "ab"] = "rb") -> BinaryIO:
    """Open a file to read its bytes, or to add some. Raises OSError, also for what is no file: for a named pipe or a
    device one might wait for ever."""
    try:
        return open(path, mode, opener=_open_without_waiting)
    except ValueError:
        check_is_file(path)  # which knows it in words
        raise


def read_file(path: Path) -> bytes:
    """All bytes of a file; raises OSError as `open_file`."""
    with open_file(path) as file:
        return file.read()


@contextlib.contextmanager
def understood(path: Path, problem: str, way_out: str) -> Iterator[None]:
    """Where a library makes sense of a file's content: whatever it raises is one sentence, a DataError. What a library
    raises for damaged content is in no list: a byte more in a pickle is a LookupError or a ModuleNotFoundError. OSError
    is of the disk, and passed on."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:_MOST_WORDS].encode(errors="backslashreplace").decode()
        words = "".join(letter if letter.isprintable() else "?" for letter in words)
        said = words if " " in words else f"{type(error).__name__} {words}".strip()  # a KeyError says the key only
        raise DataError(f"{path}: {problem} ({said}); {way_out}") from None


def check_is_file(path: Path | str | bytes) -> None:
    """Raise OSError for what is not there, or is no file."""
    try:
        status = os.stat(path)
    except ValueError:
        raise OSError(errno.EINVAL, "its name holds a NUL", os.fsdecode(path)) from None
    _check_mode(status, path)


def _open_without_waiting(path: str, flags: int) -> int:
    try:
        # Else the opening of a pipe waits for somebody at its other end.
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError:
        check_is_file(path)  # of a socket it knows more than "No such device or address"
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
    """Write a UTF-8 text file in one step, over one that is there; raises OSError, and DataError for a name in the text
    that is in another encoding."""
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        line = text[: error.start].count("\n")
        raise DataError(
            f"{path}: cannot hold {text.splitlines()[line]!a}, which is not UTF-8; rename that file or folder"
        ) from None
    write_bytes(path, content)


def link_beside(path: Path, name: str) -> None:
    """Let a file appear under a second name in its folder, which what takes its place appears under too: a symbolic
    link. A copy where the file system has none. Nothing is done where that name is there already. Raises OSError."""
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
        text = read_file(path).decode("utf-8-sig")  # Windows puts a mark before it
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check path and permissions") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no UTF-8 text (byte {error.start}); save it as UTF-8") from None
    if (place := text.find("\0")) >= 0:
        line = text.count("\n", 0, place) + 1
        raise DataError(f"{path} line {line}: holds a NUL, as a damaged file; put a whole one there")
    return text.splitlines()


class MappedFile:
    """A file mapped into memory: reading a stretch costs no copy, and the operating system fetches its pages when they
    are first touched, in whichever thread that is, or before, by `read_ahead`.

    Raises DataError for a file that is empty or cannot be read. Bytes that the file loses later, as it is cut short or
    its disk fails, read as zeros from then on; who reads them is to ask `check` afterwards.
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
        """A view of some bytes."""
        return self.bytes[offset : offset + size]

    def check(self) -> None:
        """Raise DataError where the file has lost bytes since it was opened."""
        if (size := self.map.size()) < self.size:
            raise DataError(f"{self.path}: had {self.size:,} bytes when it was opened and has {size:,} now; put the "
                            "whole file back, and do not write data that is in use")
        if self.is_damaged:
            raise DataError(f"{self.path}: bytes of it cannot be read any more; check the disk, or copy the file anew")

    def read_ahead(self, offset: int, size: int) -> None:
        """These bytes will be wanted soon: have them read from the disk meanwhile, without waiting."""
        if not 0 <= offset < self.size:
            return  # of a damaged index; who reads there is told
        start = offset - offset % mmap.PAGESIZE
        self.map.madvise(mmap.MADV_WILLNEED, start, min(offset + size, len(self.map)) - start)
