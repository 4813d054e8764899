"""Folders of runs that begin without --output: each has a name of its own, even if two runs begin in one second."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

_taken: list[Path] = []  # made by this process, and not given back yet; the outermost first


def take(folder: Path) -> Path:
    """Create a folder of this name; or, if another run has taken it, one called NAME-2 and so on. Returns its path.
    Raises OSError."""
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
    """Remove the taken folders that are still empty: of a command that has ended before its first file."""
    while _taken:
        with contextlib.suppress(OSError):  # it has files, or is gone
            _taken.pop().rmdir()
