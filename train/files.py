"""Writing files so that they are there complete or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from train.errors import TrainError


def write(path: Path, content: bytes) -> None:
    """Write a file in one step, making its folder if need be. Raises TrainError where that fails."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise TrainError(f"cannot write {path} ({error.strerror}): make room or give another place") from None
