"""Which class of a network each class of a data set is: found by name, whatever numbers the two count them with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from pipelines.sources import Classes
from train.errors import TrainError

T = TypeVar("T")


class Match(NamedTuple):
    labels: list[int]  # of each class of the data: its number in the network
    note: str  # what the user should know about it; "" where the two count alike


def match(
    data: str, found: Classes, known: Classes, whose: str, is_whole: bool,
    met: Callable[[], Iterable[int]] | None = None,
) -> Match:
    """The network's numbers of a data set's classes.

    Folders and synsets come before names to show, of which two classes may have the same one. Names that are all
    numbers are numbers: folders 0, 1, 10, 2 are the classes 0, 1, 10 and 2 of a .rec file. Where one side alone has
    nothing but numbers, these are taken for the class numbers of the other.

    Args:
        data: the data path, for messages.
        found: the data's classes.
        known: the network's.
        whose: what has these, for messages: 'the network of runs/NAME'.
        is_whole: the data must have all of them.
        met: the numbers of those of `found` that images have, asked for where the network does not know one; None: all.
            A class that no image has may be unknown, and its number is then -1.

    Raises:
        TrainError: the data has a class that the network does not know, or lacks one that it must have.
    """
    labels, note = _by_number(data, found, known, whose)
    if labels is None:
        labels = _by_name(found, known)
    if -1 in labels and (unknown := [label for label in (met() if met else range(len(found))) if labels[label] < 0]):
        if note and len(found) > len(known):
            raise TrainError(f"{data} has {len(found)} classes and {whose} has {len(known)}: give data of these, or "
                             "train on those that it has")
        raise TrainError(f"the class {found[min(unknown)][1]!r} of {data} is none of the {len(known)} classes of "
                         f"{whose} ({some(known)}): give data of these classes, or train on those that it has")
    missing = [name for label, (_, name) in enumerate(known) if label not in labels and name != str(label)]
    if note or (missing and _is_numbered(found)):
        return Match(labels, note)
    if missing and is_whole:
        raise TrainError(f"{data} has no class {missing[0]!r}, one of the {len(known)} of {whose}: give data of all of "
                         "them")
    if missing:
        note = f"{data} has {len(found)} of the {len(known)} classes of {whose}"
    elif labels != list(range(len(found))):
        note = f"the classes of {data} are in another order than those of {whose}: they are told apart by their names"
    return Match(labels, note)


def _by_number(data: str, found: Classes, known: Classes, whose: str) -> tuple[list[int] | None, str]:
    """The network's numbers, -1 for one that it has not, where classes are numbers on a side; and what is to be said
    where they are on one alone."""
    of_found, of_known = _numbers(found), _numbers(known)
    sides = ((data, found), (whose, known))
    places = [place for place, classes in sides if _numbers(classes, names_alone=True)]
    if of_found and of_known:
        note = ""
    elif places:
        of_found, of_known = of_found or list(range(len(found))), of_known or list(range(len(known)))
        note = f"{places[0]} has no names of classes: the class numbers of {data} are taken for those of {whose}"
    else:
        return None, ""
    label_of = _first_real(known, of_known)
    return [label_of.get(number, -1) for number in of_found], note


def padded(classes: Classes, count: int) -> Classes:
    """So many classes: these, and numbers for the names of those that no image shows."""
    return [*classes, *((str(label), str(label)) for label in range(len(classes), count))]


def _names(classes: Classes) -> list[str]:
    return [name for _, name in classes]


def _numbers(classes: Classes, names_alone: bool = False) -> list[int] | None:
    """The classes as numbers, where all of their folders are numbers, or all names to show; else None."""
    for texts in ([] if names_alone else [[key for key, _ in classes]]) + [_names(classes)]:
        if all(text.isascii() and text.isdecimal() for text in texts):
            numbers = [int(text) for text in texts]
            real = [number for label, number in enumerate(numbers) if texts[label] != str(label)]
            if len(set(real)) == len(real) and len(set(numbers)) == len(set(texts)):  # not 1 and 01
                return numbers
    return None


def _first_real(classes: Classes, names: Sequence[T]) -> dict[T, int]:
    """The class of each name. Where a class that no image shows, whose name is its number, has the name of another, it
    is that one's."""
    order = sorted(range(len(classes)), key=lambda label: classes[label][1] != str(label))
    return {names[label]: label for label in order}


def _is_numbered(classes: Classes) -> bool:
    """Whether the names are nothing but the numbers that the classes have: nobody gave any."""
    return all(name == str(label) for label, (_, name) in enumerate(classes))


def display_names(classes: Classes) -> list[str]:
    """What to call the classes before people: in characters that every font, file and terminal takes, each different.

    A class whose name another one has too is told by its folder or synset beside it, or else by its number.
    """
    names = [printable(name) or f"class {label}" for label, (_, name) in enumerate(classes)]
    times = Counter(names)
    names = [f"{name} ({printable(key)})" if times[name] > 1 else name
             for name, (key, _) in zip(names, classes, strict=True)]
    times = Counter(names)
    return [f"{name} (class {label})" if times[name] > 1 else name for label, name in enumerate(names)]


def printable(name: str) -> str:
    """On one line, without control characters and bytes that are no text (Python has these in names of folders)."""
    text = name.encode("utf-8", "replace").decode()
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def numbers_by_name(found: Classes, known: Classes) -> list[int] | None:
    """The number of each class among those that are known; None where one is not, or where nobody gave them names."""
    number = _number_of(known)
    labels = [number.get(key, number.get(name, -1)) for key, name in found]
    return None if _is_numbered(found) or _is_numbered(known) or -1 in labels else labels


def _number_of(known: Classes) -> dict[str, int]:
    """By their folders or synsets, and by the names to show that only one of them has."""
    times = Counter(_names(known))
    number = {name: label for label, (_, name) in enumerate(known) if times[name] == 1}
    return number | _first_real(known, [key for key, _ in known])


def _by_name(found: Classes, known: Classes) -> list[int]:
    """The network's numbers of the classes; -1 for one that it has not."""
    number = _number_of(known)
    is_alike = _names(found) == _names(known)
    labels = []
    for label, (key, name) in enumerate(found):
        # Where two classes share a name, the others tell; a number is the name of a class that no image shows.
        as_it_is = label if is_alike or (name == str(label) and label < len(known)) else -1
        labels.append(number.get(key, number.get(name, as_it_is)))
    return labels


def some(classes: Classes) -> str:
    """Names of the first classes and the last, for a sentence."""
    names = [repr(name) for name in _names(classes)]
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"... {names[-1]}"])
