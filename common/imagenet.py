"""The 1,000 classes of ImageNet (ILSVRC2012): their WordNet ids, in class-index order, and readable names.

The names are torchvision's (`torchvision.models._meta`). Each is the first word of the class's WordNet synset. Two
classes share their first word with another class, and are called crane bird and maillot tank suit, so all names differ.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

_FILE = Path(__file__).with_name("imagenet_classes.txt")


@functools.cache
def classes() -> tuple[tuple[str, str], ...]:
    """(WordNet id, readable name) of each class, in class-index order."""
    id_and_words = (line.split("\t") for line in _FILE.read_text("utf-8").splitlines())
    return tuple((wordnet_id, words) for wordnet_id, words in id_and_words)


def in_words(found: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Replace each name that is only a WordNet id by a readable name. Classes are pairs (folder or synset, name to
    show).
    """
    words = dict(classes())
    return [(key, words.get(key, name) if name == key else name) for key, name in found]
