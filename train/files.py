"""Writing the files of a run, and what to say where that fails."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from pipelines.files import write_bytes
from train.errors import TrainError


def write(path: Path, content: bytes) -> None:
    """Write a file in one step, making its folder if need be. Raises TrainError where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    except OSError as error:
        raise TrainError(f"cannot write {path} ({error.strerror}): {way_out(error, 'give another place')}") from None


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
