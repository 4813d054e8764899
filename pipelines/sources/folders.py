"""Image files in folders of classes, or in a list, as a source."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from pipelines.errors import DataError
from pipelines.files import check_is_file, open_file, read_lines
from pipelines.sources.base import IMAGE_SUFFIXES, Classes, Source, read_classes


def find_list(path: Path, split: str) -> list[Path]:
    """PATH.lst or PATH/train.lst."""
    found = path if path.suffix == ".lst" else path / f"{split}.lst"
    return [found] if found.is_file() else []


def find_folders(path: Path, split: str) -> list[Path]:
    """PATH/train with a folder for each class, or PATH itself with them: then all splits are the same images."""
    if (path / split).is_dir():
        return [path / split]
    return [path] if path.is_dir() and not _has_splits(path) and class_folders(path) else []


def _has_splits(path: Path) -> bool:
    return (path / "train").is_dir() or (path / "val").is_dir()


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
        path = os.fsencode(self._files[i])
        check_is_file(path)  # DALI's threads would wait for a named pipe, and nothing ends them
        return np.frombuffer(path, np.uint8)

    def read(self, i: int) -> np.ndarray:
        with open_file(self._files[i]) as file:
            return np.fromfile(file, np.uint8)

    def location(self, i: int) -> tuple[Path, int, int]:
        """File, offset and size of image `i`; a file that is missing has no bytes."""
        file = self._files[i]
        return file, 0, file.stat().st_size if file.is_file() else 0


def class_folders(folder: Path) -> list[str]:
    """Sorted names of the sub-folders, hidden ones left out."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def image_files(folder: Path) -> list[Path]:
    """The files with an image's ending in a class folder, and in folders within it as those of Tiny ImageNet, in the
    order of their names; what is hidden is left out, and links to folders are not followed. Raises OSError for a folder
    that cannot be read."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        images = (name for name in names if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES)
        found += [Path(place, name) for name in sorted(images) if not name.startswith(".")]
    return found


def _raise(error: OSError) -> None:
    raise error


def folder_classes(path: Path, split: str) -> Classes:
    """The classes of a folder of class folders; raises DataError if it holds none."""
    folders = class_folders(path)
    if not folders:
        inside = "only files" if any(path.iterdir()) else "nothing"
        raise DataError(
            f"data path {path} holds {inside}, no class folders; put the images of each class into a folder of its own"
        )
    if path.name != split:
        for name in filter(lambda name: _has_splits(path / name), folders):
            raise DataError(f"data path {path} has no train and val, but {path / name} has; give that")
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
        files += found
        labels += [number[name]] * len(found)
    if not files:
        raise no_images(path)
    return FileSource(path, files, labels, classes)


def no_images(path: Path) -> DataError:
    """The error for class folders without an image."""
    kinds = ", ".join(sorted(IMAGE_SUFFIXES))
    return DataError(f"data path {path} has class folders but no image in them; files ending in {kinds} are looked for")


def list_entry(line: str) -> tuple[int, str]:
    """Label and file of a line of a list; raises ValueError for what is no `index <tab> label <tab> file`."""
    _, number, file = line.split("\t")[:3]
    label = float(number)
    if not label.is_integer():
        raise ValueError(number)
    return int(label), file


def open_list(path: Path) -> FileSource:
    files: list[Path] = []
    labels: list[int] = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            label, name = list_entry(line)
        except ValueError:
            raise DataError(
                f"{path} line {number}: {line.strip()[:60]!r} is not `index <tab> label <tab> file`; correct it"
            ) from None
        labels.append(label)
        files.append(path.parent / name)
    if not files:
        raise DataError(f"{path}: the list names no files; write it anew")
    classes = read_classes(path.parent)
    if not classes:
        names = _folder_names(files, labels)
        classes = [(name, name) for name in names]
    for file, label in zip(files, labels, strict=True):
        if not 0 <= label < len(classes):
            raise DataError(f"{path}: label {label} of {file.name} is outside the {len(classes)} classes; correct it")
    return FileSource(path, files, labels, classes)


def _folder_names(files: list[Path], labels: list[int]) -> list[str]:
    """Names of classes 0 to the highest label: the folders that their files are in, or numbers where these do not tell
    the classes apart."""
    first = dict(zip(reversed(labels), reversed(files), strict=True))  # file of each label
    folder_of = {label: file.parent.name for label, file in first.items()}
    if len(set(folder_of.values())) < len(folder_of):  # CLASS/images/FILE
        folders = {label: os.path.abspath(file.parent) for label, file in first.items()}
        shared = os.path.commonpath(folders.values())
        folder_of = {label: os.path.relpath(folder, shared).split(os.sep)[0] for label, folder in folders.items()}
    if len(set(folder_of.values()) - {os.curdir}) < len(folder_of):
        folder_of = {}
    return [folder_of.get(label, str(label)) for label in range(max(labels) + 1)]
