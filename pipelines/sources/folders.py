"""Image files in folders of classes, or in a list, as a source."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipelines.errors import DataError
from pipelines.files import check_is_file, open_file, read_lines
from pipelines.sources.base import IMAGE_SUFFIXES, Classes, Source, check_label, nfc, read_classes

# Images by their endings, but none that DALI's decoders read, or that are looked for.
UNREAD_SUFFIXES = frozenset({".gif", ".avif", ".heic", ".heif", ".jxl", ".jp2", ".svg", ".psd", ".tga", ".ico"})
# What else `image_files` leaves out, in the words of a remark.
LINKS, HIDDEN_FOLDERS, HIDDEN_IMAGES = "links to folders", "hidden folders", "hidden images"
_SPLIT_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test", "testing", "dev"})


def find_list(path: Path, split: str) -> list[Path]:
    """PATH.lst or PATH/train.lst."""
    found = path if path.suffix == ".lst" else path / f"{split}.lst"
    return [found] if found.is_file() else []


def find_folders(path: Path, split: str) -> list[Path]:
    """PATH/train with a folder for each class, or PATH itself with them: then all splits are the same images."""
    if (path / split).is_dir():
        return [path / split]
    return [path] if path.is_dir() and not _has_splits(path) and class_folders(path) else []


def _has_splits(path: Path) -> bool:
    return (path / "train").is_dir() or (path / "val").is_dir()


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
        """Of class folders the first folder within one, else the file's folder."""
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
        return file, 0, file.stat().st_size if file.is_file() else 0


def class_folders(folder: Path) -> list[str]:
    """Sorted names of the sub-folders; hidden ones are left out, and what macOS adds to archives."""
    with os.scandir(folder) as entries:
        names = (entry.name for entry in entries if os.path.isdir(entry))  # False for a link to itself, too
        return sorted(name for name in names if not name.startswith(".") and name != "__MACOSX")


def hidden_folders(folder: Path) -> list[str]:
    """Sorted paths of the hidden folders in the place of class folders."""
    with os.scandir(folder) as entries:
        return sorted(entry.path for entry in entries if entry.name.startswith(".") and os.path.isdir(entry))


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
    """The files and folders that are left out, by the ending of a format that is not read, or by LINKS, HIDDEN_FOLDERS
    and HIDDEN_IMAGES."""

    def __init__(self) -> None:
        super().__init__(list)

    @property
    def unread(self) -> str:
        """How many files there are of each format that is not read."""
        return ", ".join(f"{len(names):,} {ending}" for ending, names in sorted(self.items())
                         if ending in UNREAD_SUFFIXES)

    def remarks(self, folder: Path) -> list[str]:
        """Sentences about all of them, for the owner of the folder that they were found in."""
        named = [f"{folder}: {kind} are left out: {some(self[kind])}"
                 for kind in (LINKS, HIDDEN_FOLDERS, HIDDEN_IMAGES) if kind in self]
        if self.unread:
            named.append(f"{folder}: files of formats that are not read are left out: {self.unread} (convert them to "
                         "JPEG or PNG)")
        return named


def image_files(folder: Path, left_out: LeftOut) -> list[Path]:
    """The files with an image's ending in a class folder, and in folders within it as those of Tiny ImageNet, in the
    order of their names. What is hidden, links to folders, which may lead in a circle, and formats that are not read
    are added to `left_out`. Raises OSError for a folder that cannot be read."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=_raise):
        inside = []
        for name in sorted(folders):
            path = os.path.join(place, name)
            if name.startswith("."):
                left_out[HIDDEN_FOLDERS].append(path)
            elif os.path.islink(path):
                left_out[LINKS].append(path)
            else:
                inside.append(name)
        folders[:] = inside
        for name in sorted(names):
            ending = os.path.splitext(name)[1].lower()
            if _is_image(name):
                found.append(Path(place, name))
            elif ending in IMAGE_SUFFIXES:
                left_out[HIDDEN_IMAGES].append(os.path.join(place, name))
            elif ending in UNREAD_SUFFIXES and not name.startswith("."):
                left_out[ending].append(os.path.join(place, name))
    return found


def _images_beside(path: Path) -> int:
    """How many images lie in the folder itself."""
    with os.scandir(path) as entries:
        return sum(_is_image(entry.name) and not entry.is_dir() for entry in entries)


def _is_image(name: str) -> bool:
    """By its ending, and not hidden."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES and not name.startswith(".")


def _has_image(folder: Path) -> bool:
    """Whether `image_files` finds some; looks no further than the first."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            elif _is_image(entry.name):
                return True
    return any(map(_has_image, folders))


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
    if split != "train" and path.name == split and train.is_dir() and (of_training := class_folders(train)):
        path, folders = train, of_training  # none where the training images are in shards or records
    first = {nfc(name): name for name in reversed(folders) if _has_image(path / name)}  # of each name in any form
    return [(name, name) for name in folders if first.get(nfc(name)) == name]


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
    if hidden := hidden_folders(path):
        left_out[HIDDEN_FOLDERS] += hidden
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
    kinds = ", ".join(sorted(IMAGE_SUFFIXES))
    others = "".join(f"; {remark.removeprefix(f'{path}: ')}" for remark in remarks if "formats" in remark)
    return DataError(f"data path {path} has class folders but no image in them{others}; files ending in {kinds} are "
                     "looked for")


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
    return FileSource(path, files, labels, classes)


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
