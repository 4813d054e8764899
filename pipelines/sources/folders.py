"""Sources of image files in class folders, or named in a list."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipelines.errors import DataError
from pipelines.files import check_is_file, open_file, read_lines
from pipelines.sources.base import IMAGE_SUFFIXES, Classes, Source, check_label, data_folder, nfc, read_classes
from pipelines.sources.split_names import SPLITS, by_split, is_companion, is_whole, split_of, splits_in
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
COPIES_SUFFIXES = frozenset({".bak", ".orig", ".tmp", ".temp", ".swp", ".part", ".partial", ".crdownload", ".download"})
# Other kinds that `image_files` leaves out, in the words of its remarks.
LINKS, HIDDEN_FOLDERS, HIDDEN_IMAGES = "links to folders", "hidden folders", "hidden images"
SYSTEM = "folders and files that systems make"
COPIES = "copies and unfinished files"
_NAMED = (LINKS, SYSTEM, HIDDEN_FOLDERS, HIDDEN_IMAGES, COPIES)
NO_ENDING = "without an ending"
# The first bytes of the formats that we read: JPEG, PNG, WebP, TIFF, BMP (with its reserved bytes), PBM to PPM.
_BEGINNING = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF....WEBP|II\*\0|MM\0\*|BM.{4}\0{4}|P[1-6]\s+(?:#|\d+\s+\d)", re.DOTALL)
_MOST_PLACES, _MOST_NAMES = 100, 1000  # limits of a quick look: number of folders, and number of names in each folder
_DEEPEST = 3  # folders below a class folder that are compared with the folders of other classes
_MOST_FOLDERS = 10_000  # if a list's files are in more folders, these folders are not searched for unlisted images


def find_list(path: Path, split: str) -> list[Path]:
    """Find PATH if it ends in .lst, or PATH/SPLIT.lst."""
    found = path if path.suffix == ".lst" else path / f"{split}.lst"
    return [found] if found.is_file() else []


def find_folders(path: Path, split: str) -> list[Path]:
    """Find the folder of a split with a folder for each class; or PATH itself if it has class folders; PATH then serves
    all splits.
    """
    if not path.is_dir():
        return []
    if splits := _splits(path).folders:
        return [splits[split]] if split in splits else []
    return [path] if class_folders(path) else []


class _Splits(NamedTuple):
    folders: dict[str, Path]  # split -> folder; {} if the folders of the data path are classes
    doubt: str = ""  # if the folders may be splits or classes, a sentence about this


def _splits(path: Path) -> _Splits:
    """The folders in PATH that are its splits, judged by their names, their content and the folders beside them.

    A folder called `train` may also be a class. It counts as a class if other folders of images lie beside it, no
    folder's name says another split, and its images lie directly in it.
    """
    names = [name for name in class_folders(path) if not is_companion(name)]
    said = by_split(names)
    if not said or (len(names) > 1 and {nfc(name) for name in names} <= {nfc(key) for key, _ in read_classes(path)}):
        return _Splits({})
    found = [name for those in said.values() for name in those]
    others = [name for name in names if not splits_in(name) and seems_to_hold_images(path / name)]
    has_both, are_whole = len(said) > 1, all(map(is_whole, found))
    hold_folders = any(class_folders(path / name) for name in found)
    has_other_split = has_both or any(splits_in(name) - (set() if hold_folders and name not in names else said.keys())
                                      for name in os.listdir(path))
    in_doubt = False
    if not others:
        are_splits = has_other_split or are_whole or hold_folders
    elif are_whole:
        are_splits = has_other_split or hold_folders
        in_doubt = not has_both and (len(others) > 1 and not has_other_split if hold_folders else has_other_split)
    else:
        are_splits = in_doubt = has_both or (has_other_split and hold_folders)
    if not are_splits:
        return _Splits({})
    doubt = ""
    if twice := [those for those in said.values() if len(those) > 1]:
        doubt = (f"data path {path} holds {some(twice[0])}, which are several folders for one split: rename the one "
                 f"to use to {split_of(twice[0][0])}, or, if all are classes, list them in {path / 'classes.txt'}")
    elif in_doubt:
        doubt = (f"data path {path} holds {some(others)} beside {some(found)}, so {some(found)} may be a split or "
                 f"another class: if all are classes, list them in {path / 'classes.txt'}; for {found[0]} alone, give "
                 f"{path / found[0]} as the data")
    return _Splits({split: innermost(path / those[0]) for split, those in said.items()}, doubt)


def innermost(folder: Path) -> Path:
    """A split's folder; or, if an archive has put that folder into a folder with the same name, the inner folder."""
    inside = class_folders(folder)
    is_twice = len(inside) == 1 and split_of(folder.name) and split_of(inside[0]) == split_of(folder.name)
    return folder / inside[0] if is_twice else folder


