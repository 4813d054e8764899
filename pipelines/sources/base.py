"""What every source of images has in common."""

from __future__ import annotations

import contextlib
import functools
import os
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from pipelines.errors import DataError
from pipelines.files import read_lines
from pipelines.options import AUTO, MAX_CLASSES, FirstLabel, Labels
from pipelines.recordio import BrokenRecordError

Classes = list[tuple[str, str]]  # (folder or synset, name to show) in the order of the labels

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".jif", ".pjpeg", ".pjp", ".png", ".bmp", ".dib", ".tif",
                            ".tiff", ".webp", ".ppm", ".pgm", ".pbm", ".pnm"})
SPLITS = ("train", "val")  # and what their folders are called
_NUM_SAMPLED = 64  # images
ONE_HOT_REMARK = "{}: its labels are one-hot vectors, which are read as class numbers"


class Source(ABC):
    """The encoded images of one split with their labels, numbered from 0."""

    path: Path
    classes: Classes
    feeds: str  # what `feed` gives: "bytes", "paths" or "pixels"
    damaged: Mapping[int, str] = MappingProxyType({})  # image -> what its decoder said, where they come decoded
    cache_bytes: int = 0  # memory that decoded images take
    remarks: Sequence[str] = ()  # sentences for the owner of the data: what of it is left out, how labels are read
    first_label: FirstLabel = AUTO  # the label of the first class, "0" or "1", where the format can have either
    label_set: Labels = AUTO  # "fine" or "coarse", where each image has a label of both

    @property
    def class_names(self) -> list[str]:
        """Names to show, in the order of the labels."""
        return [shown for _, shown in self.classes]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, i: int) -> str:
        """How messages call image `i`: its file, or its record."""

    def identity(self, i: int, fully: bool = False) -> str:
        """What tells image `i` from the others of its class, wherever the data lie and whatever is added to them;
        `fully` where another image has the same."""
        return os.path.basename(self.name(i))

    def group(self, i: int) -> str:
        """The folder that image `i` shares with others like it, as the frames of a video; "" where there is none."""
        return ""

    @abstractmethod
    def label(self, i: int) -> int:
        """Class number of image `i`; raises DataError if there is no such class."""

    @abstractmethod
    def feed(self, i: int) -> np.ndarray:
        """What the DALI graph gets for image `i` (uint8): its encoded bytes, the path of its file, which DALI then
        reads in its own threads, or its pixels (height, width, RGB). Raises OSError or BrokenRecordError."""

    @abstractmethod
    def read(self, i: int) -> np.ndarray:
        """The encoded bytes of image `i` (uint8). Raises OSError or BrokenRecordError."""

    def check_record(self, i: int) -> None:  # noqa: B027  # most formats have none
        """Raise ChecksumError where the checksum that is stored for image `i` is not that of its bytes."""

    def check(self, indices: Iterable[int]) -> None:  # noqa: B027  # most read files as they are
        """Raise DataError where what holds these images has lost bytes since it was opened."""

    @functools.cached_property
    def mean_encoded_bytes(self) -> float:
        """Of an encoded image, from some of them; 0 where none can be read."""
        sizes = [len(encoded) for encoded in self.sample()]
        return float(np.mean(sizes)) if sizes else 0.0

    def sample(self) -> Iterator[bytes]:
        """The encoded bytes of some images from all over the split, to see what they are like."""
        for i in np.unique(np.linspace(0, len(self) - 1, _NUM_SAMPLED, dtype=np.int64)):
            with contextlib.suppress(OSError, BrokenRecordError):
                yield self.read(int(i)).tobytes()

    def read_ahead(self, indices: Iterable[int]) -> None:  # noqa: B027  # to do nothing is right for most
        """These images will be asked for soon: fetch them from the disk meanwhile, without waiting."""


