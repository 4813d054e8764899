"""Log files in a run's folder. A file that is removed during the run is written again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, TextIO

from common.files import lock, way_out, write_bytes
from train.errors import TrainError


@contextlib.contextmanager
def writing(path: Path, advice: str) -> Iterator[None]:
    """A context in which `path` is written. Raises TrainError if that fails; `advice` tells what to do after the cause
    is removed.
    """
    try:
        yield
    except OSError as error:
        raise TrainError(f"cannot write {path} ({error.strerror}): {way_out(error, 'check its permissions')} and "
                         f"{advice}") from None


def log_of_run(path: Path) -> AbstractContextManager[None]:
    """A context in which `path` in a run's folder is written. Raises TrainError if that fails."""
    return writing(path, f"start again, with --resume {path.parent} where that has a checkpoint")


def content_of(file: IO[Any]) -> bytes:
    """The content of an open file that was removed; it exists as long as the file is open."""
    return Path(f"/proc/self/fd/{file.fileno()}").read_bytes()


class LogFile:
    """A text file that is created or continued. Each line is flushed, so that a killed run keeps its log. With
    `locked`, only one process can write to it.

    Raises OSError if the file cannot be opened, and TrainError if it is locked.
    """

    def __init__(self, path: Path, locked: bool = False) -> None:
        self._path, self._locked = path, locked
        self._file = self._opened()

    @property
    def is_gone(self) -> bool:
        """Whether the file was removed or replaced."""
        try:
            return not (self._file.closed or os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())))
        except OSError:
            return True

    def write_anew(self) -> None:
        """Write the removed file again, with its whole content. Raises TrainError if that fails."""
        with log_of_run(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self._path, content_of(self._file))
            self._file.close()
            self._file = self._opened()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def _append(self, line: str) -> None:
        """Append a line. Raises TrainError if the disk is full."""
        with log_of_run(self._path):
            self._file.write(line + "\n")

    def _opened(self) -> TextIO:
        file = self._path.open("a", encoding="utf-8", buffering=1)
        if self._locked and not lock(file):
            file.close()
            raise TrainError(f"another process is at work on the run in {self._path.parent}: wait for its end, or give "
                             "another --output folder")
        return file
