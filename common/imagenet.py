"""The 1,000 classes of ImageNet (ILSVRC2012): WordNet ids, in whose order networks count them, and words for them.

The words are torchvision's (`torchvision.models._meta`), of which no two are alike: the first ones of each synset in
WordNet, but for two that another class has too: crane bird, maillot tank suit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

_FILE = Path(__file__).with_name("imagenet_classes.txt")


@functools.cache
def classes() -> tuple[tuple[str, str], ...]:
    """WordNet id and words of each class, in the order of their numbers."""
    id_and_words = (line.split("\t") for line in _FILE.read_text("utf-8").splitlines())
    return tuple((wordnet_id, words) for wordnet_id, words in id_and_words)


def in_words(found: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Classes as (folder or synset, name to show), the name in words where it was the folder's, a WordNet id of
    ImageNet."""
    words = dict(classes())
    return [(key, words.get(key, name) if name == key else name) for key, name in found]
