"""Which class of a network each class of a data set is: found by name, whatever numbers the two count them with."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from pipelines.sources import Classes
from train.errors import TrainError


class Match(NamedTuple):
    labels: list[int]  # of each class of the data: its number in the network
    note: str  # what the user should know about it; "" where the two count alike


def match(data: str, found: Classes, known: Classes, whose: str, is_whole: bool) -> Match:
    """The network's numbers of a data set's classes.

    Folders and synsets come before names to show, of which two classes may have the same one. Where one side has
    nothing but numbers, these are taken as they are.

    Args:
        data: the data path, for messages.
        found: the data's classes.
        known: the network's.
        whose: what has these, for messages: 'the network of runs/NAME'.
        is_whole: the data must have all of them.

    Raises:
        TrainError: the data has a class that the network does not know, or lacks one that it must have.
    """
    as_they_are = list(range(len(found)))
    if nameless := [place for place, classes in ((data, found), (whose, known)) if _is_numbered(classes)]:
        if len(found) > len(known):
            raise TrainError(f"{data} has {len(found)} classes and {whose} has {len(known)}: give data of these, or "
                             "train on those that it has")
        note = f"{nameless[0]} has no names of classes: the class numbers of {data} are taken for those of {whose}"
        return Match(as_they_are, note if len(nameless) == 1 else "")
    labels = _by_name(data, found, known, whose)
    missing = [name for label, (_, name) in enumerate(known) if label not in labels and name != str(label)]
    if missing and is_whole:
        raise TrainError(f"{data} has no class {missing[0]!r}, one of the {len(known)} of {whose}: give data of all of "
                         "them")
    note = ""
    if missing:
        note = f"{data} has {len(found)} of the {len(known)} classes of {whose}"
    elif labels != as_they_are:
        note = f"the classes of {data} are in another order than those of {whose}: they are told apart by their names"
    return Match(labels, note)


def padded(classes: Classes, count: int) -> Classes:
    """So many classes: these, and numbers for the names of those that no image shows."""
    return [*classes, *((str(label), str(label)) for label in range(len(classes), count))]


def _names(classes: Classes) -> list[str]:
    return [name for _, name in classes]


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
    return number | {key: label for label, (key, _) in enumerate(known)}


def _by_name(data: str, found: Classes, known: Classes, whose: str) -> list[int]:
    number = _number_of(known)
    is_alike = _names(found) == _names(known)
    labels = []
    for label, (key, name) in enumerate(found):
        # Where two classes share a name, the others tell; a number is the name of a class that no image shows.
        as_it_is = label if is_alike or (name == str(label) and label < len(known)) else None
        if (its_number := number.get(key, number.get(name, as_it_is))) is None:
            raise TrainError(f"the class {name!r} of {data} is none of the {len(known)} classes of {whose} "
                             f"({some(known)}): give data of these classes, or train on those that it has")
        labels.append(its_number)
    return labels


def some(classes: Classes) -> str:
    """Names of the first classes and the last, for a sentence."""
    names = [repr(name) for name in _names(classes)]
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"... {names[-1]}"])