def _training_folder(val: Path) -> Path | None:
    """The folder of training images beside a folder that is named like a folder of validation images; None if there is
    none.
    """
    if split_of(val.name) != "val":
        return None
    return _splits(data_folder(val)).folders.get("train")


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

    def stamp(self, i: int) -> str:
        return f"{nfc(self.identity(i))}, {self.location(i)[2]} bytes"

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
        check_is_file(path)  # checked because DALI's threads would wait forever on a named pipe
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
        names = (entry.name for entry in entries if _is_folder(entry))
        return sorted(name for name in names if not name.startswith(".") and not is_system(name))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder, or a link to a folder. Only links cost a call of the file system."""
    try:
        return entry.is_dir()
    except OSError:  # for example a link to itself
        return False


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
    """The reason why a file without an image's suffix is left out, as a key of LeftOut.

    Returns "" for a file with an image's content, and for a hidden file that is not an image.
    """
    name = os.path.basename(path)
    ending = os.path.splitext(name)[1].lower()
    if name.startswith("."):
        return HIDDEN_IMAGES if ending in IMAGE_SUFFIXES else ""
    if is_system(name):
        return SYSTEM
    if ending in COPIES_SUFFIXES or name.endswith("~"):
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
    """Whether `image_files` would find an image; stops at the first image."""
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


def check_is_split(path: Path) -> None:
    """Raise DataError if folders may be either splits or classes."""
    if doubt := _splits(path).doubt:
        raise DataError(doubt)


def seems_to_hold_images(folder: Path) -> bool:
    """Whether a folder, or a folder in it, has files with an image's suffix; a quick look at the first names only."""
    return seems_to_hold(folder, _is_image)


def seems_to_hold(folder: Path, is_wanted: Callable[[str], bool]) -> bool:
    """Whether a folder, or a folder in it, has files of wanted names; a quick look at the first names only."""
    try:
        places = [folder, *(folder / name for name in class_folders(folder)[:_MOST_PLACES])]
        return any(is_wanted(name) for place in places for name in itertools.islice(os.listdir(place), _MOST_NAMES))
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
        others = class_folders(path.parent) if split_of(path.name) in SPLITS else []
        or_list = f", or, if {path.name} is a class, list all classes in {path.parent / 'classes.txt'}"
        raise DataError(f"data path {path} holds {inside}, no class folders; put the images of each class into a "
                        f"folder of its own{or_list * (len(others) > 1)}")
    if path.name != split:
        _check_are_classes(path, folders)
    if listed := read_classes(path):
        return listed
    place = (_training_folder(path) if split == "val" else None) or path
    if not (names := class_folders(place)):  # the training images are stored in another format
        place, names = path, folders
    # among names that are equal in NFC, one is used
    first = {nfc(name): name for name in reversed(names) if holds_images(place / name)}
    return [(name, name) for name in names if first.get(nfc(name)) == name]


def _check_are_classes(path: Path, folders: Sequence[str]) -> None:
    """Raise DataError if the folders, or the folders in each of them, are splits instead of classes."""
    if all(map(is_whole, folders)) and not read_classes(path):
        raise DataError(f"data path {path} holds {', '.join(folders)}, which are splits and not classes; rename the "
                        "training folder to train, and the validation folder to val")
    inside = {name: class_folders(path / name) for name in folders}
    holders = [name for name, inner in inside.items() if inner and
               (len({split_of(each) for each in inner} - {""}) > 1 or all(map(is_whole, inner)))]
    for name in holders:
        if any(class_folders(path / name / each) for each in inside[name] if split_of(each)):
            raise DataError(f"data path {path} has no train and val, but {path / name} has; give that folder")
    if holders:
        first = path / holders[0]
        splits = sorted(filter(split_of, inside[holders[0]]), key=lambda name: split_of(name) not in SPLITS)
        to = split_of(splits[0]) if split_of(splits[0]) in SPLITS else "val"
        raise DataError(f"data path {path} holds the splits inside the classes "
                        f"({some([f'{first}/{name}' for name in splits])}), but they must be outside: move "
                        f"{first / splits[0]} to {path / to / first.name}, and so on")


