"""Files of a data set: text with names in it, and large ones that are mapped into memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from common.files import write_bytes
from pipelines.errors import DataError


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


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that a user may have written; raises DataError."""
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()  # Windows puts a mark before it
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check path and permissions") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no UTF-8 text (byte {error.start}); save it as UTF-8") from None


class MappedFile:
    """A file mapped into memory: reading a stretch costs no copy, and the operating system fetches its pages when they
    are first touched, in whichever thread that is, or before, by `read_ahead`.

    Raises DataError for a file that is empty or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise DataError(f"{path}: is empty; write it anew") from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); check path and permissions") from None
        self.bytes = np.frombuffer(self.map, np.uint8)

    def stretch(self, offset: int, size: int) -> np.ndarray:
        """A view of some bytes."""
        return self.bytes[offset : offset + size]

    def read_ahead(self, offset: int, size: int) -> None:
        """These bytes will be wanted soon: have them read from the disk meanwhile, without waiting."""
        start = offset - offset % mmap.PAGESIZE
        self.map.madvise(mmap.MADV_WILLNEED, start, min(offset + size, len(self.map)) - start)
