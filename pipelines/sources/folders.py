"""Image files in folders of classes, or in a list, as a source."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from pipelines.errors import DataError
from pipelines.files import read_lines
from pipelines.sources.base import IMAGE_SUFFIXES, Classes, Source, read_classes


def find_list(path: Path, split: str) -> list[Path]:
    """PATH.lst or PATH/train.lst."""
    found = path if path.suffix == ".lst" else path / f"{split}.lst"
    return [found] if found.is_file() else []


def find_folders(path: Path, split: str) -> list[Path]:
    """PATH/train with a folder for each class, or PATH itself with them: then all splits are the same images."""
    if (path / split).exists():
        return [path / split]
    has_splits = (path / "train").exists() or (path / "val").exists()
    return [path] if path.is_dir() and not has_splits and class_folders(path) else []


class FileSource(Source):
    """Image files, from class folders or from a list."""

    feeds = "paths"

    def __init__(self, path: Path, files: list[Path], labels: list[int], classes: Classes):
        self.path, self.classes = path, classes
        self._files, self._labels = files, labels

    def __len__(self) -> int:
        return len(self._files)

    def name(self, i: int) -> str:
        return str(self._files[i])

    def label(self, i: int) -> int:
        return self._labels[i]

    def feed(self, i: int) -> np.ndarray:
        return np.frombuffer(os.fsencode(self._files[i]), np.uint8)

    def read(self, i: int) -> np.ndarray:
        return np.fromfile(self._files[i], np.uint8)

    def location(self, i: int) -> tuple[Path, int, int]:
        """File, offset and size of image `i`; a file that is missing has no bytes."""
        file = self._files[i]
        return file, 0, file.stat().st_size if file.is_file() else 0


def class_folders(folder: Path) -> list[str]:
    """Sorted names of the sub-folders, hidden ones left out."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def image_files(folder: Path) -> list[str]:
    """Sorted names of the files with an image's ending."""
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not entry.name.startswith(".") and os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES
        )


def folder_classes(path: Path, split: str) -> Classes:
    """The classes of a folder of class folders; raises DataError if it holds none."""
    folders = class_folders(path)
    if not folders:
        inside = "only files" if any(path.iterdir()) else "nothing"
        raise DataError(
            f"data path {path} holds {inside}, no class folders; put the images of each class into a folder of its own"
        )
    train = path.parent / "train"
    names = class_folders(train) if split != "train" and path.name == split and train.is_dir() else folders
    return read_classes(path) or [(name, name) for name in names or folders]


def open_folders(path: Path, split: str) -> FileSource:
    classes = folder_classes(path, split)
    number = {key: label for label, (key, _) in enumerate(classes)}
    files: list[Path] = []
    labels: list[int] = []
    for name in class_folders(path):
        found = image_files(path / name)
        if found and name not in number:
            raise DataError(
                f"{path / name}: class {name!r} is not among the {len(classes)} known classes (classes.txt or the "
                f"training folders); add it there or remove the folder"
            )
        files += [path / name / file for file in found]
        labels += [number[name]] * len(found)
    if not files:
        raise DataError(f"data path {path} has class folders but no image in them; JPEG and PNG files are looked for")
    return FileSource(path, files, labels, classes)


def open_list(path: Path) -> FileSource:
    files: list[Path] = []
    labels: list[int] = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        fields = line.split("\t")
        try:
            labels.append(int(float(fields[1])))
            files.append(path.parent / fields[2])
        except (IndexError, ValueError, OverflowError):  # the last: an infinite label
            raise DataError(
                f"{path} line {number}: {line.strip()[:60]!r} is not `index <tab> label <tab> file`; correct it"
            ) from None
    if not files:
        raise DataError(f"{path}: the list names no files; write it anew")
    classes = read_classes(path.parent)
    if not classes:
        folder_of = dict(zip(labels, (file.parent.name for file in files), strict=True))
        names = [folder_of.get(label, str(label)) for label in range(max(labels) + 1)]
        classes = [(name, name) for name in names]
    for file, label in zip(files, labels, strict=True):
        if not 0 <= label < len(classes):
            raise DataError(f"{path}: label {label} of {file.name} is outside the {len(classes)} classes; correct it")
    return FileSource(path, files, labels, classes)
