"""Sources of image files in class folders, or named in a list."""

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

# Suffixes of image files that we do not read. The last lines are cameras' raw files, most of which begin like TIFF.
UNREAD_SUFFIXES = frozenset({
    ".gif", ".avif", ".heic", ".heif", ".jxl", ".jp2", ".svg", ".psd", ".tga", ".ico",
    ".dng", ".cr2", ".cr3", ".crw", ".nef", ".nrw", ".arw", ".sr2", ".srf", ".orf", ".rw2", ".raf", ".pef", ".srw",
    ".raw", ".rwl", ".iiq", ".3fr", ".erf", ".kdc", ".dcr", ".mos", ".mrw",
})  # fmt: skip
# Suffixes of files that are not images, whatever they contain.
_NO_IMAGES = frozenset({
    ".txt", ".xml", ".json", ".jsonl", ".csv", ".tsv", ".md", ".html", ".htm", ".yaml", ".yml", ".toml", ".ini", ".cfg",
    ".log", ".py", ".sh", ".npy", ".npz", ".mat", ".pkl", ".pickle", ".h5", ".db", ".pdf", ".zip", ".gz", ".tgz",
    ".tar", ".7z", ".rar", ".mp4", ".avi", ".mov", ".mp3", ".wav", ".rec", ".idx", ".lst", ".url", ".lnk",
})  # fmt: skip
# Suffixes of editors' backup copies and of unfinished downloads, which may be images but must not count as such.
_COPIES = frozenset({".bak", ".orig", ".tmp", ".temp", ".swp", ".part", ".partial", ".crdownload", ".download"})
# Other kinds that `image_files` leaves out, in the words of its remarks.
LINKS, HIDDEN_FOLDERS, HIDDEN_IMAGES = "links to folders", "hidden folders", "hidden images"
SYSTEM = "folders and files that systems make"
COPIES = "copies and unfinished files"
_NAMED = (LINKS, SYSTEM, HIDDEN_FOLDERS, HIDDEN_IMAGES, COPIES)
NO_ENDING = "without an ending"
# The first bytes of the formats that we read: JPEG, PNG, WebP, TIFF, BMP (with its reserved bytes), PBM to PPM.
_BEGINNING = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF....WEBP|II\*\0|MM\0\*|BM.{4}\0{4}|P[1-6]\s+(?:#|\d+\s+\d)", re.DOTALL)
_OF_A_SPLIT = re.compile(r"(train|val|test|dev|eval)(ing|id|idation|[\W_\d]|$)")
_MOST_PLACES, _MOST_NAMES = 100, 1000  # limits of a quick look: folders, and names in each
_MOST_FOLDERS = 10_000  # if a list's files are in more folders, we do not search them for unlisted images
_SPLIT_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test", "testing", "dev"})


def find_list(path: Path, split: str) -> list[Path]:
    """Find PATH if it ends in .lst, or PATH/SPLIT.lst."""
    found = path if path.suffix == ".lst" else path / f"{split}.lst"
    return [found] if found.is_file() else []


def find_folders(path: Path, split: str) -> list[Path]:
    """Find PATH/SPLIT with a folder for each class; or PATH itself with class folders, which then serves all splits."""
    if _has_splits(path):
        return [path / split] if (path / split).is_dir() else []
    return [path] if path.is_dir() and class_folders(path) else []


def _has_splits(path: Path) -> bool:
    """Whether PATH has train/ or val/ as splits. With images but no folders inside, they may be classes instead."""
    splits = _splits(path)
    return bool(splits) and (any(class_folders(path / name) for name in splits) or not _classes_beside(path))


def _splits(path: Path) -> list[str]:
    return [name for name in ("train", "val") if (path / name).is_dir()]


def _classes_beside(path: Path) -> list[str]:
    """Image folders beside a single train/ or val/ that suggest that it is a class, too.

    There must be at least two, and nothing beside them may have the name of another split, such as val.rec or test1/.
    """
    splits = _splits(path)
    if len(splits) > 1 or any(_OF_A_SPLIT.match(name.lower()) for name in os.listdir(path) if name not in splits):
        return []
    found = [name for name in class_folders(path) if name not in splits and seems_to_hold_images(path / name)]
    return found if len(found) > 1 else []


class FileSource(Source):
    """Image files from class folders or from a list."""

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
        """The file's path relative to its class folder, or else to the list's folder."""
        return "/".join(self._path(i)[1])

    def group(self, i: int) -> str:
        """The first folder within the class folder; in a list of files, the file's folder."""
        is_in_class, parts = self._path(i)
        if is_in_class:
            return "/".join((self.classes[self.label(i)][0], parts[0])) if len(parts) > 1 else ""
        return "/".join(parts[:-1])

    def _path(self, i: int) -> tuple[bool, list[str]]:
        """Whether the file lies in a folder named like its class; and its path relative to that folder, as parts."""
        path, start = str(self._files[i]), f"{self._folder}{os.sep}"
        parts = (path.removeprefix(start) if path.startswith(start) else os.path.relpath(path, start)).split(os.sep)
        folders, own = [nfc(part) for part in parts[:-1]], nfc(self.classes[self.label(i)][0])
        is_in_class = own in folders
        return is_in_class, parts[folders.index(own) + 1 :] if is_in_class else parts

    def label(self, i: int) -> int:
        return self._labels[i]

    def feed(self, i: int) -> np.ndarray:
        path = os.fsencode(self._files[i])
        check_is_file(path)  # DALI's threads would wait for ever on a named pipe
        return np.frombuffer(path, np.uint8)

    def read(self, i: int) -> np.ndarray:
        with open_file(Path(self._files[i])) as file:
            return np.fromfile(file, np.uint8)

    def location(self, i: int) -> tuple[Path, int, int]:
        """File, offset and size of image `i` in bytes; a missing file has size 0."""
        file = Path(self._files[i])
        try:
            check_is_file(file)
            return file, 0, file.stat().st_size
        except OSError:
            return file, 0, 0


def class_folders(folder: Path) -> list[str]:
    """Sorted names of the sub-folders, without hidden folders and folders that systems make."""
    with os.scandir(folder) as entries:
        names = (entry.name for entry in entries if os.path.isdir(entry))  # also False for a link to itself
        return sorted(name for name in names if not name.startswith(".") and not is_system(name))


def other_folders(folder: Path) -> dict[str, list[str]]:
    """Sorted paths of the sub-folders that `class_folders` leaves out, under the keys HIDDEN_FOLDERS and SYSTEM."""
    found: dict[str, list[str]] = {HIDDEN_FOLDERS: [], SYSTEM: []}
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if (entry.name.startswith(".") or is_system(entry.name)) and os.path.isdir(entry):
                found[HIDDEN_FOLDERS if entry.name.startswith(".") else SYSTEM].append(entry.path)
    return found


def class_places(folder: Path) -> dict[str, Path]:
    """The class folders by name, with links resolved."""
    return {name: (folder / name).resolve() for name in class_folders(folder)}


def broken_links(folder: Path) -> list[str]:
    """Sorted paths of links beside the class folders that lead to no folder.

    A link to a file with a suffix, such as classes.txt, is meant as a file and does not count.
    """
    with os.scandir(folder) as entries:
        links = [entry for entry in entries if entry.is_symlink() and not entry.name.startswith(".")]
    return sorted(link.path for link in links if not os.path.isdir(link)
                  and not (os.path.isfile(link) and os.path.splitext(link.name)[1]))


class LeftOut(defaultdict[str, list[str]]):
    """The paths of left-out files and folders, by reason.

    A key is the suffix of files that are not read (or NO_ENDING), or LINKS, SYSTEM, HIDDEN_FOLDERS, HIDDEN_IMAGES or
    COPIES.
    """

    def __init__(self) -> None:
        super().__init__(list)

    @property
    def unread(self) -> str:
        """The number of files of each image format that we do not read, in words."""
        return self._counts({ending for ending in self if ending in UNREAD_SUFFIXES})

    def _counts(self, endings: Set[str]) -> str:
        """The number of files with each suffix, most frequent first, in words."""
        most = sorted(endings, key=lambda ending: (-len(self[ending]), ending))
        return some([f"{len(self[ending]):,} {ending}" for ending in most])

    def remarks(self, folder: Path) -> list[str]:
        """Remarks about all left-out files and folders, which were found in `folder`."""
        named = [f"{folder}: {kind} are left out: {some(self[kind])}" for kind in _NAMED if kind in self]
        if self.unread:
            named.append(f"{folder}: files of formats that are not read are left out: {self.unread} (convert them to "
                         "JPEG or PNG)")
        if others := self._counts(self.keys() - UNREAD_SUFFIXES - set(_NAMED)):
            named.append(f"{folder}: files that are not images, by their suffix or content, are left out: {others}")
        return named


def image_files(folder: Path, left_out: LeftOut) -> list[Path]:
    """Find the images in a class folder and in folders within it (as in Tiny ImageNet), sorted by name.

    An image is a file with an image's suffix, or another file with an image's content. Hidden and system files and
    folders, links to folders (which may form a cycle), and files that are not read are added to `left_out`. Raises
    OSError for a folder that cannot be read.
    """
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
    """The number of images that lie directly in the folder."""
    with os.scandir(path) as entries:
        # A link counts by its suffix alone; `broken_links` reports a link without a suffix that leads to no folder.
        return sum(_is_image(entry.name, "" if entry.is_symlink() else entry.path) and not entry.is_dir()
                   for entry in entries)


def _is_image(name: str, path: str = "") -> bool:
    """Whether a file is an image by its suffix or, if `path` is given, by its content; hidden files are not."""
    if name.startswith("."):
        return False
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES or (bool(path) and not _no_image(path))


def _no_image(path: str) -> str:
    """Why a file without an image's suffix is left out, as a key of LeftOut.

    Returns "" for a file with an image's content, and for a hidden file that is not an image.
    """
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
    """Whether `image_files` would find an image; stops at the first."""
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
    """Raise DataError if train/ or val/ in a folder may be either a split or a class beside other classes."""
    if others := _classes_beside(path):
        raise DataError(f"data path {path} holds {some(others)} beside {split}, so {split} may be a split or another "
                        f"class: if all are classes, move them into a folder {path / 'train'}; for {split} alone, give "
                        f"{path / split} as the data")


def seems_to_hold_images(folder: Path) -> bool:
    """Whether a folder, or a folder in it, has files with an image's suffix; a quick look at the first names only."""
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
                f"data path {path} holds {', '.join(folders)}, which are splits and not classes; rename the folder to "
                "train on to train, and the folder for validation to val"
            )
    if listed := read_classes(path):
        return listed
    train = path.parent / "train"
    place = train if split != "train" and path.name == split and train.is_dir() else path
    if not (names := class_folders(place)):  # the training images are stored in another format
        place, names = path, folders
    first = {nfc(name): name for name in reversed(names) if holds_images(place / name)}  # one of equal names
    return [(name, name) for name in names if first.get(nfc(name)) == name]


