"""Files that are written complete or not at all and by one process at a time, and what to say where that fails."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from common.errors import UserError


def expanded(path: str | Path) -> Path:
    """`path` with a leading `~` or `~NAME` expanded; unchanged where there is no home (Path.expanduser raises then)."""
    return Path(os.path.expanduser(path))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name in the same folder to write to, which takes the place of `path` when all went well, and is gone otherwise.
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
    """Write a file in one step, over one that is there; raises OSError, and then leaves nothing behind."""
    with replacing(path) as partial:
        partial.write_bytes(content)


def write(path: Path, content: bytes) -> None:
    """Write a file in one step, making its folder if need be. Raises UserError where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    except OSError as error:
        raise _no_place(path, error, "give another place") from None


def check_place(path: Path, otherwise: str) -> None:
    """See that `write` would find a place for the file, before what takes minutes, and make nothing. Raises UserError,
    which gives the advice `otherwise`."""
    try:
        _check_kind(path)
        nearest = next(folder for folder in path.parents if os.path.lexists(folder))
        tempfile.TemporaryFile(dir=nearest).close()  # permissions do not tell all: file systems may be read-only
    except OSError as error:
        raise _no_place(path, error, otherwise) from None


def _check_kind(path: Path) -> None:
    """Raise OSError where a file would take the place of what is none: a folder, a device, a pipe; and that
    of a link that leads nowhere."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")
    if path.is_symlink() and not path.exists():  # what it leads to may be on a disk that is not there at present
        raise OSError(errno.EINVAL, "it is a link to a file that is not there")


def _no_place(path: Path, error: OSError, otherwise: str) -> UserError:
    return UserError(f"cannot write {path} ({error.strerror}): {way_out(error, otherwise)}")


def lock(opened: IO[Any] | int) -> bool:
    """Lock a file, or a folder's descriptor, until it is closed, which the end of the process does too; False where
    another process has done so."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # some network file systems have no locks
    return True


def way_out(error: OSError, otherwise: str) -> str:
    """What to do about a file that could not be written: `otherwise` where it is not for want of room."""
    return "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else otherwise
