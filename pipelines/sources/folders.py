"""Image files in folders of classes, or in a list, as a source."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Sequence, Set
from pathlib import Path

import numpy as np

from pipelines.errors import DataError
from pipelines.files import check_is_file, open_file, read_lines
from pipelines.sources.base import IMAGE_SUFFIXES, Classes, Source, check_label, nfc, read_classes
from pipelines.sources.system_files import is_system

# Images by their endings, but none that DALI's decoders read, or that are looked for. The last lines are raw files of
# cameras, most of which begin as TIFF does.
UNREAD_SUFFIXES = frozenset({
    ".gif", ".avif", ".heic", ".heif", ".jxl", ".jp2", ".svg", ".psd", ".tga", ".ico",
    ".dng", ".cr2", ".cr3", ".crw", ".nef", ".nrw", ".arw", ".sr2", ".srf", ".orf", ".rw2", ".raf", ".pef", ".srw",
    ".raw", ".rwl", ".iiq", ".3fr", ".erf", ".kdc", ".dcr", ".mos", ".mrw",
})  # fmt: skip
# Endings of files that are no images, whatever they contain.
_NO_IMAGES = frozenset({
    ".txt", ".xml", ".json", ".jsonl", ".csv", ".tsv", ".md", ".html", ".htm", ".yaml", ".yml", ".toml", ".ini", ".cfg",
    ".log", ".py", ".sh", ".npy", ".npz", ".mat", ".pkl", ".pickle", ".h5", ".db", ".pdf", ".zip", ".gz", ".tgz",
    ".tar", ".7z", ".rar", ".mp4", ".avi", ".mov", ".mp3", ".wav", ".rec", ".idx", ".lst", ".url", ".lnk",
})  # fmt: skip
# Copies that editors keep, and what browsers and others have not finished to download: perhaps images, but no others.
_COPIES = frozenset({".bak", ".orig", ".tmp", ".temp", ".swp", ".part", ".partial", ".crdownload", ".download"})
# What else `image_files` leaves out, in the words of a remark.
LINKS, HIDDEN_FOLDERS, HIDDEN_IMAGES = "links to folders", "hidden folders", "hidden images"
SYSTEM = "folders and files that systems make"
COPIES = "copies and unfinished files"
_NAMED = (LINKS, SYSTEM, HIDDEN_FOLDERS, HIDDEN_IMAGES, COPIES)
NO_ENDING = "without an ending"
# How the files of formats that are read begin: JPEG, PNG, WebP, TIFF, BMP (with its reserved bytes), PBM to PPM.
_BEGINNING = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF....WEBP|II\*\0|MM\0\*|BM.{4}\0{4}|P[1-6]\s+(?:#|\d+\s+\d)", re.DOTALL)
_OF_A_SPLIT = re.compile(r"(train|val|test|dev|eval)(ing|id|idation|[\W_\d]|$)")
_MOST_PLACES, _MOST_NAMES = 100, 1000  # folders, and names in each, that are looked at in passing
_MOST_FOLDERS = 10_000  # of a list's files, to look for others there
_SPLIT_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test", "testing", "dev"})


def find_list(path: Path, split: str) -> list[Path]:
    """PATH.lst or PATH/train.lst."""
    found = path if path.suffix == ".lst" else path / f"{split}.lst"
    return [found] if found.is_file() else []


def find_folders(path: Path, split: str) -> list[Path]:
    """PATH/train with a folder for each class, or PATH itself with them: then all splits are the same images."""
    if _has_splits(path):
        return [path / split] if (path / split).is_dir() else []
    return [path] if path.is_dir() and class_folders(path) else []


def _has_splits(path: Path) -> bool:
    """Whether train/ or val/ are there, and not as classes among others: with images and no folders in them."""
    splits = _splits(path)
    return bool(splits) and (any(class_folders(path / name) for name in splits) or not _classes_beside(path))


def _splits(path: Path) -> list[str]:
    return [name for name in ("train", "val") if (path / name).is_dir()]


def _classes_beside(path: Path) -> list[str]:
    """The folders of images that lie beside train/ or val/ and seem to be classes as these are: two and more, where
    nothing there has the name of another part of a data set, as val.rec and test1/ have."""
    splits = _splits(path)
    if len(splits) > 1 or any(_OF_A_SPLIT.match(name.lower()) for name in os.listdir(path) if name not in splits):
        return []
    found = [name for name in class_folders(path) if name not in splits and seems_to_hold_images(path / name)]
    return found if len(found) > 1 else []


class FileSource(Source):
    """Image files, from class folders or from a list."""

    feeds = "paths"

    def __init__(self, path: Path, files: Sequence[str | Path], labels: Sequence[int], classes: Classes,
                 remarks: Sequence[str] = ()):
        self.path, self.classes, self.remarks = path, classes, remarks
        self._files, self._labels = files, labels
        self._folder = path if path.is_dir() else path.parent

    def __len__(self) -> int:
        return len(self._files)

    def name(self, i: int) -> str:
        return str(self._files[i])

    def identity(self, i: int, fully: bool = False) -> str:
        """The path in the folder of the class, else in that of the list."""
        return "/".join(self._path(i)[1])

    def group(self, i: int) -> str:
        """The first folder within the class folder; in a list of files, the file's folder."""
        is_in_class, parts = self._path(i)
        if is_in_class:
            return "/".join((self.classes[self.label(i)][0], parts[0])) if len(parts) > 1 else ""
        return "/".join(parts[:-1])

    def _path(self, i: int) -> tuple[bool, list[str]]:
        """Whether the file is in a folder that is called as its class, and the path from there."""
        path, start = str(self._files[i]), f"{self._folder}{os.sep}"
        parts = (path.removeprefix(start) if path.startswith(start) else os.path.relpath(path, start)).split(os.sep)
        folders, own = [nfc(part) for part in parts[:-1]], nfc(self.classes[self.label(i)][0])
        is_in_class = own in folders
        return is_in_class, parts[folders.index(own) + 1 :] if is_in_class else parts

    def label(self, i: int) -> int:
        return self._labels[i]

    def feed(self, i: int) -> np.ndarray:
        path = os.fsencode(self._files[i])
        check_is_file(path)  # DALI's threads would wait for a named pipe, and nothing ends them
        return np.frombuffer(path, np.uint8)

    def read(self, i: int) -> np.ndarray:
        with open_file(Path(self._files[i])) as file:
            return np.fromfile(file, np.uint8)

    def location(self, i: int) -> tuple[Path, int, int]:
        """File, offset and size of image `i`; a file that is missing has no bytes."""
        file = Path(self._files[i])
        try:
            check_is_file(file)
            return file, 0, file.stat().st_size
        except OSError:
            return file, 0, 0


