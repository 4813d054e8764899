"""Writing files so that they are there complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from train.errors import TrainError


def write(path: Path, content: bytes) -> None:
    """Write a file in one step, making its folder if need be. Raises TrainError where that fails."""
    try:
        with replacing(path) as part:
            part.write_bytes(content)
    except OSError as error:
        raise TrainError(f"cannot write {path} ({error.strerror}): {way_out(error, 'give another place')}") from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name in the same folder to write to, which takes the place of `path` when all went well, and is gone otherwise.

    Makes the folder if need be. Raises OSError.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        yield part
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def log_of_run(path: Path) -> Iterator[None]:
    """Inside, `path` in a run's folder is written to. Raises TrainError where that fails."""
    try:
        yield
    except OSError as error:
        raise TrainError(f"cannot write {path} ({error.strerror}): {way_out(error, 'see that it can be written')} and "
                         f"start again, with --resume {path.parent} where that has a checkpoint") from None


def way_out(error: OSError, otherwise: str) -> str:
    """What to do about a file that could not be written: `otherwise` where it is not for want of room."""
    return "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else otherwise