def find_images(path: Path, split: str) -> tuple[Classes, dict[str, list[Path]], list[str]]:
    """Find the classes, the image files by folder, and remarks about left-out data, in a folder of class folders.

    A folder in the result may belong to no class. Raises DataError if there is no image.
    """
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
        remarks.append(f"{path}: these folders have names of classes in another form of Unicode (NFC or NFD), and "
                       f"count as these classes: {some(forms)}")
    if broken := broken_links(path):
        remarks.append(f"{path}: links that lead to no folder are left out: {some(broken)}")
    if split == "val" and (shared := _shared_with_training(path)):
        remarks.append(f"{path}: these class folders are the same as those in {path.parent / 'train'}, so validation "
                       f"has training images: {some(shared)} (give it images of its own)")
    if empty := [name for name in sorted(files.keys() - dict(classes).keys()) if not files[name]]:
        remarks.append(f"{path}: folders without an image do not count as classes: {some(empty)}")
    for kind, others in other_folders(path).items():
        if others:
            left_out[kind] += others
    remarks += left_out.remarks(path)
    if not any(files.values()):
        raise no_images(path, remarks)
    return classes, files, remarks


def _shared_with_training(path: Path) -> list[str]:
    """The names of class folders in `val` that lead, by links, to class folders of the `train` beside it."""
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
    """The first names and the number of the others, for a sentence."""
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"and {len(names) - 3:,} more"])


