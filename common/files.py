"""Writes files atomically, locks files and folders, and words the error messages of failed writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from common.errors import UserError

PEEK_SECONDS = 0.01  # longer than `is_locked` holds a lock


def expanded(path: str | Path) -> Path:
    """`path` with a leading `~` or `~NAME` expanded; unchanged if there is no home (Path.expanduser would raise)."""
    return Path(os.path.expanduser(path))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder. It replaces `path` if the block succeeds, and is deleted otherwise.
    Raises OSError."""
    _check_kind(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        yield partial
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write or replace a file atomically. Raises OSError, and then leaves no temporary file behind."""
    with replacing(path) as partial:
        partial.write_bytes(content)


def write(path: Path, content: bytes) -> None:
    """Write a file atomically, creating its folder if needed. Raises UserError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    except OSError as error:
        raise _no_place(path, error, "give another place") from None


def shown_size(num_bytes: int) -> str:
    """A number of bytes as text with a unit, for memory or files."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.1f} MiB"


def check_place(path: Path, otherwise: str) -> None:
    """Check, before minutes of work, that `write` will be able to write the file; creates nothing. Raises UserError
    with the advice `otherwise`."""
    try:
        _check_kind(path)
        nearest = next(folder for folder in path.parents if os.path.lexists(folder))
        # permission bits do not tell whether the file system is read-only, so a file is really created
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise _no_place(path, error, otherwise) from None


def _check_kind(path: Path) -> None:
    """Raise OSError if `path` is a folder, a device, a pipe or a dangling link: writing a file would replace it."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file")
    if path.is_symlink() and not path.exists():  # the disk with the link's target may be unmounted at present
        raise OSError(errno.EINVAL, "it is a link to a file that is not there")


def _no_place(path: Path, error: OSError, otherwise: str) -> UserError:
    return UserError(f"cannot write {path} ({error.strerror}): {way_out(error, otherwise)}")


def lock(opened: IO[Any] | int) -> bool:
    """Lock an open file, or a folder's descriptor. The lock lasts until the file is closed or the process ends. Returns
    False if another process holds the lock.
    """
    for attempt in range(2):
        time.sleep(attempt * PEEK_SECONDS)  # the other process may hold the lock for a moment only, in `is_locked`
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        except OSError:
            pass  # some network file systems do not support locks
        return True
    return False


@contextlib.contextmanager
def alone_in(folder: Path, taken: UserError) -> Iterator[None]:
    """Create a folder, and hold its lock during the `with` block. Raises UserError if the folder cannot be created or
    opened, and `taken` if another process holds the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}): "
                        f"{way_out(error, 'give another --output')}") from None
    try:
        if not lock(opened):
            raise taken
        yield
    finally:
        os.close(opened)


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock of a file. Returns False if the file cannot be opened."""
    try:
        with path.open("rb") as file:
            # the lock lasts until the file is closed, microseconds later
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def way_out(error: OSError, otherwise: str) -> str:
    """The advice for a file that could not be written: to make room if the disk or quota is full, and `otherwise` in
    all other cases.
    """
    return "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else otherwise