class Chosen(Source):
    """Some images of another source, in a given order."""

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self.path, self.classes, self.feeds, self.remarks = source.path, source.classes, source.feeds, source.remarks
        self.first_label, self.label_set = source.first_label, source.label_set
        self.source, self.indices = source, list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, i: int) -> str:
        return self.source.name(self.indices[i])

    def identity(self, i: int, fully: bool = False) -> str:
        return self.source.identity(self.indices[i], fully)

    def group(self, i: int) -> str:
        return self.source.group(self.indices[i])

    def label(self, i: int) -> int:
        return self.source.label(self.indices[i])

    def feed(self, i: int) -> np.ndarray:
        return self.source.feed(self.indices[i])

    def read(self, i: int) -> np.ndarray:
        return self.source.read(self.indices[i])

    def check_record(self, i: int) -> None:
        self.source.check_record(self.indices[i])

    def check(self, indices: Iterable[int]) -> None:
        self.source.check(self.indices[i] for i in indices)

    def read_ahead(self, indices: Iterable[int]) -> None:
        self.source.read_ahead(self.indices[i] for i in indices)


def labels_of(source: Source) -> Iterator[int]:
    """Each class number that an image has, once, when the first is met. Raises DataError."""
    met: set[int] = set()
    for i in range(len(source)):
        with contextlib.suppress(BrokenRecordError):  # it is met where its image is wanted
            if (label := source.label(i)) not in met:
                met.add(label)
                yield label


def place_of(files: Sequence[Path]) -> Path:
    """The file, or the folder that several lie in."""
    return files[0] if len(files) == 1 else files[0].parent


def check_label(label: float, where: str) -> None:
    """Raise DataError for what is no class number of any data set."""
    if not 0 <= label < MAX_CLASSES:
        raise DataError(f"{where}: label {label:.15g} is no class number (0 to {MAX_CLASSES - 1:,}); correct it")


def is_one_hot(labels: Sequence[float]) -> bool:
    return labels.count(1) == 1 and labels.count(0) == len(labels) - 1


def one_hot_class(labels: Sequence[float], where: str) -> int:
    """The class of an image with several labels, which must be a one-hot vector. Raises DataError."""
    if not is_one_hot(labels):
        some = ", ".join(f"{value:.6g}" for value in labels[:6]) + ", ..." * (len(labels) > 6)
        raise DataError(f"{where} has {len(labels)} labels ({some}), and an image is trained on with one class: write "
                        "one class number for each, or a one-hot vector")
    return labels.index(1)


def read_classes(folder: Path) -> Classes:
    """The classes of classes.txt in a folder, or in the one that it is a split of; [] if there is none."""
    for path in _lists_of(folder):
        if path.is_file():
            return class_list(path, separator="\t")
    return []


def _lists_of(folder: Path) -> list[Path]:
    """Where the list of the classes may be. One that lies further up may be that of a neighbour."""
    folders = [folder, folder.parent] if folder.name in SPLITS else [folder]
    return [place / "classes.txt" for place in folders]


def unread_list(folder: Path) -> list[str]:
    """The sentence on a list that lies above images that have none."""
    above = folder.parent / "classes.txt"
    if above.is_file() and above not in _lists_of(folder) and not (folder / "classes.txt").is_file():
        return [f"{above} is not read: it lies above {folder}, which has no list of classes (copy it there if it is of "
                "these classes)"]
    return []


def class_list(path: Path, separator: str | None) -> Classes:
    """The classes of a file with one in each line: its folder or synset, then perhaps the separator (None: blanks) and
    a name to show. Raises DataError."""
    classes = parse_classes(read_lines(path), separator)
    if not classes:
        raise DataError(f"{path}: the list of classes is empty; write one class name in each line")
    if len({nfc(key) for key, _ in classes}) < len(classes):
        raise DataError(f"{path}: a class name occurs twice; every line must name another class")
    return classes


def nfc(name: str) -> str:
    """The name in one form of Unicode: macOS writes an accent apart from its letter, others do not."""
    return unicodedata.normalize("NFC", name)


def parse_classes(lines: Iterable[str], separator: str | None) -> Classes:
    """The classes of the lines of a list; empty ones are passed over."""
    fields = [line.strip().split(separator, maxsplit=1) for line in lines if line.strip()]
    return [(parts[0].strip(), parts[-1].strip()) for parts in fields]
