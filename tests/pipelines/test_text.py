"""Text as batches: words and their numbers, windows, shards, and errors."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from pipelines import DataError, LoaderConfig
from pipelines.text import END, UNKNOWN, TextLoader, generated_words, num_known, numbered, read_words, vocabulary

STEPS = 5


def loader(tokens: np.ndarray, sequences: int = 3, split: str = "train", shard: tuple[int, int] = (0, 1),
           seed: int = 0) -> TextLoader:
    config = LoaderConfig(data="text", split=split, batch_size=sequences * STEPS, seed=seed)
    return TextLoader(config, shard, tokens, ["word"] * 8, STEPS)


def windows(batches: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """(sequences, STEPS + 1) of each batch: its words, and the label of the last one."""
    found = []
    for data, label in batches:
        data, label = data.reshape(STEPS, -1), label.reshape(STEPS, -1)
        assert np.array_equal(data[1:], label[:-1]), "the answer to a word is the next one"
        found.append(np.concatenate([data, label[-1:]]).T)
    return found


def epoch(source: TextLoader) -> list[np.ndarray]:
    return windows([(batch.data.asnumpy(), batch.label.asnumpy()) for batch in source])


def test_words_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the cat  sat\n\n on the\tmat \n")
    words = read_words(path)
    assert words == ["the", "cat", "sat", END, "on", "the", "mat", END]
    known = vocabulary(words, 4)
    assert known[:4] == [UNKNOWN, END, "the", "cat"] and len(known) == 8
    assert num_known(known) == 4, "without what it is filled up with"
    assert numbered(words, known).tolist() == [2, 3, 0, 1, 0, 2, 0, 1]


@pytest.mark.parametrize("content, reason", [(None, "No such file"), (b"\xff\xfe\xff", "not UTF-8")])
def test_no_text(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "text.txt"
    if content:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"cannot read the text .*{reason}"):
        read_words(path)


def test_batches_go_on_where_the_one_before_has_ended() -> None:
    """Validation covers every word except a rest that fills no batch; training starts at another offset in each
    epoch."""
    tokens = np.arange(100)
    length = 100 // 3
    val = epoch(loader(tokens, split="val"))
    together = np.concatenate([window[:, :-1] for window in val], axis=1)
    assert np.array_equal(together, np.arange(3)[:, None] * length + np.arange(6 * STEPS)) and len(val) == 6
    train = loader(tokens)
    assert train.num_images == 5 * 3 * STEPS
    starts = set()
    for _ in range(20):
        together = np.concatenate([window[:, :-1] for window in epoch(train)], axis=1)
        start = int(together[0, 0])
        assert np.array_equal(together, np.arange(3)[:, None] * length + start + np.arange(5 * STEPS))
        starts.add(start)
    assert starts == set(range(STEPS))


def test_shards_and_positions() -> None:
    """Two processes load the batches of one process with twice as many sequences; a restored position gives an equal
    batch."""
    tokens = np.arange(1000)
    whole = epoch(loader(tokens, sequences=6))
    parts = [epoch(loader(tokens, sequences=3, shard=(rank, 2))) for rank in range(2)]
    for window, first, second in zip(whole, *parts, strict=True):
        assert np.array_equal(window, np.concatenate([first, second]))
    train = loader(tokens)
    batches = iter(train)
    for _ in range(3):
        next(batches)
    state, expected = train.state(), next(batches).data.asnumpy()
    again = loader(tokens)
    again.restore(state)
    assert np.array_equal(next(iter(again)).data.asnumpy(), expected)
    with pytest.raises(DataError, match="belongs to sequences 3, but this loader has 6; resume with the same text, "):
        loader(tokens, shard=(0, 2)).restore(state)


def test_what_is_too_short() -> None:
    with pytest.raises(DataError, match="train has 20 words .*, too few for 3 sequences of 5 steps"):
        loader(np.arange(20))
    with pytest.raises(DataError, match="a batch of 7 words cannot be divided into sequences of 5 steps"):
        TextLoader(LoaderConfig(data="text", batch_size=7), (0, 1), np.arange(100), [], STEPS)


def test_generated_text_has_the_perplexity_that_it_says(seed: int) -> None:
    """A bigram model counts the text itself. With so few words it is as good as the true model; its perplexity is a
    little lower, because it also fits the text's random deviations."""
    words, floor = generated_words(100_000, 20, seed)
    again, _ = generated_words(100_000, 20, seed)
    assert words == again and len(set(words)) == 21
    follow: dict[str, Counter[str]] = defaultdict(Counter)
    for word, following in itertools.pairwise(words):
        follow[word][following] += 1
    cost = -sum(count * math.log(count / counts.total()) for counts in follow.values() for count in counts.values())
    # The ratio has a standard deviation of 0.0028 (150 seeds).
    assert 0.985 < math.exp(cost / (len(words) - 1)) / floor < 1.015