def find_images(path: Path, split: str) -> tuple[Classes, dict[str, list[Path]], list[str]]:
    """Find the classes, the image files by folder, and remarks about left-out data, in a folder of class folders.

    A folder in the result may belong to no class of the list of classes. Raises DataError if there is no image.
    """
    classes = folder_classes(path, split)
    left_out = LeftOut()
    files = {name: image_files(path / name, left_out) for name in class_folders(path)}
    remarks = []
    if loose := _images_beside(path):
        remarks.append(
            f"{path}: {loose:,} image{'s' * (loose > 1)} outside the class folders "
            f"{'are' if loose > 1 else 'is'} left out"
        )
    keys = {nfc(key): key for key, _ in classes}
    if forms := [name for name in sorted(files) if keys.get(nfc(name), name) != name]:
        remarks.append(f"{path}: these folders have names of classes in another form of Unicode (NFC or NFD), and "
                       f"count as these classes: {some(forms)}")
    if broken := broken_links(path):
        remarks.append(f"{path}: links that lead to no folder are left out: {some(broken)}")
    train = _training_folder(path) if split == "val" else None
    if train and (shared := _shared(path, train)):
        remarks.append(f"{path}: these class folders are the same as those in {train}, so validation has training "
                       f"images: {some(shared)} (give it images of its own)")
    if twice := _linked_twice(path):
        remarks.append(f"{path}: these class folders lead, by links, to others, so the same images have two labels: "
                       f"{some(twice)} (remove the links)")
    if inner := _same_folders_inside(path, files):
        remarks.append(f"{path}: several class folders have the same subfolders, with most images ({some(inner)}): if "
                       f"these are the classes, and {some(sorted(files))} are not, put all images of a class into one "
                       "folder")
    if empty := [name for name in sorted(files.keys() - dict(classes).keys()) if not files[name]]:
        remarks.append(f"{path}: folders without an image do not count as classes: {some(empty)}")
    for kind, others in other_folders(path).items():
        if others:
            left_out[kind] += others
    remarks += left_out.remarks(path)
    if not any(files.values()):
        raise no_images(path, remarks)
    return classes, files, remarks


def _same_folders_inside(path: Path, files: Mapping[str, Sequence[Path]]) -> list[str]:
    """The names of folders that lie in several class folders and hold most of the images, if there are at least two of
    these names, and all class folders have images in folders.

    These folders may be the classes, and the class folders may be splits, folds or sites: trn/cat, trn/dog, vld/cat,
    vld/dog.
    """
    # An image of a deeper folder comes after the class folder's own images, so a look at the last one is enough.
    folders = {name: images for name, images in files.items() if images}
    if len(folders) < 2 or any(images[-1].parent == path / name for name, images in folders.items()):
        return []
    counts = {name: Counter(os.path.relpath(folder, path / name) for folder in map(os.path.dirname, images))
              for name, images in folders.items()}
    for depth in range(1, 1 + _DEEPEST):
        images_in, holders = Counter[str](), Counter[str]()
        for inside in counts.values():
            those = [(folder.split(os.sep), count) for folder, count in inside.items() if folder != os.curdir]
            names = [(os.sep.join(parts[:depth]), count) for parts, count in those if len(parts) >= depth]
            holders.update({name for name, _ in names})
            for name, count in names:
                images_in[name] += count
        shared = sorted(name for name, count in holders.items() if count > 1)
        if len(shared) > 1 and 2 * sum(images_in[name] for name in shared) > sum(map(len, files.values())):
            return shared
    return []