def class_folders(folder: Path) -> list[str]:
    """Sorted names of the sub-folders; hidden ones are left out, and those that systems make."""
    with os.scandir(folder) as entries:
        names = (entry.name for entry in entries if os.path.isdir(entry))  # False for a link to itself, too
        return sorted(name for name in names if not name.startswith(".") and not is_system(name))


def other_folders(folder: Path) -> dict[str, list[str]]:
    """Sorted paths of the folders in the place of class folders that are none: HIDDEN_FOLDERS, and those that are
    SYSTEM."""
    found: dict[str, list[str]] = {HIDDEN_FOLDERS: [], SYSTEM: []}
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if (entry.name.startswith(".") or is_system(entry.name)) and os.path.isdir(entry):
                found[HIDDEN_FOLDERS if entry.name.startswith(".") else SYSTEM].append(entry.path)
    return found


def class_places(folder: Path) -> dict[str, Path]:
    """The class folders by name, each where it really is: it may be a link."""
    return {name: (folder / name).resolve() for name in class_folders(folder)}


def broken_links(folder: Path) -> list[str]:
    """Sorted paths of the links, in the place of class folders, that lead to no folder. Those to a file with an ending
    are meant as files: classes.txt and others."""
    with os.scandir(folder) as entries:
        links = [entry for entry in entries if entry.is_symlink() and not entry.name.startswith(".")]
    return sorted(link.path for link in links if not os.path.isdir(link)
                  and not (os.path.isfile(link) and os.path.splitext(link.name)[1]))


