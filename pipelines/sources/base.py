"""The interface of all image sources, and helpers that they share."""

from __future__ import annotations

import contextlib
import functools
import os
import re
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
from pipelines.sources.split_names import SPLITS, by_split, split_of

Classes = list[tuple[str, str]]  # (folder or synset, name to show) in the order of the labels

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".jif", ".pjpeg", ".pjp", ".png", ".bmp", ".dib", ".tif",
                            ".tiff", ".webp", ".ppm", ".pgm", ".pbm", ".pnm"})
_NUM_SAMPLED = 64  # images
ONE_HOT_REMARK = "{}: its labels are one-hot vectors, which are read as class numbers"


class Source(ABC):
    """The encoded images of one split with their labels, numbered from 0."""

    path: Path
    classes: Classes
    feeds: str  # what `feed` returns: "bytes", "paths" or "pixels"
    damaged: Mapping[int, str] = MappingProxyType({})  # for decoded sources: image -> the decoder's message
    cache_bytes: int = 0  # memory that decoded images take
    remarks: Sequence[str] = ()  # sentences for the user about left-out data and about how labels are read
    first_label: FirstLabel = AUTO  # the label of the first class, "0" or "1", if the format allows both
    label_set: Labels = AUTO  # "fine" or "coarse", if each image has both labels

    @property
    def class_names(self) -> list[str]:
        """The names to show, in the order of the labels."""
        return [shown for _, shown in self.classes]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, i: int) -> str:
        """The name of image `i` in messages: its file or its record."""

    def identity(self, i: int, fully: bool = False) -> str:
        """A name for image `i` that is unique in its class and stays equal when the data are moved or extended.

        `fully` asks for a longer name, for the case that another image has an equal short name.
        """
        return os.path.basename(self.name(i))

    def group(self, i: int) -> str:
        """The folder that image `i` shares with similar images, such as the frames of a video; "" if there is none."""
        return ""

    def stamp(self, i: int) -> str:
        """The identity of image `i` and the size of its file; "" for formats whose classes are not folders."""
        return ""

    @abstractmethod
    def label(self, i: int) -> int:
        """The class number of image `i`; raises DataError if no class has that number."""

    @abstractmethod
    def feed(self, i: int) -> np.ndarray:
        """The DALI graph's input for image `i` (uint8). Raises OSError or BrokenRecordError.

        It is the encoded image, the path of its file (which DALI reads in its own threads), or the pixels
        (height, width, RGB).
        """

    @abstractmethod
    def read(self, i: int) -> np.ndarray:
        """The encoded bytes of image `i` (uint8). Raises OSError or BrokenRecordError."""

    def check_record(self, i: int) -> None:  # noqa: B027  # most formats have no checksums
        """Raise ChecksumError if the bytes of image `i` do not match their stored checksum."""

    def check(self, indices: Iterable[int]) -> None:  # noqa: B027  # most sources keep no file open
        """Raise DataError if a file that holds these images has lost bytes since it was opened."""

    @functools.cached_property
    def mean_encoded_bytes(self) -> float:
        """The mean size of an encoded image in bytes, from a sample; 0 if none can be read."""
        sizes = [len(encoded) for encoded in self.sample()]
        return float(np.mean(sizes)) if sizes else 0.0

    def sample(self) -> Iterator[bytes]:
        """Yield the encoded bytes of some images, evenly spaced over the split, as a sample of its images."""
        for i in np.unique(np.linspace(0, len(self) - 1, _NUM_SAMPLED, dtype=np.int64)):
            with contextlib.suppress(OSError, BrokenRecordError):
                yield self.read(int(i)).tobytes()

    def read_ahead(self, indices: Iterable[int]) -> None:  # noqa: B027  # most sources need not do anything
        """Start to fetch these images from the disk in the background, as they will be needed soon."""


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

    def stamp(self, i: int) -> str:
        return self.source.stamp(self.indices[i])

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
    """Yield each class number of the images, once, when the first image of the class is read. Raises DataError."""
    met: set[int] = set()
    for i in range(len(source)):
        with contextlib.suppress(BrokenRecordError):  # reported when the image is loaded
            if (label := source.label(i)) not in met:
                met.add(label)
                yield label


def place_of(files: Sequence[Path]) -> Path:
    """The only file, or the folder of several files."""
    return files[0] if len(files) == 1 else files[0].parent


def check_label(label: float, where: str) -> None:
    """Raise DataError for a label that cannot be a class number of any data set."""
    if not 0 <= label < MAX_CLASSES:
        raise DataError(f"{where}: label {label:.15g} is not a class number (0 to {MAX_CLASSES - 1:,}); correct it")


def is_one_hot(labels: Sequence[float]) -> bool:
    return labels.count(1) == 1 and labels.count(0) == len(labels) - 1


