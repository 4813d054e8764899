"""Loads text as batches of words and their next words, so that language models can be trained like classifiers.

An example is one word; its class is the next word. A batch holds `steps` consecutive words of each of several
sequences, step by step: an array (steps * sequences, 1, 1, 1) of word numbers, shaped like images of one pixel. The
text is cut into sequences of equal length, one for each sequence of each process's batch. Each batch continues where
the previous batch ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.mxnet_compat import mx
from pipelines.errors import DataError
from pipelines.files import read_file
from pipelines.loader import Batch, Loader, LoaderConfig

UNKNOWN, END = "<unk>", "<eos>"  # a word outside the vocabulary, and the end of a line
ALIGNMENT = 8  # a vocabulary's size is a multiple of this, because GPU kernels require this of the number of classes

_SUCCESSORS = 8  # number of possible next words of each word in a generated text
_SENTENCE_WORDS = 12  # mean words per line of a generated text


def read_words(path: Path) -> list[str]:
    """Read the words of a text file, with END after each line that has words. Raises DataError."""
    try:
        # utf-8-sig drops the byte order mark that some editors put first.
        lines = read_file(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise DataError(f"cannot read the text {path} ({reason}): give --text a text file") from None
    return [word for line in lines if line.split() for word in (*line.split(), END)]


def generated_words(num_words: int, num_different: int, seed: int) -> tuple[list[str], float]:
    """Generate a text in which each word depends on the previous word; returns it with its lowest possible perplexity.

    Each word has a few successors, with probabilities in the ratio 1/2, 1/4 and so on. A line ends after any word with
    equal probability, and starts with any word. The lowest perplexity is exp(entropy of the next word); a language
    model can go below it only by chance.
    """
    rng = np.random.default_rng(seed)
    successors = np.stack([rng.choice(num_different, _SUCCESSORS, replace=False) for _ in range(num_different)])
    chances = 0.5 ** np.arange(1, _SUCCESSORS + 1)
    chances /= chances.sum()
    draws = rng.choice(_SUCCESSORS, num_words, p=chances)
    ends = rng.random(num_words) < 1 / _SENTENCE_WORDS
    begins = rng.integers(0, num_different, num_words)
    words: list[str] = []
    current = -1
    for end, draw, begin in zip(ends, draws, begins, strict=True):
        if end and current >= 0:
            current = -1
            words.append(END)
        else:
            current = int(begin if current < 0 else successors[current, draw])
            words.append(f"w{current}")
    end_share = 1 / _SENTENCE_WORDS
    within = -(chances * np.log(chances)).sum() * (1 - end_share)
    within -= end_share * np.log(end_share) + (1 - end_share) * np.log(1 - end_share)
    after_end = np.log(num_different)
    share_of_ends = words.count(END) / num_words
    return words, float(np.exp(share_of_ends * after_end + (1 - share_of_ends) * within))


def vocabulary(words: Iterable[str], most: int) -> list[str]:
    """UNKNOWN and the most frequent words, most frequent first, `most` in all; padded to a multiple of ALIGNMENT."""
    counts = Counter(words)
    counts.pop(UNKNOWN, None)  # some published texts contain it
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: most - 1]
    listed = [UNKNOWN, *frequent]
    return listed + [f"<none {number}>" for number in range(1, -len(listed) % ALIGNMENT + 1)]


def num_known(known: Sequence[str]) -> int:
    """The number of words in a vocabulary without padding entries. Only padding entries contain a space."""
    return sum(" " not in word for word in known)


def numbered(words: Sequence[str], known: Sequence[str]) -> np.ndarray:
    """The numbers of the words in a vocabulary, (len(words),) int32; 0 for unknown words."""
    places = {word: place for place, word in enumerate(known)}
    return np.fromiter((places.get(word, 0) for word in words), np.int32, len(words))


class TextLoader(Loader):
    """Loads batches of `steps` words of each of `batch_size / steps` sequences, in fp32.

    In training each epoch starts at a random offset below `steps` words, so that the windows differ.

    Args:
        config: `batch_size` is the number of words per process, a multiple of `steps`.
        tokens: (words,) int32, the numbers of the split's words.
        words: the vocabulary.
    """

    _way_out = "resume with the same text, sequences, steps, seed and number of processes"

    def __init__(self, config: LoaderConfig, shard: tuple[int, int], tokens: np.ndarray, words: Sequence[str],
                 steps: int) -> None:
        if config.batch_size % steps:
            raise DataError(f"a batch of {config.batch_size} words cannot be divided into sequences of {steps} steps: "
                            f"give a multiple of {steps}")
        self.steps, self._sequences = steps, config.batch_size // steps
        lines = self._sequences * shard[1]
        # The last word of a sequence needs a next word as its label; training skips up to `steps` words at the start.
        batches = (len(tokens) // lines - 1) // steps - (config.split == "train")
        if batches < 1:
            raise DataError(f"{config.data}: the split {config.split} has {len(tokens):,} words (the end of a line "
                            f"counts as one), too few for {lines} sequences of {steps} steps: give a longer text, "
                            "or fewer sequences or steps")
        super().__init__(config, shard, batches * lines * steps, [(word, word) for word in words])
        length = len(tokens) // lines
        own = slice(shard[0] * self._sequences, (shard[0] + 1) * self._sequences)
        self._tokens = tokens[: lines * length].reshape(lines, length)[own]

    def _identity(self) -> dict[str, Any]:
        return {"steps": self.steps, "sequences": self._sequences * self.shard[1]} | super()._identity()

    def _load(self) -> Batch:
        offset = 0
        if self.config.split == "train":
            offset = int(np.random.default_rng([self.config.seed, self.epoch]).integers(self.steps))
        start = offset + self.batch * self.steps
        window = self._tokens[:, start : start + self.steps + 1].T.astype(np.float32)  # (steps + 1, sequences)
        data, label = window[:-1].reshape(-1, 1, 1, 1), window[1:].ravel()
        context = self.config.context
        return Batch(mx.nd.array(data, context), mx.nd.array(label, context), len(label))

    def close(self) -> None:
        """Nothing to release."""