class LeftOut(defaultdict[str, list[str]]):
    """The files and folders that are left out, by the ending of those that are not read (or NO_ENDING), else by LINKS,
    SYSTEM, HIDDEN_FOLDERS, HIDDEN_IMAGES and COPIES."""

    def __init__(self) -> None:
        super().__init__(list)

    @property
    def unread(self) -> str:
        """How many files there are of each format that is not read."""
        return self._counts({ending for ending in self if ending in UNREAD_SUFFIXES})

    def _counts(self, endings: Set[str]) -> str:
        """How many files there are of each of some endings, the most frequent first."""
        most = sorted(endings, key=lambda ending: (-len(self[ending]), ending))
        return some([f"{len(self[ending]):,} {ending}" for ending in most])

    def remarks(self, folder: Path) -> list[str]:
        """Sentences about all of them, for the owner of the folder that they were found in."""
        named = [f"{folder}: {kind} are left out: {some(self[kind])}" for kind in _NAMED if kind in self]
        if self.unread:
            named.append(f"{folder}: files of formats that are not read are left out: {self.unread} (convert them to "
                         "JPEG or PNG)")
        if others := self._counts(self.keys() - UNREAD_SUFFIXES - set(_NAMED)):
            named.append(f"{folder}: files that are no images, by their ending or content, are left out: {others}")
        return named


def image_files(folder: Path, left_out: LeftOut) -> list[Path]:
    """The images in a class folder, and in folders within it as those of Tiny ImageNet, in the order of their names:
    files with an image's ending, and others with an image's content. What is hidden or a system's, links to folders,
    which may lead in a circle, and files that are not read are added to `left_out`. Raises OSError for a folder that
    cannot be read."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=_raise):
        inside = []
        for name in sorted(folders):
            path = os.path.join(place, name)
            if name.startswith("."):
                left_out[HIDDEN_FOLDERS].append(path)
            elif is_system(name):
                left_out[SYSTEM].append(path)
            elif os.path.islink(path):
                left_out[LINKS].append(path)
            else:
                inside.append(name)
        folders[:] = inside
        for name in sorted(names):
            if _is_image(name):
                found.append(Path(place, name))
            elif kind := _no_image(path := os.path.join(place, name)):
                left_out[kind].append(path)
            elif not name.startswith("."):
                found.append(Path(path))
    return found


def _images_beside(path: Path) -> int:
    """How many images lie in the folder itself."""
    with os.scandir(path) as entries:
        # A link is an image by its ending alone; a link without one leads to no folder, which is an error of its own.
        return sum(_is_image(entry.name, "" if entry.is_symlink() else entry.path) and not entry.is_dir()
                   for entry in entries)


def _is_image(name: str, path: str = "") -> bool:
    """By its ending, or by its content where a path is given; and not hidden."""
    if name.startswith("."):
        return False
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES or (bool(path) and not _no_image(path))


def _no_image(path: str) -> str:
    """Why a file is left out, a key of LeftOut; "" for an image with another ending, and for hidden files that are no
    images."""
    name = os.path.basename(path)
    ending = os.path.splitext(name)[1].lower()
    if name.startswith("."):
        return HIDDEN_IMAGES if ending in IMAGE_SUFFIXES else ""
    if is_system(name):
        return SYSTEM
    if ending in _COPIES or name.endswith("~"):
        return COPIES
    is_other = ending in UNREAD_SUFFIXES or ending in _NO_IMAGES or not _begins_as_image(path)
    return (ending or NO_ENDING) if is_other else ""


def _begins_as_image(path: str) -> bool:
    try:
        with open_file(Path(path)) as file:
            return _BEGINNING.match(file.read(32)) is not None
    except OSError:
        return False


def holds_images(folder: Path) -> bool:
    """Whether `image_files` finds some; looks no further than the first."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or is_system(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            elif _is_image(entry.name, entry.path):
                return True
    return any(map(holds_images, folders))