def _linked_twice(path: Path) -> list[str]:
    """The class folders that are links to another class folder or to a folder in it, as "one = other"."""
    places = class_places(path)
    first: dict[Path, str] = {}
    for name in sorted(places, key=lambda name: (path / name).is_symlink()):
        first.setdefault(places[name], name)
    others = {name: next((first[each] for each in (place, *place.parents) if first.get(each, name) != name), "")
              for name, place in places.items()}
    return [f"{name} = {other}" for name, other in others.items() if other]


def _shared(path: Path, train: Path) -> list[str]:
    """The names of class folders in `path` that lead, by links, to class folders in `train`."""
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
                f"training folders); add the class there or remove the folder"
            )
        files += images
        labels += [number[nfc(name)]] * len(images) if images else []
    return FileSource(path, files, labels, classes, remarks)


def some(names: list[str]) -> str:
    """The first names, and the number of further names, for a sentence."""
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


def open_list(path: Path, train: Sequence[Path] = ()) -> FileSource:
    """Open a list. `train`: the list of the training images, if `path` belongs to another split.

    Without a classes.txt, a label means the same class in both lists, unless the files of both lists lie in class
    folders of equal names.
    """
    files, labels = _read_list(path)
    classes, of_training = read_classes(path.parent), _read_list(train[0]) if train else (files, labels)
    if not classes:
        classes = _classes_in_list(files, labels, *of_training)
    for file, label in zip(files, labels, strict=True):
        if not 0 <= label < len(classes):
            raise DataError(f"{path}: label {label} of {file.name} is outside the {len(classes)} classes; correct it")
    remarks = list_remarks(path, files, labels)
    if train and (shared := sorted(set(map(str, files)) & set(map(str, of_training[0])))):
        remarks.append(f"{path}: {len(shared):,} of its files are in {train[0].name} too, so validation has training "
                       f"images: {some(shared)} (list each in one of them)")
    return FileSource(path, files, labels, classes, remarks)


def _classes_in_list(files: Sequence[Path], labels: Sequence[int], train_files: Sequence[Path],
                     train_labels: Sequence[int]) -> Classes:
    """The classes of a list without a classes.txt: from 0 to its highest label, or to the highest label of the training
    images."""
    names, of_training = _folder_names(files, labels), _folder_names(train_files, train_labels)
    highest = max(labels)
    if not set(names.values()) & set(of_training.values()):  # no name is common, so the numbers decide
        num_trained = 1 + max(train_labels)
        beyond = "label " * bool(of_training)  # needed because a training folder may be named by the bare number
        names = {label: f"{beyond}{label}" for label in range(num_trained, 1 + highest)} | of_training
        highest = max(highest, num_trained - 1)
    return [(name, name) for name in (names.get(label, str(label)) for label in range(1 + highest))]


def _read_list(path: Path) -> tuple[list[Path], list[int]]:
    """The files of a list, and their labels. Raises DataError."""
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
    return files, labels


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
                       f"{'are' if others > 1 else 'is'} left out, as no list names {'them' if others > 1 else 'it'}")
    return remarks


def _unlisted(path: Path, listed: Set[str]) -> int:
    """The number of images in the folders of a list's files that neither this list nor another list beside it names."""
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


def _folder_names(files: Sequence[Path], labels: Sequence[int]) -> dict[int, str]:
    """Names for the labels of a list: the folders of their files; {} if the folders are ambiguous.

    Folders name classes only if all files of a label are in folders of one name, and no files of another label are. The
    folder is the last folder of each path (CLASS/FILE), or the first folder below the folder that all files share
    (CLASS/images/FILE). A list whose folders are sessions or cameras gets no names.
    """
    folders = {(label, os.path.dirname(file)) for label, file in zip(labels, files, strict=True)}
    places = [(label, os.path.abspath(folder)) for label, folder in folders]
    shared = os.path.commonpath([place for _, place in places])
    firsts = {(label, os.path.relpath(place, shared).split(os.sep)[0]) for label, place in places}
    for pairs in ({(label, os.path.basename(place)) for label, place in places}, firsts):
        names = dict(pairs)
        if len(pairs) == len(names) == len(set(names.values()) - {os.curdir}):
            return names
    return {}
