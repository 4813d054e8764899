"""Maps the classes of a data set to a network's classes by name, because the class numbers may differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple, TypeVar

from pipelines.sources import Classes
from pipelines.sources.base import nfc
from train.errors import TrainError

T = TypeVar("T")


class Match(NamedTuple):
    labels: list[int]  # index: class of the data; value: its index in the network
    note: str  # note for the user; "" if data and network number the classes alike


def match(
    data: str, found: Classes, known: Classes, whose: str, is_whole: bool,
    met: Callable[[], Iterable[int]] | None = None, place: str = "", first_labels: tuple[int, int] = (0, 0),
) -> Match:
    """Map a data set's classes to the network's class indices.

    Folders and synsets are compared before display names, because two classes may have the same display name. Names
    that are all numbers count as numbers: folders 0, 1, 10, 2 are the classes 0, 1, 10 and 2 of a .rec file. If only
    one side consists of numbers, these numbers are taken as class indices of the other side.

    Args:
        data: the data path, for messages.
        found: the data's classes.
        known: the network's classes.
        whose: the owner of `known`, for messages: 'the network of runs/NAME'.
        is_whole: whether the data must have all classes of the network.
        met: returns the indices in `found` of classes that have images. Called only if the network lacks a class, or if
            numbers may count from 0 or from 1. None: all classes have images. The network may lack a class without
            images, which then maps to -1.
        place: the file or folder of the split, for messages; "": the data path.
        first_labels: the stored labels of the first class in the data and in the network; see TFRecordSource.

    Raises:
        TrainError: the network lacks a class of the data, or the data lacks a class that it must have.
    """
    by_number = _by_number(place or data, found, known, whose, met or (lambda: range(len(found))), first_labels)
    labels, note, has_names = by_number or (_by_name(found, known), "", True)
    if -1 in labels and (unknown := [label for label in (met() if met else range(len(found))) if labels[label] < 0]):
        if not has_names and len(found) > len(known):
            raise TrainError(f"{data} has {len(found)} classes and {whose} has {len(known)}: give data of these "
                             "classes, or train on this data")
        raise TrainError(f"the class {found[min(unknown)][1]!r} of {data} is none of the {len(known)} classes of "
                         f"{whose} ({some(known)}): give data of these classes, or train on this data")
    missing = [name for label, (_, name) in enumerate(known) if label not in labels and name != str(label)]
    if not has_names or (missing and is_numbered(found)):
        return Match(labels, note)
    if missing and is_whole:
        raise TrainError(f"{data} has no class {missing[0]!r}, which {whose} has: give data with images of all "
                         f"{len(known)} classes")
    if note:
        return Match(labels, note)
    if missing:
        note = f"{data} has {len(found)} of the {len(known)} classes of {whose}"
    elif labels != list(range(len(found))):
        note = f"the classes of {data} are in another order than those of {whose}: they are told apart by their names"
    return Match(labels, note)


class _ByNumber(NamedTuple):
    labels: list[int]  # -1 for a class that the network lacks
    note: str
    has_names: bool  # whether both sides have names, even if the names are numbers


def _by_number(place: str, found: Classes, known: Classes, whose: str, met: Callable[[], Iterable[int]],
               first_labels: tuple[int, int]) -> _ByNumber | None:
    """Match classes whose names are numbers on at least one side; None if both sides have other names."""
    numbers = _numbers(found), _numbers(known)
    unnamed = [owner for owner, classes in ((place, found), (whose, known)) if _numbers(classes, names_alone=True)]
    has_names = all(numbers)
    if not has_names and not unnamed:
        return None
    sides = list(zip(numbers, (found, known), strict=True))
    is_counted = [not own or is_numbered(classes) for own, classes in sides]
    of_found, of_known = (own or list(range(len(classes))) for own, classes in sides)
    note = f"the class numbers of {place} are taken for those of {whose}"
    if is_counted[0] != is_counted[1] and 0 not in (of_known if is_counted[0] else of_found):
        first = first_labels[is_counted[1]] or (
            _first_counted({of_found[label] for label in met()}, of_known) if is_counted[0] else
            _first_counted_by_network(of_found, len(known)))
        if first is None:
            named, owner, other = (known, whose, place) if is_counted[0] else (found, place, whose)
            raise TrainError(f"the classes of {owner} are called {some(named)}, and the classes of {other} are "
                             "numbered from 0, so '1' may be the number 1 or the first class: list all classes of "
                             f"{place} in a classes.txt beside its images, the class with number 0 first")
        of_found, of_known = ([number + first * is_one for number in own]
                              for own, is_one in zip((of_found, of_known), is_counted, strict=True))
    elif has_names:
        note = ""
    if not has_names:
        note = f"{unnamed[0]} has no names of classes: {note}"
    label_of = _first_real(known, of_known)
    labels = [label_of.get(number, -1) for number in of_found]
    return _ByNumber(labels, note and note + _pairs(found, known, labels, first_labels), has_names)


def _first_counted(counted: Set[int], folders: Sequence[int]) -> int | None:
    """The position in `folders` (numbers without 0) of the data's class 0: 0 if the numbers are equal on both sides, 1
    if folder 1 is class 0. None if both are possible.

    Args:
        counted: the numbers of the classes that have images.
    """
    is_equal = counted <= set(folders)
    is_from_1 = list(folders) == list(range(1, len(folders) + 1)) and max(counted, default=0) < len(folders)
    return None if is_equal and is_from_1 else int(is_from_1)


def _first_counted_by_network(folders: Sequence[int], count: int) -> int | None:
    """Like `_first_counted`, for a network that counts its `count` classes from 0, and for data with the folders
    `folders`.
    """
    is_equal = max(folders) < count
    is_from_1 = max(folders) == count or sorted(folders) == list(range(1, len(folders) + 1))
    return None if is_equal and is_from_1 else int(is_from_1)


def _pairs(found: Classes, known: Classes, labels: Sequence[int], first_labels: tuple[int, int]) -> str:
    """The end of a note: examples of classes of the data with their classes of the network, and the advice for a wrong
    mapping.
    """
    shown, of_network = (
        [str(number + first) for number in range(len(classes))] if is_numbered(classes) else _names(classes)
        for classes, first in zip((found, known), first_labels, strict=True))
    pairs = [f"{name} = {of_network[label]}" for name, label in zip(shown, labels, strict=True) if label >= 0]
    return (f", {', '.join(pairs if len(pairs) <= 4 else [*pairs[:3], '...', pairs[-1]])} (if that is wrong, list the "
            "classes in the order of their numbers in a classes.txt beside the images)")


def padded(classes: Classes, count: int) -> Classes:
    """The list of classes, extended to `count` entries. A class without images is named by its index."""
    return [*classes, *((str(label), str(label)) for label in range(len(classes), count))]


def _names(classes: Classes) -> list[str]:
    return [name for _, name in classes]


def _numbers(classes: Classes, names_alone: bool = False) -> list[int] | None:
    """The classes as numbers, if all folders are numbers or all display names are numbers; otherwise None."""
    for texts in ([] if names_alone else [[key for key, _ in classes]]) + [_names(classes)]:
        if all(text.isascii() and text.isdecimal() for text in texts):
            numbers = [int(text) for text in texts]
            real = [number for label, number in enumerate(numbers) if texts[label] != str(label)]
            # rejects lists that contain both 1 and 01
            if len(set(real)) == len(real) and len(set(numbers)) == len(set(texts)):
                return numbers
    return None


def _first_real(classes: Classes, names: Sequence[T]) -> dict[T, int]:
    """Name -> class index. A class without images is named by its index. If the name of another class is equal to this
    index, the name belongs to the other class.
    """
    order = sorted(range(len(classes)), key=lambda label: classes[label][1] != str(label))
    return {names[label]: label for label in order}


def is_numbered(classes: Classes) -> bool:
    """Whether the classes are unnamed: each name is only the class's own index."""
    return all(name == str(label) for label, (_, name) in enumerate(classes))


