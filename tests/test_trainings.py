"""The functions that the benchmarks of whole training runs share."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from train.command_line import read
from train.config import Config, configure
from train.presets import load_preset


@pytest.fixture
def trainings(benchmark_module):
    return benchmark_module("trainings")


@pytest.mark.parametrize("changes", [
    {}, {"epochs": 3, "warmup_epochs": 1.0}, {"epochs": 3, "warmup_epochs": 0.0, "learning_rate": 0.125},
    {"mirror": False, "nesterov": False, "zero_init_residual": True, "mean": (1.0, 2.0, 3.0)},
])
def test_options_make_the_configuration(trainings, changes):
    preset = load_preset("cifar10_resnet18")
    config = replace(preset, **changes)
    options = trainings.options_of(config)
    assert configure(read(Config, ["--config", preset.config, *options], command="train"), preset) == config
    assert ("--epochs" in options) == ("epochs" in changes)  # settings of the preset are not repeated


def test_lines_are_kept_until_they_would_be_others(trainings, tmp_path, monkeypatch):
    path, about = tmp_path / "results" / "x.jsonl", {"epochs": 3, "sizes": (1, 2)}
    monkeypatch.setattr(trainings, "git_commit", lambda: "abc")
    first = trainings.KeptLines(path, about)
    assert first.lines == []
    first.add({"seed": 1, "epoch": 1}, {"seed": 1, "epoch": 2})
    first.add({"seed": 2, "epoch": 1})
    again = trainings.KeptLines(path, about)
    assert again.lines == first.lines == [{"seed": 1, "epoch": 1}, {"seed": 1, "epoch": 2}, {"seed": 2, "epoch": 1}]
    assert trainings.KeptLines(path, {**about, "epochs": 4}).lines == []
    monkeypatch.setattr(trainings, "git_commit", lambda: "def")
    other = trainings.KeptLines(path, about)
    assert other.lines == [] and len(path.read_text().splitlines()) == 4  # kept until the first new line
    other.add({"seed": 9})
    first, line = map(json.loads, path.read_text().splitlines())
    assert (first["commit"], first["epochs"], first["sizes"], line) == ("def", 3, [1, 2], {"seed": 9})


def test_no_run_begins_after_the_end_or_a_fault(trainings, tmp_path, monkeypatch):
    now, kept = [0.0], trainings.KeptLines(tmp_path / "x.jsonl", {})
    monkeypatch.setattr(trainings.time, "monotonic", lambda: now[0])

    def run(seed):
        now[0] += 4
        if seed == 13:
            raise ValueError("unlucky")
        return {"seed": seed}

    with trainings.until(10, side_by_side=1) as start:
        assert not trainings.keep_all(kept, [start(run, seed) for seed in range(5)])
    assert kept.lines == [{"seed": 0}, {"seed": 1}, {"seed": 2}]
    now[0] = 0.0
    with trainings.until(100, side_by_side=1) as start:
        assert trainings.keep_all(kept, [start(run, 7)])
        with pytest.raises(ValueError, match="unlucky"):
            trainings.keep_all(kept, [start(run, seed) for seed in (13, *range(100))])
    assert len(kept.lines) < 20


@pytest.mark.long
def test_a_failed_run_is_told_with_its_last_words(trainings, tmp_path):
    from common.errors import UserError

    words = r"train --config cifar10_resnet18 .* ended with exit code 2: (.|\n)*nowhere does not exist"
    with pytest.raises(UserError, match=words):
        trainings.train(load_preset("cifar10_resnet18"), tmp_path / "nowhere", 1, tmp_path / "run")


@pytest.mark.parametrize("values, text", [([50.0], "50.0"), ([49.0, 51.0, 50.0], "50.0 +/- 1.0")])
def test_mean_and_deviation(trainings, values, text):
    assert trainings.mean_and_deviation(values) == text
