"""benchmarks/long_tail.py: the images that it gives to its runs, and the results that it computes."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from pipelines.sources import open_source


@pytest.fixture
def benchmark(benchmark_module):
    return benchmark_module("long_tail")


def test_sizes_fall_by_the_same_factor(benchmark):
    """The sizes are those of CIFAR-10-LT with an imbalance of 100."""
    assert benchmark.class_sizes(5000, 100, 10) == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]


def test_images_are_sampled_by_the_seed(benchmark, tmp_path, rng):
    for split, label, i in itertools.product(("train", "val"), "abc", range(9)):
        path = tmp_path / "data" / split / label / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3)).astype(np.uint8)).save(path)
    arguments = benchmark.Options(largest=8, imbalance=4, val_images=3, seeds=2)
    sources = [open_source(tmp_path / "data", split) for split in ("train", "val")]
    benchmark.write_data(arguments, *sources, tmp_path / "x")
    chosen = []
    for seed in "12":
        train, val = (open_source(tmp_path / "x" / seed, split) for split in ("train", "val"))
        assert Counter(train.label(i) for i in range(len(train))) == {0: 8, 1: 4, 2: 2}
        assert Counter(val.label(i) for i in range(len(val))) == {0: 3, 1: 3, 2: 3}
        chosen.append({train.read(i).tobytes() for i in range(len(train))})
    assert chosen[0] != chosen[1]


def test_what_is_published(benchmark, tmp_path):
    lines = [{"balance": balance, "seed": seed, "balanced_accuracy": 0.5 + 0.01 * seed + 0.1 * balance, "rare": 0.1}
             for balance in benchmark.BALANCES for seed in (1, 2, 3)]
    benchmark.publish(lines, tmp_path)
    result = json.loads((tmp_path / "long_tail_1gpu.json").read_text())
    assert result["step_ms"] == pytest.approx([61, 62, 63]) and result["unit"] == "balanced accuracy %"
    assert result["peer"]["value"] == pytest.approx(52)
    assert "| 0.5 | 57.0 +/- 1.0 | 10.0 +/- 0.0 |" in benchmark.table(lines).splitlines()
    benchmark.publish(lines[::3], tmp_path / "few")  # one seed: no figure
    assert not (tmp_path / "few" / "long_tail_1gpu.json").exists()


def test_it_goes_on_where_it_stopped(benchmark, tmp_path, monkeypatch):
    kept = benchmark.KeptLines(tmp_path / "x.jsonl", {})
    trained = []

    def train_once(arguments, balance, seed, folder):
        trained.append((balance, seed))
        return {"balance": balance, "seed": seed}

    monkeypatch.setattr(benchmark, "train_once", train_once)
    monkeypatch.setattr(benchmark, "open_source", lambda data, split: None)
    monkeypatch.setattr(benchmark, "write_data", lambda *arguments: None)
    assert benchmark.measure(kept, benchmark.Options(seeds=1, side_by_side=1))
    assert trained == [(balance, 1) for balance in benchmark.BALANCES]
    assert benchmark.measure(kept, benchmark.Options(seeds=2, side_by_side=1))
    assert trained[3:] == [(balance, 2) for balance in benchmark.BALANCES]
