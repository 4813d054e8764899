"""Determines from the name of a folder or file to which split it belongs. Only this module decides that.

A name says a split if one of its words does: `Train`, `seg_train`, `train_images`, `valid-2`, `val2017`. Words are
separated by anything that is not a letter, or begin with a capital behind a small letter (`TrainImages`, `trainA`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

SPLITS = ("train", "val")  # the splits that are read, and the usual names of their folders
_SPLIT_OF = {
    "train": "train", "training": "train", "trainset": "train",
    "val": "val", "valid": "val", "validation": "val", "valset": "val", "dev": "val",
    "eval": "val", "evaluation": "val",
    "test": "test", "testing": "test", "testset": "test",
}  # fmt: skip
# Folders of these words accompany images and are not a class beside splits.
_COMPANIONS = frozenset({
    "label", "labels", "annotation", "annotations", "annot", "mask", "masks", "segmentation", "segmentations", "bbox",
    "bboxes", "meta", "metadata", "pred", "preds", "prediction", "predictions",
})  # fmt: skip


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.split(r"[\W\d_]+|(?<=[a-z])(?=[A-Z])", name) if word]


def splits_in(name: str) -> set[str]:
    """The subset of "train", "val" and "test" that the words of a name say."""
    return {_SPLIT_OF[word] for word in _words(name) if word in _SPLIT_OF}


def split_of(name: str) -> str:
    """The one split that a name says, "train", "val" or "test"; "" if it says none, or several."""
    said = splits_in(name)
    return said.pop() if len(said) == 1 and not is_companion(name) else ""


def is_whole(name: str) -> bool:
    """Whether the name is only a split's word, perhaps with a number: `Training` and `val2017` are, `seg_train` is not.
    """
    words = _words(name)
    return len(words) == 1 and words[0] in _SPLIT_OF


def is_companion(name: str) -> bool:
    """Whether a folder with this name holds data about the images, such as masks."""
    return not _COMPANIONS.isdisjoint(_words(name))


def by_split(names: Iterable[str]) -> dict[str, list[str]]:
    """The names that say "train" and "val", by split. The split's own name, `train` or `val`, goes before all others.
    """
    names = list(names)
    found = {split: [split] if split in names else [name for name in names if split_of(name) == split]
             for split in SPLITS}
    return {split: those for split, those in found.items() if those}