def display_names(classes: Classes) -> list[str]:
    """Unique display names of the classes, in characters that every font, file and terminal can show.

    If two classes share a name, each is shown with its folder or synset, or else with its index.
    """
    names = [printable(name) or f"class {label}" for label, (_, name) in enumerate(classes)]
    times = Counter(names)
    names = [f"{name} ({printable(key)})" if times[name] > 1 else name
             for name, (key, _) in zip(names, classes, strict=True)]
    times = Counter(names)
    return [f"{name} (class {label})" if times[name] > 1 else name for label, name in enumerate(names)]


def printable(name: str) -> str:
    """The name on one line, without control characters and bytes that are not text (Python keeps them in file
    names)."""
    text = name.encode("utf-8", "replace").decode()
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def numbers_by_name(found: Classes, known: Classes) -> list[int] | None:
    """The index of each class in `known`, by name; None if a class is missing in `known`, or if the classes are
    unnamed.
    """
    number = _number_of(known)
    labels = [number.get(nfc(key), number.get(nfc(name), -1)) for key, name in found]
    return None if is_numbered(found) or is_numbered(known) or -1 in labels else labels


def _number_of(known: Classes) -> dict[str, int]:
    """Name -> class index: all folders and synsets, and the display names that belong to a single class."""
    names = [nfc(name) for name in _names(known)]
    times = Counter(names)
    number = {name: label for label, name in enumerate(names) if times[name] == 1}
    return number | _first_real(known, [nfc(key) for key, _ in known])


def _by_name(found: Classes, known: Classes) -> list[int]:
    """The network's index of each class; -1 for a class that the network lacks."""
    number = _number_of(known)
    is_alike = _names(found) == _names(known)
    labels = []
    for label, (key, name) in enumerate(found):
        # If two classes share a name, their other names decide. A number is the name of a class without images.
        as_it_is = label if is_alike or (name == str(label) and label < len(known)) else -1
        labels.append(number.get(nfc(key), number.get(nfc(name), as_it_is)))
    return labels


def some(classes: Classes) -> str:
    """The names of the first classes and of the last class, for a message."""
    names = [repr(name) for name in _names(classes)]
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"... {names[-1]}"])