def check_is_split(path: Path, split: str) -> None:
    """Raise DataError where a folder has train/ or val/ that may be a class among others as well."""
    if others := _classes_beside(path):
        raise DataError(f"data path {path} holds {some(others)} beside {split}, which may be a class as they are, or "
                        f"the split: for all of them as classes move them into a folder {path / 'train'}; for {split} "
                        f"alone give {path / split} as the data")


def seems_to_hold_images(folder: Path) -> bool:
    """Whether there are some by their endings, in it or in a folder of it; a look, however much else it holds."""
    try:
        places = [folder, *(folder / name for name in class_folders(folder)[:_MOST_PLACES])]
        return any(_is_image(name) for place in places for name in itertools.islice(os.listdir(place), _MOST_NAMES))
    except OSError:
        return False


def _raise(error: OSError) -> None:
    raise error


def folder_classes(path: Path, split: str) -> Classes:
    """The classes of a folder of class folders; raises DataError if it holds none."""
    folders = class_folders(path)
    if not folders:
        inside = "only files" if any(path.iterdir()) else "nothing"
        if broken := broken_links(path):
            inside = f"only links that lead to no folder ({some(broken)}) and files"
        raise DataError(
            f"data path {path} holds {inside}, no class folders; put the images of each class into a folder of its own"
        )
    if path.name != split:
        for name in filter(lambda name: _has_splits(path / name), folders):
            raise DataError(f"data path {path} has no train and val, but {path / name} has; give that")
        if all(name.lower() in _SPLIT_NAMES for name in folders):
            raise DataError(
                f"data path {path} holds {', '.join(folders)}: no classes but parts of a data set; call the one to "
                "train on train, and the one for validation val"
            )
    if listed := read_classes(path):
        return listed
    train = path.parent / "train"
    place = train if split != "train" and path.name == split and train.is_dir() else path
    if not (names := class_folders(place)):  # the training images are stored in another way
        place, names = path, folders
    first = {nfc(name): name for name in reversed(names) if holds_images(place / name)}  # of each name in any form
    return [(name, name) for name in names if first.get(nfc(name)) == name]


def find_images(path: Path, split: str) -> tuple[Classes, dict[str, list[Path]], list[str]]:
    """In a folder of class folders: the classes, the files in each folder, which may be one of no class, and what its
    owner should know about what is left out. Raises DataError if there is no image."""
    classes = folder_classes(path, split)
    left_out = LeftOut()
    files = {name: image_files(path / name, left_out) for name in class_folders(path)}
    remarks = []
    if loose := _images_beside(path):
        remarks.append(
            f"{path}: {loose:,} image{'s' * (loose > 1)} beside the folders of classes, in none of them, "
            f"{'are' if loose > 1 else 'is'} left out"
        )
    keys = {nfc(key): key for key, _ in classes}
    if forms := [name for name in sorted(files) if keys.get(nfc(name), name) != name]:
        remarks.append(f"{path}: these folders have the names of classes in another form of Unicode (NFC or NFD), and "
                       f"are the same classes: {some(forms)}")
    if broken := broken_links(path):
        remarks.append(f"{path}: links that lead to no folder are left out: {some(broken)}")
    if split == "val" and (shared := _shared_with_training(path)):
        remarks.append(f"{path}: these class folders are the same as those in {path.parent / 'train'}, so validation "
                       f"has training images: {some(shared)} (give it images of its own)")
    if empty := [name for name in sorted(files.keys() - dict(classes).keys()) if not files[name]]:
        remarks.append(f"{path}: no class is made of folders without an image: {some(empty)}")
    for kind, others in other_folders(path).items():
        if others:
            left_out[kind] += others
    remarks += left_out.remarks(path)
    if not any(files.values()):
        raise no_images(path, remarks)
    return classes, files, remarks


