"""Resolves image files, folders and lists from the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.files import read_file
from pipelines.sources import Classes
from pipelines.sources.base import nfc
from pipelines.sources.folders import LeftOut, image_files
from train.errors import TrainError

LIST, STDIN = ".txt", Path("-")


def image_paths(places: Sequence[Path]) -> list[Path]:
    """The image files of `places`, in order: files; all image files in a folder and its subfolders, by name; files
    listed in a .txt file, one per line, or on standard input for "-". Files of a folder that are left out are reported
    on stderr.

    Raises TrainError for a folder or a list without image files, and for a place that does not exist.
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


class FolderClasses:
    """Finds an image's class from its folders.

    The class is the nearest folder with the name of a class: the image's own folder, or a folder between that and the
    folder that was given on the command line. `classes`: (folder or synset, name) of each class of the network.
    """

    def __init__(self, places: Sequence[Path], classes: Classes) -> None:
        self._names = {nfc(key): name for key, name in classes}
        self._places = {place for place in places if place.is_dir()}
        self._known: dict[str, str | None] = {}

    def of(self, image: str) -> str | None:
        """The name of the image's class; None if no folder has one."""
        folder = os.path.dirname(image)
        if folder not in self._known:
            self._known[folder] = self._find(Path(folder))
        return self._known[folder]

    def _find(self, folder: Path) -> str | None:
        folders = [folder, *folder.parents]
        given = next((depth for depth, each in enumerate(folders) if each in self._places), 0)
        names = [nfc(each.name) for each in folders[: given + 1]]
        return next((self._names[name] for name in names if name in self._names), None)


def _in_folder(folder: Path) -> list[Path]:
    left_out = LeftOut()
    found = image_files(folder, left_out)
    for remark in left_out.remarks(folder):
        print(remark, file=sys.stderr)
    if not found:
        others = f" that are read ({left_out.unread})" if left_out.unread else ""
        raise TrainError(f"the folder {folder} has no image files in it{others}; give image files, or a folder "
                         "with some")
    return found


def _listed(place: Path) -> list[Path]:
    """The paths in a list. File names are bytes that need not be valid in the locale's encoding, so the bytes are kept
    unchanged.
    """
    try:
        content = sys.stdin.buffer.read() if place == STDIN else read_file(place)
    except OSError as error:
        raise TrainError(f"{place} cannot be read ({error.strerror}): give a list of image files, one per "
                         "line") from None
    # programs on Windows may write a byte order mark
    lines = os.fsdecode(content.removeprefix(b"\xef\xbb\xbf")).split("\n")
    found = [Path(line) for line in (line.removesuffix("\r") for line in lines) if line.strip()]
    if not found:
        name = "standard input" if place == STDIN else place
        raise TrainError(f"{name} lists no image files: give one per line")
    return found
