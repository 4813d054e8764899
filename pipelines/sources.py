"""Where the images are: RecordIO files, class folders and file lists, behind one small interface.

What may be given as the data path (`LoaderConfig.data`), for the split `train` (and likewise for `val`):

    PATH.rec                  with its index PATH.idx beside it
    PATH.lst                  lines of `index <tab> label <tab> file`, files relative to the list (as MXNet's im2rec)
    PATH/train.lst            written by `verify --write-clean`, so it goes before the folder that it lists
    PATH/train.rec            or PATH/train/train.rec
    PATH/train/CLASS/*.jpeg   one folder for each class
    PATH/CLASS/*.jpeg         no splits: the same images for training and validation

Class numbers are the lines of a classes.txt beside the split (`name`, or `folder <tab> name to show`), else the sorted
class folders of the training split.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from pipelines.errors import DataError
from pipelines.recordio import BrokenRecordError, Record, RecordFile, index_path, read_index

Classes = list[tuple[str, str]]  # (folder or synset, name to show) in the order of the labels

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".ppm"})
_NUM_SPOT_CHECKS = 1024  # records whose place and label are checked when a file is opened; the others when read


class Source(ABC):
    """The encoded images of one split with their labels, numbered from 0."""

    path: Path
    classes: Classes
    feeds_paths: bool  # what `feed` gives

    @property
    def class_names(self) -> list[str]:
        """Names to show, in the order of the labels."""
        return [shown for _, shown in self.classes]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, i: int) -> str:
        """How messages call image `i`: its file, or its record."""

    @abstractmethod
    def label(self, i: int) -> int:
        """Class number of image `i`; raises DataError if there is no such class."""

    @abstractmethod
    def feed(self, i: int) -> np.ndarray:
        """What the DALI graph gets for image `i` (uint8): its encoded bytes, or the path of its file, which DALI then
        reads in its own threads. Raises BrokenRecordError."""

    @abstractmethod
    def read(self, i: int) -> np.ndarray:
        """The encoded bytes of image `i` (uint8). Raises OSError or BrokenRecordError."""


class RecordSource(Source):
    """A RecordIO file."""

    feeds_paths = False

    def __init__(self, path: Path, num_classes: int | None = None):
        self.path = path
        self._keys, self._offsets = read_index(index_path(path))
        self._file = RecordFile(path)
        self.classes = read_classes(path.parent)
        self._spot_check()
        if not self.classes:
            # No list of classes: as many as asked for, or as the labels need (reads the header of every record).
            count = num_classes or 1 + max(int(self._record(i).label) for i in range(len(self)))
            self.classes = [(str(label), str(label)) for label in range(count)]

    def __len__(self) -> int:
        return len(self._offsets)

    def name(self, i: int) -> str:
        return f"{self.path} record {self._keys[i]}"

    def label(self, i: int) -> int:
        label = self._record(i).label
        if not (0 <= label < len(self.classes) and label == int(label)):
            raise DataError(
                f"{self.name(i)}: label {label:g} is outside the {len(self.classes)} classes (0 to "
                f"{len(self.classes) - 1}); check classes.txt, or list all such records with "
                f"`python -m pipelines verify`"
            )
        return int(label)

    def feed(self, i: int) -> np.ndarray:
        return self._record(i).image

    def read(self, i: int) -> np.ndarray:
        return self._record(i).image

    def _record(self, i: int) -> Record:
        return self._file.read(int(self._offsets[i]))

    def _spot_check(self) -> None:
        """Notice a wrong index when the file is opened, without touching all of a big file."""
        for i in np.unique(np.linspace(0, len(self) - 1, _NUM_SPOT_CHECKS, dtype=np.int64)):
            try:
                self._record(int(i))
                if self.classes:
                    self.label(int(i))
            except BrokenRecordError as error:
                raise DataError(
                    f"{index_path(self.path)}: does not fit {self.path.name} (key {self._keys[i]}: {error}); "
                    f"put the right index there, or mend it with `python -m pipelines verify --write-clean`"
                ) from None


class FileSource(Source):
    """Image files, from class folders or from a list."""

    feeds_paths = True

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

    def file(self, i: int) -> Path:
        """The file of image `i`."""
        return self._files[i]


def open_source(data: str | Path, split: str, num_classes: int | None = None) -> Source:
    """Find and open one split of a data set; raises DataError. `num_classes` is for RecordIO without classes.txt."""
    path = locate(data, split)
    try:
        if path.suffix == ".rec":
            return RecordSource(path, num_classes)
        if path.suffix == ".lst":
            return _read_list(path)
        return _scan_folders(path, split)
    except PermissionError as error:
        raise DataError(f"{error.filename}: cannot be read (permission denied); check its permissions") from None


def locate(data: str | Path, split: str) -> Path:
    """The .rec file, .lst file or folder of class folders that holds a split (see the table above)."""
    path = Path(data).expanduser()
    if path.is_file() and path.suffix in (".rec", ".lst"):
        return path
    if not path.is_dir():
        problem = "is neither a folder nor a .rec or .lst file" if path.exists() else "does not exist"
        raise DataError(
            f"data path {path} {problem}; give a folder that holds train/ and val/, a folder of class folders, "
            f"a .rec file, or 'synthetic'"
        )
    for found in (path / f"{split}.lst", path / f"{split}.rec", path / split / f"{split}.rec", path / split):
        if found.exists():
            return found
    other = "val" if split == "train" else "train"
    if any((path / f"{other}{end}").exists() for end in ("", ".rec", ".lst")):
        raise DataError(f"data path {path} has {other} but no {split}; add {split}/, {split}.rec or {split}.lst")
    return path


def read_classes(folder: Path) -> Classes:
    """The classes of classes.txt in a folder or the one above; [] if there is none."""
    for path in (folder / "classes.txt", folder.parent / "classes.txt"):
        if path.is_file():
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            columns = [line.partition("\t") for line in lines]
            classes = [(key.strip(), shown.strip() or key.strip()) for key, _, shown in columns]
            if not classes:
                raise DataError(f"{path}: the list of classes is empty; write one class name in each line")
            if len({key for key, _ in classes}) < len(classes):
                raise DataError(f"{path}: a class name occurs twice; every line must name another class")
            return classes
    return []


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


def _scan_folders(path: Path, split: str) -> FileSource:
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


def _read_list(path: Path) -> FileSource:
    files: list[Path] = []
    labels: list[int] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        fields = line.split("\t")
        try:
            labels.append(int(float(fields[1])))
            files.append(path.parent / fields[2])
        except (IndexError, ValueError):
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
