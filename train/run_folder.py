"""Folders of runs without --output: each gets a unique name, even if two runs begin in the same second."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

_taken: list[Path] = []  # folders that this process has created and not removed; the outermost first


def take(folder: Path) -> Path:
    """Create a folder with this name; or, if another run has taken it, NAME-2 and so on. Returns its path. Raises
    OSError."""
    if not folder.parent.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _taken.append(folder.parent)
    for number in itertools.count(1):
        path = folder.with_name(f"{folder.name}-{number}") if number > 1 else folder
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            _taken.append(path)
            return path
    raise AssertionError("count() has no end")


def give_back() -> None:
    """Remove the created folders that are still empty, when a command ends before its first file."""
    while _taken:
        with contextlib.suppress(OSError):  # the folder has files, or does not exist any more
            _taken.pop().rmdir()