def no_images(path: Path, remarks: Sequence[str] = ()) -> DataError:
    """The error for class folders that contain no image."""
    others = "".join(f"; {remark.removeprefix(f'{path}: ')}" for remark in remarks if ": files " in remark)
    return DataError(f"data path {path} has class folders but no image in them{others}; give JPEG, PNG, BMP, TIFF, "
                     "WebP or PPM files")


def list_entry(line: str) -> tuple[int, str]:
    """Label and file of a list's line; raises ValueError for a line that is not `index <tab> label <tab> file`."""
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
    """Remarks about files that a list names twice, and about images in its files' folders that no list names.

    Both are signs of a list that was cut off or doubled at the end of a line.
    """
    remarks = []
    label_of = dict(zip(map(str, files), labels, strict=True))
    if len(label_of) < len(files):
        remarks.append(f"{path}: {len(files) - len(label_of):,} of its {len(files):,} lines name a file that another "
                       "line names too: these images come more than once")
    if two := {str(file) for file, label in zip(files, labels, strict=True) if label_of[str(file)] != label}:
        remarks.append(f"{path}: names {len(two):,} file{'s' * (len(two) > 1)} with two labels: {some(sorted(two))} "
                       "(correct it)")
    if others := _unlisted(path, label_of.keys()):
        remarks.append(f"{path}: {others:,} image{'s' * (others > 1)} beside the {len(label_of):,} images of the list "
                       f"{'are' if others > 1 else 'is'} in no list, and left out")
    return remarks


def _unlisted(path: Path, listed: Set[str]) -> int:
    """The number of images in the folders of a list's files that neither it nor another list beside it names."""
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
    """Names for classes 0 to the highest label: the folders of their files, or numbers if folders are ambiguous.

    Folders name classes only if all files of a label are in folders of one name, and no other label's files are: the
    last folder of each path (CLASS/FILE), or the first one below the folder that all share (CLASS/images/FILE). A list
    whose folders are sessions or cameras has numbers.
    """
    folders = {(label, os.path.dirname(file)) for label, file in zip(labels, files, strict=True)}
    places = [(label, os.path.abspath(folder)) for label, folder in folders]
    shared = os.path.commonpath([place for _, place in places])
    firsts = {(label, os.path.relpath(place, shared).split(os.sep)[0]) for label, place in places}
    for pairs in ({(label, os.path.basename(place)) for label, place in places}, firsts):
        names = dict(pairs)
        if len(pairs) == len(names) == len(set(names.values()) - {os.curdir}):
            return [names.get(label, str(label)) for label in range(max(labels) + 1)]
    return [str(label) for label in range(max(labels) + 1)]