def _shared_with_training(path: Path) -> list[str]:
    """The class folders in a folder `val` that are, by links, those in `train` beside it."""
    train = path.parent / "train"
    if path.name != "val" or not train.is_dir():
        return []
    of_training = set(class_places(train).values())
    return [name for name, place in class_places(path).items() if place in of_training]


def open_folders(path: Path, split: str) -> FileSource:
    classes, found, remarks = find_images(path, split)
    number = {nfc(key): label for label, (key, _) in enumerate(classes)}
    files: list[Path] = []
    labels: list[int] = []
    for name, images in found.items():
        if images and nfc(name) not in number:
            raise DataError(
                f"{path / name}: class {name!r} is not among the {len(classes)} known classes (classes.txt or the "
                f"training folders); add it there or remove the folder"
            )
        files += images
        labels += [number[nfc(name)]] * len(images) if images else []
    return FileSource(path, files, labels, classes, remarks)


def some(names: list[str]) -> str:
    """The first of the names, for a sentence."""
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"and {len(names) - 3:,} more"])


def no_images(path: Path, remarks: Sequence[str] = ()) -> DataError:
    """The error for class folders without an image."""
    others = "".join(f"; {remark.removeprefix(f'{path}: ')}" for remark in remarks if ": files " in remark)
    return DataError(f"data path {path} has class folders but no image in them{others}; give JPEG, PNG, BMP, TIFF, "
                     "WebP or PPM files")


def list_entry(line: str) -> tuple[int, str]:
    """Label and file of a line of a list; raises ValueError for what is no `index <tab> label <tab> file`."""
    _, number, file = line.split("\t")
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
            columns = line.count("\t") + 1
            raise DataError(
                f"{path} line {number}: {line.strip()[:60]!r} is not `index <tab> label <tab> file`"
                f"{f' but has {columns} columns' if columns > 3 else ''}; correct it"
            ) from None
        check_label(label, f"{path} line {number}")
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
    return FileSource(path, files, labels, classes, list_remarks(path, files, labels))


def list_remarks(path: Path, files: Sequence[str | Path], labels: Sequence[int | None]) -> list[str]:
    """Sentences about files that a list names twice, and about images beside those that it names which neither it nor
    another list there has: it may have been cut off or doubled at the end of a line."""
    remarks = []
    label_of = dict(zip(map(str, files), labels, strict=True))
    if len(label_of) < len(files):
        remarks.append(f"{path}: {len(files) - len(label_of):,} of its {len(files):,} lines name a file that another "
                       "line names too: these images come more than once")
    if two := {str(file) for file, label in zip(files, labels, strict=True) if label_of[str(file)] != label}:
        remarks.append(f"{path}: names {len(two):,} file{'s' * (len(two) > 1)} with two labels: {some(sorted(two))} "
                       "(correct it)")
    if others := _unlisted(path, label_of.keys()):
        remarks.append(f"{path}: {others:,} image{'s' * (others > 1)} beside the {len(label_of):,} that it names "
                       f"{'are' if others > 1 else 'is'} in no list, and left out")
    return remarks


def _unlisted(path: Path, listed: Set[str]) -> int:
    """How many images lie in the folders of a list's files, but are neither in it nor in another list beside it."""
    folders = {os.path.dirname(file) for file in listed}
    if len(folders) > _MOST_FOLDERS:
        return 0
    there = set[str]()
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            there.update(f"{folder}/{entry.name}" for entry in entries if _is_image(entry.name))
    left = there - listed
    for other in path.parent.glob("*.lst") if left else ():
        with contextlib.suppress(DataError):
            left -= {str(path.parent / line.rpartition("\t")[2]) for line in read_lines(other)}
    return len(left)


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
