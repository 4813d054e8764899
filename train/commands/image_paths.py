"""Which images a command line means."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.files import read_file
from pipelines.sources.folders import LeftOut, image_files
from train.errors import TrainError

LIST, STDIN = ".txt", Path("-")


def image_paths(places: Sequence[Path]) -> list[Path]:
    """Each file; the image files in each folder and in those within it, by name; those that a .txt file lists, one a
    line, or standard input for "-". What of a folder is left out is said on stderr.

    Raises TrainError for a folder or a list without any, and for a place that is not there.
    """
    paths: list[Path] = []
    for place in places:
        if place == STDIN or place.suffix.lower() == LIST:
            found = _listed(place)
        elif place.is_dir():
            found = _in_folder(place)
        elif place.exists():
            found = [place]
        else:
            raise TrainError(f"{place} does not exist: give image files, or folders or lists of them")
        paths += found
    return paths


def _in_folder(folder: Path) -> list[Path]:
    left_out = LeftOut()
    found = image_files(folder, left_out)
    for remark in left_out.remarks(folder):
        print(remark, file=sys.stderr)
    if not found:
        others = f" that are read ({left_out.unread})" if left_out.unread else ""
        raise TrainError(f"the folder {folder} has no image files in it{others}; name files, or a folder that has")
    return found


def _listed(place: Path) -> list[Path]:
    """The names of files are bytes, whatever the locale: they stay as they are."""
    try:
        content = sys.stdin.buffer.read() if place == STDIN else read_file(place)
    except OSError as error:
        raise TrainError(f"{place} cannot be read ({error.strerror}): give a list of image files, one a line") from None
    lines = os.fsdecode(content.removeprefix(b"\xef\xbb\xbf")).split("\n")  # Windows puts a mark before it
    found = [Path(line) for line in (line.removesuffix("\r") for line in lines) if line.strip()]
    if not found:
        name = "standard input" if place == STDIN else place
        raise TrainError(f"{name} lists no image files: give one a line")
    return found
