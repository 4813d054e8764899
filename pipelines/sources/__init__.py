"""Sources of images: one module for each storage format, behind one small interface (base.py).

FORMATS lists the possible data paths (`LoaderConfig.data`), for the split `train` and likewise for `val`. A class
number is a line number of a classes.txt beside the split (lines of `name`, or `folder <tab> name to show`). Without
that file the format decides: sorted class folders of the training split, or the numbers in the files. ImageNet classes
that are only named by WordNet ids get English names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from common.files import expanded
from common.imagenet import in_words
from pipelines.errors import DataError
from pipelines.options import AUTO, FirstLabel, GroupBy, Labels
from pipelines.sources import cifar, cifar100, folders, records, shards
from pipelines.sources.base import Chosen, Classes, Source, class_list, misnumbered, place_of, read_classes, unread_list
from pipelines.sources.cifar import CifarSource
from pipelines.sources.cifar100 import Cifar100Source
from pipelines.sources.folders import FileSource, some
from pipelines.sources.records import RecordSource
from pipelines.sources.shards import ShardSource, check_complete
from pipelines.sources.split_names import split_of
from pipelines.sources.system_files import is_system
from pipelines.sources.tfrecord import TFRecordSource, is_tfrecord
from pipelines.sources.val_split import part
from pipelines.sources.webdataset import TarSource, is_tar

__all__ = [
    "FORMATS",
    "Chosen",
    "Classes",
    "FileSource",
    "Location",
    "RecordSource",
    "ShardSource",
    "Source",
    "beside",
    "check_label_set",
    "class_list",
    "has_label_sets",
    "locate",
    "open_source",
    "read_classes",
    "same_images",
    "splits_of",
]


class Reading(NamedTuple):
    """Options for reading files whose format leaves something open."""

    num_classes: int | None = None  # number of classes, if given
    first_label: FirstLabel = AUTO  # see TFRecordSource
    train: Sequence[Path] = ()  # the training files, if another split is opened
    labels: Labels = AUTO  # see Cifar100Source


class Format(NamedTuple):
    """One storage format of a split."""

    looks_like: str  # its name in messages
    find: Callable[[Path, str], list[Path]]  # (data path, split) -> the files or folder of the split; [] if none
    open: Callable[[list[Path], str, Reading], Source]  # (files that `find` returned, split, options) -> source


# In search order. A list precedes the folder that it lists, because `verify --write-clean` writes a list to leave out
# images of the folder.
FORMATS = {
    "list": Format("a .lst file", folders.find_list, lambda files, split, how: folders.open_list(files[0], how.train)),
    "RecordIO": Format("a .rec file", records.find, lambda files, split, how: RecordSource(files[0], how.num_classes)),
    "WebDataset": Format(
        "tar shards (WebDataset)", shards.find(is_tar), lambda files, split, how: TarSource(files, how.num_classes)
    ),
    "TFRecord": Format(
        "TFRecord files", shards.find(is_tfrecord),
        lambda files, split, how: TFRecordSource(files, how.num_classes, how.first_label, how.train)
    ),
    "CIFAR-10": Format("CIFAR-10's own files", cifar.find, lambda files, split, _: CifarSource(files)),
    "CIFAR-100": Format(
        "CIFAR-100's own files", cifar100.find, lambda files, split, how: Cifar100Source(files, how.labels)
    ),
    "folders": Format(
        "a folder of class folders", folders.find_folders, lambda files, split, _: folders.open_folders(files[0], split)
    ),
}


_WITH_LABEL_SETS = ("CIFAR-100",)
_OTHER = {"train": "val", "val": "train"}
_WRAPPINGS = folders.COPIES_SUFFIXES | {".gz", ".xz", ".bz2", ".zst", ".zip"}


class Location(NamedTuple):
    """The place and format of one split."""

    format: str  # a key of FORMATS
    files: list[Path]  # the files, or a single folder

    @property
    def path(self) -> Path:
        return place_of(self.files)


def open_source(
    data: str | Path, split: str, num_classes: int | None = None, val_split: float = 0.0,
    val_group_by: GroupBy = "image", first_label: FirstLabel = AUTO, labels: Labels = AUTO,
) -> Source:
    """Find and open one split of a data set; raises DataError.

    Args:
        data: a path, as in FORMATS.
        split: "train" or "val".
        num_classes: the number of classes, for formats that do not store it.
        val_split: the fraction of the training images used as the split "val", which the data must not have.
        val_group_by: with `val_split`, assign each "image" singly, or all images of a "folder" within a class together.
        first_label: for TFRecord files, the label of the first class: "0", "1" or "auto".
        labels: for CIFAR-100's own files, the labels to read: "fine", "coarse", or "auto", which means fine.
    """
    try:
        if val_split:
            _check_val_split(data, val_split)
        stored = "train" if val_split else split
        found = locate(data, stored)
        check_label_set(data, found.format, labels)
        train = _find(expanded(data), "train") if stored == "val" else None
        is_apart = train is not None and train.format == found.format and train.files != found.files
        how = Reading(num_classes, first_label, train.files if train and is_apart else (), labels)
        source = FORMATS[found.format].open(found.files, stored, how)
        source.classes = in_words(source.classes)
        folder = found.files[0] if found.files[0].is_dir() else found.files[0].parent
        source.remarks = [*source.remarks, *unread_list(folder), *misnumbered(folder) * (found.format != "folders")]
        if split == "train":  # printed only once for both splits
            source.remarks = [*source.remarks, *beside(found, data)]
        return part(source, split, val_split, val_group_by) if val_split else source
    except OSError as error:
        raise DataError(
            f"{error.filename or data}: cannot be read ({error.strerror or error}); check disk and permissions"
        ) from None


def locate(data: str | Path, split: str) -> Location:
    """Find a split; raises DataError."""
    if data in ("", "synthetic"):
        raise DataError(f"data path {data!r} is not a place with image files; give a file or a folder")
    path = expanded(data)
    if found := _find(path, split):
        if path not in found.files:  # no remark if the user named a single shard
            check_complete(found.files)
            if found.format == "folders":
                folders.check_is_split(path)
        return found
    other = _OTHER[split]
    if path.is_dir() and _find(path, other):
        tests = [name for name in folders.class_folders(path) if split_of(name) == "test"] if split == "val" else []
        rename = f", rename {tests[0]} to val to validate with its images" if tests else ""
        without = (f"{rename}, set part of the training images aside (--val-split 0.1), or train without validation "
                   "(--validate-every 0)" if split == "val" else "")
        raise DataError(
            f"data path {path} has {other} but no {split}; add {split}/, {split}.rec or {split}.lst{without}"
        )
    if path.is_dir():
        folders.check_is_split(path)
        folders.folder_classes(path, split)  # folder_classes raises a more precise error
    known = ", ".join(entry.looks_like for entry in FORMATS.values())
    problem = "is in none of the known formats" if path.exists() else "does not exist"
    raise DataError(
        f"data path {path} {problem}; give {known}, or a folder with train and val as any of these"
    )


def has_label_sets(data: str | Path) -> bool:
    """Whether each image has a fine and a coarse label, so that --labels must choose one."""
    return any((found := _find(expanded(data), split)) and found.format in _WITH_LABEL_SETS for split in _OTHER)


def check_label_set(data: str | Path, format: str, labels: Labels) -> None:
    """Raise DataError if --labels is given for data with a single label for each image."""
    if labels != AUTO and format not in _WITH_LABEL_SETS:
        raise DataError(f"{data}: has one label for each image, and --labels {labels} chooses between the two labels "
                        "in CIFAR-100's own files: leave out --labels")


def splits_of(data: str | Path) -> list[str]:
    """The splits at a data path; images without splits count as "train". Raises DataError if there are no data."""
    path = expanded(data)
    found = {split: where for split in ("train", "val") if data and (where := _find(path, split))}
    if not found:
        locate(data, "train")
    return ["train"] if same_images(data) else list(found)


def same_images(data: str | Path) -> bool:
    """Whether both splits of a data path consist of identical files, possibly by links. Raises OSError."""
    train, val = (_find(expanded(data), split) for split in ("train", "val"))
    return train is not None and val is not None and _places(train) == _places(val)


def _places(location: Location) -> list[Path]:
    """The files or class folders of a split, with links resolved."""
    if location.format == "folders":
        return list(folders.class_places(location.path).values())
    return [file.resolve() for file in location.files]


def beside(found: Location, data: str | Path) -> list[str]:
    """Remarks about the splits of a data folder: the names of their folders, if these are not `train` and `val`; and
    the shards, records, lists and image folders that belong to neither split.
    """
    path = expanded(data)
    splits = {split: where for split in _OTHER if (where := _find(path, split))}
    read = {file for where in splits.values() for file in where.files}
    if not path.is_dir():
        return []
    holders = {path} | {file.parent for file in read if file.parent.parent == path}
    others = [str(file.relative_to(path)) for folder in sorted(holders) for file in sorted(folder.iterdir())
              if file not in read | holders and not (path in read and file.is_dir()) and _is_data(file, found.format)]
    places = {split: where.files[0] if where.files[0].is_dir() else where.files[0].parent
              for split, where in splits.items()}
    named = [f"{place.relative_to(path)} is read as {split}" for split, place in places.items()
             if place.is_relative_to(path) and place not in (path, path / split)]
    remarks = [f"{path}: by the names of its folders, {' and '.join(named)}"] if named else []
    if others:
        remarks.append(f"{path}: {len(others):,} of its shards, records, lists and folders of images belong to no "
                       f"split and are not read: {some(others)}")
    return remarks


def _is_data(path: Path, format: str) -> bool:
    """Whether a file or folder may be meant as data."""
    if path.name.startswith(".") or is_system(path.name):
        return False
    if not path.is_dir():
        return _is_data_file(path.name)
    # Folders beside a list usually hold its images, and train.rec was usually made from the train/ beside it.
    return format != "list" and path.name not in _OTHER and (
        folders.seems_to_hold_images(folders.innermost(path)) or folders.seems_to_hold(path, _is_data_file))


def _is_data_file(name: str) -> bool:
    """Whether a file is named like data. This includes shards that are compressed, copies, or unfinished downloads."""
    path = shard = Path(name)
    while shard.suffix.lower() in _WRAPPINGS:
        shard = shard.with_suffix("")
    return path.suffix in (".rec", ".lst") or is_tar(shard) or is_tfrecord(shard)


def _check_val_split(data: str | Path, val_split: float) -> None:
    if not 0 < val_split < 1:
        raise DataError(f"--val-split {val_split:g} must be at least 0 and below 1")
    found = _find(expanded(data), "val")
    if found and not same_images(data):
        raise DataError(f"data path {data} has images for validation, {found.path}: leave out --val-split, or give "
                        "only the training images as the data")


def _find(path: Path, split: str) -> Location | None:
    """The place of a split in the first format that finds it; None if no format does.

    A format may find unsplit images, which serve as both splits. They are ignored if an earlier format has only the
    other split, because they may contain the images of that split.
    """
    other, before = _OTHER[split], list[Format]()
    for name, entry in FORMATS.items():
        files = entry.find(path, split)
        if files and not (files == entry.find(path, other) and any(format.find(path, other) for format in before)):
            if name == "CIFAR-10":
                _check_one_cifar(path, split, files)
            return Location(name, files)
        before.append(entry)
    return None


def _check_one_cifar(path: Path, split: str, files: list[Path]) -> None:
    """Raise DataError if CIFAR-100 lies beside CIFAR-10, because the user may mean either."""
    if others := cifar100.find(path, split):
        folders = sorted({files[0].parent, others[0].parent})
        way_out = f"give {' or '.join(map(str, folders))}" if len(folders) > 1 else "give each a folder of its own"
        raise DataError(f"{path}: holds CIFAR-10 ({files[0].name}) and CIFAR-100 ({others[0].name}); {way_out}")
