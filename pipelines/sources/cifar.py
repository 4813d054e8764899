"""The original CIFAR-10 files as a source: data_batch_1 to 5 and test_batch, as Python pickles or as .bin files.

Format: https://www.cs.toronto.edu/~kriz/cifar.html. The pixels are stored bare; the decoder gets each image as a PPM
file, which is a short header and the pixels as they are, so that nothing is lost and all else is as for JPEGs.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import DataError
from pipelines.files import read_file, understood
from pipelines.sources.base import Classes, Source, read_classes

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXELS = 32  # height and width
_IMAGE_BYTES = 3 * PIXELS * PIXELS
_PPM_HEADER = np.frombuffer(b"P6\n%d %d\n255\n" % (PIXELS, PIXELS), np.uint8)
_FILES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "val": ["test_batch"]}
_WAY_OUT = "unpack the archive again"
_ARCHIVES = (("cifar-10-batches-py", ""), ("cifar-10-batches-bin", ".bin"))  # folder, ending of the files


def find(path: Path, split: str) -> list[Path]:
    """PATH/data_batch_1 ... or PATH/data_batch_1.bin ..., or these in the folder that CIFAR-10's archives unpack to."""
    for archive, ending in _ARCHIVES:
        for folder in (path, path / archive):
            files = [folder / f"{name}{ending}" for name in _FILES[split]]
            if any(file.is_file() for file in files):
                return files
    return []


class CifarSource(Source):
    """One split, all of it in memory (3 kB an image)."""

    feeds = "bytes"

    def __init__(self, files: list[Path]):
        self.path = files[0].parent
        self.classes: Classes = read_classes(self.path) or [(name, name) for name in CLASSES]
        images, labels = zip(*(_read_bin(file) if file.suffix == ".bin" else _read_pickle(file) for file in files),
                             strict=True)
        planes = np.concatenate(images).reshape(-1, 3, PIXELS, PIXELS)
        pixels = planes.transpose(0, 2, 3, 1).reshape(len(planes), -1)
        header = np.broadcast_to(_PPM_HEADER, (len(pixels), len(_PPM_HEADER)))
        self._encoded = np.concatenate([header, pixels], axis=1)
        self._labels = np.concatenate(labels)
        self._names = [f"{file} image {i}" for file, part in zip(files, labels, strict=True) for i in range(len(part))]
        wrong = np.flatnonzero((self._labels < 0) | (self._labels >= len(self.classes)))
        if len(wrong):
            raise DataError(
                f"{self._names[wrong[0]]}: label {self._labels[wrong[0]]} is outside the {len(self.classes)} classes; "
                "unpack the archive of CIFAR-10 again"
            )

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


def _read_bin(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3072), planes of red, green and blue, and labels (N,)."""
    content = np.frombuffer(_content(file), np.uint8)
    if not len(content) or len(content) % (1 + _IMAGE_BYTES):
        raise _broken(file, f"its {len(content)} bytes are no whole number of images of {1 + _IMAGE_BYTES}")
    rows = content.reshape(-1, 1 + _IMAGE_BYTES)
    return rows[:, 1:], rows[:, 0].astype(np.int64)


def _read_pickle(file: Path) -> tuple[np.ndarray, np.ndarray]:
    content = io.BytesIO(_content(file))
    with understood(file, "is no CIFAR-10 file, a pickle with data and labels", _WAY_OUT):
        batch = _ArrayUnpickler(content, encoding="bytes").load()
        images, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"], np.int64)
    if images.dtype != np.uint8 or images.shape != (len(labels), _IMAGE_BYTES) or not len(labels):
        raise _broken(file, f"its data is {images.dtype} of shape {images.shape} for {len(labels)} labels")
    return images, labels


class _ArrayUnpickler(pickle.Unpickler):
    """Knows NumPy arrays and plain containers only: a pickle can otherwise run any code."""

    _ALLOWED = frozenset({"_reconstruct", "_frombuffer", "ndarray", "dtype", "encode"})

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("numpy", "_codecs") and name in self._ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _content(file: Path) -> bytes:
    try:
        return read_file(file)
    except FileNotFoundError:
        raise _missing(file) from None


def _missing(file: Path) -> DataError:
    return DataError(f"{file} is missing beside CIFAR-10's other files; {_WAY_OUT}")


def _broken(file: Path, reason: str) -> DataError:
    return DataError(f"{file}: is no CIFAR-10 file: {reason}; {_WAY_OUT}")