def one_hot_class(labels: Sequence[float], where: str) -> int:
    """The class of an image whose labels form a one-hot vector. Raises DataError if they do not."""
    if not is_one_hot(labels):
        some = ", ".join(f"{value:.6g}" for value in labels[:6]) + ", ..." * (len(labels) > 6)
        raise DataError(f"{where} has {len(labels)} labels ({some}), but training needs one class per image: write one "
                        "class number for each image, or a one-hot vector")
    return labels.index(1)


def read_classes(folder: Path) -> Classes:
    """Read the classes from classes.txt in a split's folder or in the folder above; [] if there is none."""
    for path in _lists_of(folder):
        if path.is_file():
            return class_list(path, separator="\t")
    return []


def _lists_of(folder: Path) -> list[Path]:
    """The possible places of classes.txt. A list in a folder further up may belong to other data."""
    return [place / "classes.txt" for place in (folder, *_above_split(folder))]


def _above_split(folder: Path) -> list[Path]:
    """The folders above a split's folder that belong to the data set; [] if `folder` is not a split's folder.

    This is the parent folder, and for train/train also the parent's parent. A folder that holds splits is not a split
    itself, whatever its name: ~/dev with train/ and val/.
    """
    if split_of(folder.name) not in SPLITS or len(by_split(_names_in(folder))) > 1:
        return []
    is_twice = (split_of(folder.parent.name) == split_of(folder.name)
                and [name for name in _names_in(folder.parent) if split_of(name) and (folder.parent / name).is_dir()]
                == [folder.name])
    return [folder.parent, *[folder.parent.parent] * is_twice]


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def data_folder(folder: Path) -> Path:
    """The folder of a whole data set, of which `folder` may be a split."""
    return (folder, *_above_split(folder))[-1]


def unread_list(folder: Path) -> list[str]:
    """A remark about a classes.txt that is not read because it lies above a folder without one."""
    above = folder.parent / "classes.txt"
    if above.is_file() and above not in _lists_of(folder) and not (folder / "classes.txt").is_file():
        return [f"{above} is not read: it lies above {folder}, which has no list of classes (copy the file there if it "
                "lists the classes of these images)"]
    return []


def class_list(path: Path, separator: str | None) -> Classes:
    """Read classes from a file with one class per line. Raises DataError.

    A line has the class's folder or synset, optionally followed by the separator (None: blanks) and a name to show.
    """
    classes = parse_classes(read_lines(path), separator)
    if not classes:
        raise DataError(f"{path}: the list of classes is empty; write one class name in each line")
    if len({nfc(key) for key, _ in classes}) < len(classes):
        raise DataError(f"{path}: a class name occurs twice; every line must name a different class")
    if all(key != shown for key, shown in classes) and _are_in_disorder([shown for _, shown in classes]):
        first = " ".join(classes[0])
        raise DataError(f"{path}: numbers after the names are not in the order of the lines (the first is {first}), "
                        "but the place of a line is the number of its class; sort the lines by their numbers")
    return classes


def misnumbered(folder: Path) -> list[str]:
    """A remark about a classes.txt whose lines begin with numbers in another order, for labels that are numbers.

    No remark is made for numbers sorted as text, which `make-records` writes for folders 0, 1, 10, 2: these numbers are
    names.
    """
    classes = read_classes(folder)
    keys = [key for key, _ in classes]
    if keys == sorted(keys) or not _are_in_disorder(keys):
        return []
    lines = [key if key == shown else f"{key} {shown}" for key, shown in classes]
    return [f"{folder}: the lines of its classes.txt begin with numbers that are not in order, but the place of a line "
            f"is the number of its class: label 0 is {lines[0]!r}, label 1 is {lines[1]!r} (sort the lines if their "
            "numbers are the labels)"]


def _are_in_disorder(texts: Sequence[str]) -> bool:
    """Whether the texts begin with the numbers from 0 or from 1 on, each once, but not in their order."""
    found = [re.match(r"\d+(?![^\W_])", text, re.ASCII) for text in texts]
    numbers = [int(match[0]) for match in found if match]
    return len(numbers) == len(texts) and any(
        sorted(numbers) == list(order) != numbers for order in (range(len(texts)), range(1, 1 + len(texts))))


def nfc(name: str) -> str:
    """Normalise a name to Unicode's NFC: macOS stores an accent apart from its letter, other systems do not."""
    return unicodedata.normalize("NFC", name)


def parse_classes(lines: Iterable[str], separator: str | None) -> Classes:
    """Parse the lines of a list of classes; empty lines are skipped."""
    fields = [line.strip().split(separator, maxsplit=1) for line in lines if line.strip()]
    return [(parts[0].strip(), parts[-1].strip()) for parts in fields]
