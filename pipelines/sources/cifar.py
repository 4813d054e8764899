"""The original CIFAR-10 files as a source: data_batch_1 to 5 and test_batch, as Python pickles or as .bin files.

Format: https://www.cs.toronto.edu/~kriz/cifar.html. The files hold bare pixels. The decoder gets each image as a PPM
file, a short header followed by the unchanged pixels; so no information is lost, and all further steps are those for
JPEGs.

Other data in this layout have a batches.meta with their own classes, and any number of batches. cifar100.py reads
CIFAR-100's files with functions from here.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import DataError
from pipelines.files import read_file, read_lines, understood
from pipelines.sources import pickles
from pipelines.sources.base import Classes, Source, parse_classes, read_classes
from pipelines.sources.folders import some
from pipelines.sources.pickles import text_of

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
NUM_BATCHES = 5  # files of CIFAR-10's training images
BATCH_IMAGES = 10_000  # images in each of CIFAR-10's files
PIXELS = 32  # height and width
IMAGE_BYTES = 3 * PIXELS * PIXELS
WAY_OUT = "unpack the archive again"
_ROW = 1 + IMAGE_BYTES  # bytes of an image in a .bin file, its label first
_PPM_HEADER = np.frombuffer(b"P6\n%d %d\n255\n" % (PIXELS, PIXELS), np.uint8)
_ARCHIVES = (("cifar-10-batches-py", ""), ("cifar-10-batches-bin", ".bin"))  # folder, ending of the files


def find(path: Path, split: str) -> list[Path]:
    """Find PATH/data_batch_1 ... or PATH/data_batch_1.bin ..., in PATH or in the folder of CIFAR-10's archives.

    Returns all batches up to the last existing one, including missing batches."""
    for archive, ending in _ARCHIVES:
        for folder in (path, path / archive):
            if split == "val":
                files = [folder / f"test_batch{ending}"]
            else:
                names = re.compile(rf"data_batch_([1-9]\d{{0,3}}){re.escape(ending)}")
                found = [match for file in folder.glob("data_batch_*") if (match := names.fullmatch(file.name))]
                last = max((int(match[1]) for match in found), default=0)
                files = [folder / f"data_batch_{number}{ending}" for number in range(1, last + 1)]
            if any(file.is_file() for file in files):
                return files
    return []


class PixelSource(Source):
    """Images of 32x32 pixels, all of them in memory (3 kB an image).

    Args:
        files: the files that hold the images.
        images: for each file, (N, 3072) uint8: planes of red, green and blue.
        labels: for each file, (N,).
    """

    feeds = "bytes"

    def __init__(self, files: Sequence[Path], images: Sequence[np.ndarray], labels: Sequence[np.ndarray],
                 classes: Classes) -> None:
        self.path, self.classes = files[0].parent, classes
        planes = np.concatenate(images).reshape(-1, 3, PIXELS, PIXELS)
        pixels = planes.transpose(0, 2, 3, 1).reshape(len(planes), -1)
        header = np.broadcast_to(_PPM_HEADER, (len(pixels), len(_PPM_HEADER)))
        self._encoded = np.concatenate([header, pixels], axis=1)
        self._labels = np.concatenate(labels)
        self._names = [f"{file} image {i}" for file, part in zip(files, labels, strict=True) for i in range(len(part))]
        wrong = np.flatnonzero((self._labels < 0) | (self._labels >= len(classes)))
        if len(wrong):
            raise DataError(f"{self._names[wrong[0]]}: label {self._labels[wrong[0]]} is outside the {len(classes)} "
                            f"classes; {WAY_OUT}, or correct the list of the classes beside it")

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, i: int) -> str:
        return self._names[i]

    def label(self, i: int) -> int:
        return int(self._labels[i])

    def feed(self, i: int) -> np.ndarray:
        return self._encoded[i]

    def read(self, i: int) -> np.ndarray:
        return self._encoded[i]


class CifarSource(PixelSource):
    """One split in the layout of CIFAR-10."""

    def __init__(self, files: list[Path]) -> None:
        if missing := [file for file in files if not file.exists()]:
            raise _missing(missing[0])
        folder, is_binary = files[0].parent, files[0].suffix == ".bin"
        meta = _read_meta(folder, is_binary)
        names = meta.get("label_names", CLASSES)
        batches = [_read_bin(file) if is_binary else _read_pickle(file) for file in files]
        images, labels, said = zip(*batches, strict=True)
        super().__init__(files, images, labels, chosen_classes(folder, names))
        self.remarks = _contradictions(meta, files, labels)
        is_cifar10 = tuple(names) == CLASSES
        if files[0].stem == "data_batch_1":
            self.remarks += _check_number(files, said, is_cifar10) + _copies(files, images)
        if is_binary:
            published = ["test_batch", *(f"data_batch_{number + 1}" for number in range(NUM_BATCHES))] * is_cifar10
            self.remarks += cut_off(files, labels, {folder / f"{name}.bin": BATCH_IMAGES for name in published}, _ROW)


def chosen_classes(folder: Path, names: Sequence[str], way_out: str = "") -> Classes:
    """The classes of classes.txt in the folder, or else `names`. Raises DataError unless both have the same number of
    classes.
    """
    listed = read_classes(folder)
    if listed and len(listed) != len(names):
        raise DataError(f"{folder}: classes.txt lists {len(listed)} classes, and the data have {len(names)}"
                        f" ({some(list(names))}); correct it or remove it{way_out}")
    return listed or [(name, name) for name in names]


def check_names(path: Path, names: Sequence[str]) -> list[str]:
    """Check the class names that a file lists; raises DataError if there are none, or empty or repeated names."""
    if not names:
        raise DataError(f"{path}: lists no class; {WAY_OUT}")
    if any(not name.strip() for name in names):
        raise DataError(f"{path}: one of its class names is empty; {WAY_OUT}")
    (name, times), = Counter(names).most_common(1)
    if times > 1:
        raise DataError(f"{path}: the class name {name!r} occurs twice; give every class a different name")
    return list(names)


def read_names(path: Path) -> list[str]:
    """Read a text file with one class name per line. Raises DataError."""
    return check_names(path, [key for key, _ in parse_classes(read_lines(path), separator="\t")])


def unpickled(file: Path, what: str) -> dict[str, Any]:
    """Read a dictionary from a pickle; its keys become text, whether Python 2 or 3 wrote them. Raises DataError."""
    content = read_file(file)
    with understood(file, f"is not a {what}", WAY_OUT):
        return {text_of(key): value for key, value in pickles.load(content).items()}


def images_and_labels(file: Path, batch: Mapping[str, Any], key: str, what: str) -> tuple[np.ndarray, np.ndarray]:
    """The images (N, 3072) and labels (N,) in a pickle's dictionary; `key` is the labels' key. Raises DataError."""
    with understood(file, f"is not a {what}", WAY_OUT):
        images, labels = np.asarray(batch["data"]), np.asarray(batch[key])
        if len(labels) and labels.dtype.kind not in "iu":
            raise ValueError(f"its labels are {labels.dtype}, not whole numbers")
        labels = labels.astype(np.int64)
    if images.dtype != np.uint8 or labels.ndim != 1 or images.shape != (len(labels), IMAGE_BYTES) or not len(labels):
        raise DataError(f"{file}: is not a {what}: its data is {images.dtype} of shape {images.shape} for "
                        f"{len(labels)} labels; {WAY_OUT}")
    return images, labels


def _read_bin(file: Path) -> tuple[np.ndarray, np.ndarray, str]:
    """Read images (N, 3072) and labels (N,); the third value, the batch_label, is "", because .bin files have none."""
    content = np.frombuffer(read_file(file), np.uint8)
    if not len(content) or len(content) % _ROW:
        of_cifar100 = len(content) and not len(content) % (1 + _ROW)
        way_out = (f"if it is CIFAR-100's, with {1 + _ROW} bytes an image, rename it to train.bin or test.bin"
                   if of_cifar100 else WAY_OUT)
        raise DataError(f"{file}: is not a CIFAR-10 file: its {len(content)} bytes are not a whole number of images "
                        f"of {_ROW} bytes; {way_out}")
    rows = content.reshape(-1, _ROW)
    return rows[:, 1:], rows[:, 0].astype(np.int64), ""


def _read_pickle(file: Path) -> tuple[np.ndarray, np.ndarray, str]:
    """Read images (N, 3072), labels (N,), and the batch_label, such as 'training batch 1 of 5'."""
    what = "CIFAR-10 file, a pickle with data and labels"
    batch = unpickled(file, what)
    images, labels = images_and_labels(file, batch, "labels", what)
    said = batch.get("batch_label", "")
    return images, labels, said.decode(errors="replace") if isinstance(said, bytes) else str(said)


def _read_meta(folder: Path, is_binary: bool) -> dict[str, Any]:
    """Read batches.meta, or batches.meta.txt beside .bin files: `label_names` and perhaps more; {} if missing."""
    path = folder / ("batches.meta.txt" if is_binary else "batches.meta")
    if not path.is_file():
        return {}
    if is_binary:
        return {"label_names": read_names(path)}
    what = "batches.meta of CIFAR-10's layout, a pickle with label_names"
    meta = unpickled(path, what)
    with understood(path, f"is not a {what}", WAY_OUT):
        names = [text_of(name) for name in meta["label_names"]]
        counts: dict[str, Any] = {key: int(meta[key]) for key in ("num_cases_per_batch", "num_vis") if key in meta}
    return {"label_names": check_names(path, names), **counts}


def _copies(files: Sequence[Path], images: Sequence[np.ndarray]) -> list[str]:
    """A remark for each batch whose images equal the images of an earlier batch."""
    first: dict[bytes, Path] = {}
    remarks = []
    for file, pixels in zip(files, images, strict=True):
        other = first.setdefault(hashlib.blake2b(pixels.tobytes()).digest(), file)
        if other != file:
            remarks.append(f"{file}: has the same images as {other.name}, which come twice ({WAY_OUT})")
    return remarks


def cut_off(files: Sequence[Path], labels: Sequence[np.ndarray], published: Mapping[Path, int], row: int) -> list[str]:
    """A remark about .bin files that may have been cut off at the end of an image, which the format does not show.

    A file is suspect if it has fewer images than published, while another file of the data set has the published
    number. In other data, a file is suspect if it has fewer images than a later batch.

    Args:
        published: the number of images in each file of the published data set.
        row: bytes of an image.
    """
    counts = {file: len(part) for file, part in zip(files, labels, strict=True)}
    if any(file.is_file() and file.stat().st_size == count * row for file, count in published.items()):
        short = {file: published[file] for file in files if counts[file] < published.get(file, 0)}
    else:
        most_behind = {file: max([*counts.values()][i + 1 :], default=0) for i, file in enumerate(files)}
        short = {file: count for file, count in most_behind.items() if counts[file] < count}
    return [f"{file}: has {counts[file]:,} images and not {count:,}, so it may be cut off ({WAY_OUT})"
            for file, count in short.items()]


def _contradictions(meta: Mapping[str, Any], files: Sequence[Path], labels: Sequence[np.ndarray]) -> list[str]:
    """A remark for each number in batches.meta that the batch files contradict. The files are still read."""
    path, remarks = files[0].with_name("batches.meta"), []
    if (size := meta.get("num_vis", IMAGE_BYTES)) != IMAGE_BYTES:
        remarks.append(f"{path}: says that an image has {size:,} values (num_vis), but the images of the batches have "
                       f"{IMAGE_BYTES:,}")
    count = meta.get("num_cases_per_batch", 0)
    others = [f"{file.name} has {len(part):,}" for file, part in zip(files, labels, strict=True) if len(part) != count]
    if count and others:
        remarks.append(f"{path}: says that each batch has {count:,} images (num_cases_per_batch), but {some(others)}; "
                       "all of them are read")
    return remarks


def _check_number(files: Sequence[Path], said: Sequence[str], is_cifar10: bool) -> list[str]:
    """Raise DataError if batches are missing, by their labels ('training batch 1 of 5') or by CIFAR-10's number of
    batches. Returns a remark if there are more batches than CIFAR-10 has."""
    of_files = [re.search(r"\bof (\d{1,6})$", text) for text in said]
    for file, text, number in zip(files, said, of_files, strict=True):
        if number and int(number[1]) != len(files):
            raise DataError(f"{file}: calls itself {text!r}, but there are {len(files)} batches; add the missing "
                            "batches, or remove batches of other data")
    if not is_cifar10 or any(of_files) or len(files) == NUM_BATCHES:
        return []
    if len(files) < NUM_BATCHES:
        raise _missing(files[-1].with_name(f"data_batch_{len(files) + 1}{files[-1].suffix}"))
    return [f"{files[0].parent}: has {len(files)} batches of training images, more than CIFAR-10's {NUM_BATCHES}; all "
            "of them are read"]


def _missing(file: Path) -> DataError:
    return DataError(f"{file} is missing beside CIFAR-10's other files; {WAY_OUT}")
