"""The original CIFAR-100 files as a source: train and test, as Python pickles or as .bin files.

Format: https://www.cs.toronto.edu/~kriz/cifar.html. Each image has two labels: its class (fine, 100 of them) and the
superclass (coarse, 20). An image of a .bin file is `coarse label, fine label, 3072 bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from pipelines.errors import DataError
from pipelines.files import open_file, read_file, understood
from pipelines.options import Labels
from pipelines.sources.cifar import (
    IMAGE_BYTES,
    WAY_OUT,
    PixelSource,
    check_names,
    chosen_classes,
    cut_off,
    images_and_labels,
    read_names,
    unpickled,
)
from pipelines.sources.pickles import text_of

LabelSet = Literal["fine", "coarse"]
FINE = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest",
    "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard",
    "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange", "orchid",
    "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine", "possum",
    "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper",
    "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone",
    "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf",
    "woman", "worm",
)
COARSE = (
    "aquatic_mammals", "fish", "flowers", "food_containers", "fruit_and_vegetables", "household_electrical_devices",
    "household_furniture", "insects", "large_carnivores", "large_man-made_outdoor_things",
    "large_natural_outdoor_scenes", "large_omnivores_and_herbivores", "medium_mammals", "non-insect_invertebrates",
    "people", "reptiles", "small_mammals", "trees", "vehicles_1", "vehicles_2",
)
NAMES: Mapping[LabelSet, tuple[str, ...]] = {"fine": FINE, "coarse": COARSE}
_COLUMNS: Mapping[LabelSet, int] = {"coarse": 0, "fine": 1}  # byte of a .bin file's row
_ROW = len(_COLUMNS) + IMAGE_BYTES  # bytes of an image in a .bin file
_CIFAR10_ROW = 1 + IMAGE_BYTES
_FILES = {"train": "train", "val": "test"}
_ARCHIVES = (("cifar-100-python", ""), ("cifar-100-binary", ".bin"))  # folder, ending of the files
_PICKLE = b"\x80"  # how pickles begin, from protocol 2 on


def find(path: Path, split: str) -> list[Path]:
    """Find `train` or `test`, perhaps with .bin, in PATH or in the folder of CIFAR-100's archives.

    Other data may have files of these names, too. So the folder's name, the lists of classes or the file itself must
    show that the files belong to CIFAR-100.
    """
    for archive, ending in _ARCHIVES:
        for folder in (path, path / archive):
            file = folder / f"{_FILES[split]}{ending}"
            if file.is_file() and (folder.name == archive or _is_known(file)):
                return [file]
    return []


def _is_known(file: Path) -> bool:
    if file.suffix == ".bin":
        size = file.stat().st_size
        has_names = any(_names_file(file.parent, kind).is_file() for kind in NAMES)
        # A file of CIFAR-10's size is accepted here, and refused later with advice.
        return has_names or (size > 0 and not (size % _ROW and size % _CIFAR10_ROW))
    if (file.parent / "meta").is_file():
        return True
    with open_file(file) as opened:
        return opened.read(len(_PICKLE)) == _PICKLE


class Cifar100Source(PixelSource):
    """One split, with its fine or its coarse labels."""

    def __init__(self, files: list[Path], labels: Labels) -> None:
        (file,) = files
        kind: LabelSet = "coarse" if labels == "coarse" else "fine"
        self.label_set = kind
        if file.suffix == ".bin":
            images, found = _read_bin(file, kind)
            names = _read_text_names(file.parent, kind)
        else:
            names = _read_meta(file.with_name("meta"), kind)
            what = f"CIFAR-100 file, a pickle with data and {kind}_labels"
            images, found = images_and_labels(file, unpickled(file, what), f"{kind}_labels", what)
        other = "fine" if kind == "coarse" else "coarse"
        classes = chosen_classes(file.parent, names, f", or give --labels {other} if it lists the {other} ones")
        super().__init__(files, [images], [found], classes)
        if file.suffix == ".bin" and tuple(names) == NAMES[kind]:
            published = {file.with_name("train.bin"): 50_000, file.with_name("test.bin"): 10_000}
            self.remarks = cut_off(files, [found], published, _ROW)


def _read_bin(file: Path, kind: LabelSet) -> tuple[np.ndarray, np.ndarray]:
    """Read images (N, 3072), planes of red, green and blue, and labels (N,)."""
    content = np.frombuffer(read_file(file), np.uint8)
    is_of_cifar10 = len(content) > 0 and not len(content) % _CIFAR10_ROW
    if not len(content) or len(content) % _ROW:
        way_out = WAY_OUT
        if is_of_cifar10:
            way_out = (f"they would fit CIFAR-10's images of {_CIFAR10_ROW} bytes: if it is a file of CIFAR-10, rename "
                       "it to data_batch_1.bin or test_batch.bin")
        raise DataError(f"{file}: is not a CIFAR-100 file: its {len(content)} bytes are not a whole number of images "
                        f"of {_ROW} bytes; {way_out}")
    rows = content.reshape(-1, _ROW)
    labels = rows[:, _COLUMNS[kind]].astype(np.int64)
    if is_of_cifar10 and labels.max() >= len(_read_text_names(file.parent, kind)):
        raise DataError(f"{file}: its {len(content)} bytes fit CIFAR-100 and CIFAR-10, but as CIFAR-100 it would have "
                        f"the invalid {kind} label {labels.max()}; if it is a file of CIFAR-10, rename it to "
                        f"data_batch_1.bin or test_batch.bin, otherwise {WAY_OUT}")
    return rows[:, len(_COLUMNS) :], labels


def _names_file(folder: Path, kind: LabelSet) -> Path:
    return folder / f"{kind}_label_names.txt"


def _read_text_names(folder: Path, kind: LabelSet) -> Sequence[str]:
    path = _names_file(folder, kind)
    return read_names(path) if path.is_file() else NAMES[kind]


def _read_meta(path: Path, kind: LabelSet) -> Sequence[str]:
    if not path.is_file():
        return NAMES[kind]
    key = f"{kind}_label_names"
    what = f"meta of CIFAR-100, a pickle with {key}"
    meta = unpickled(path, what)
    with understood(path, f"is not a {what}", WAY_OUT):
        names = [text_of(name) for name in meta[key]]
    return check_names(path, names)
