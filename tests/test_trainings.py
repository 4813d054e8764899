"""What the benchmarks that train whole runs share."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from train.config import Config, configure, load_preset, read


@pytest.fixture
def trainings(benchmark_module):
    return benchmark_module("trainings")


@pytest.mark.parametrize("changes", [
    {}, {"epochs": 3, "warmup_epochs": 1.0}, {"epochs": 3, "warmup_epochs": 0.0, "learning_rate": 0.125},
    {"mirror": False, "nesterov": False, "zero_init_residual": True, "random_area": (0.25, 0.5)},
])
def test_options_make_the_configuration(trainings, changes):
    preset = load_preset("cifar10_resnet18")
    config = replace(preset, **changes)
    options = trainings.options_of(config)
    assert configure(read(Config, ["--config", preset.config, *options], command="train"), preset) == config
    assert ("--epochs" in options) == ("epochs" in changes)  # what the preset has is not repeated


def test_lines_are_kept_until_they_would_be_others(trainings, tmp_path):
    path, about = tmp_path / "results" / "x.jsonl", {"commit": "abc", "epochs": 3, "sizes": (1, 2)}
    first = trainings.KeptLines(path, about)
    assert first.lines == []
    first.add({"seed": 1, "epoch": 1}, {"seed": 1, "epoch": 2})
    first.add({"seed": 2, "epoch": 1})
    again = trainings.KeptLines(path, about)
    assert again.lines == first.lines == [{"seed": 1, "epoch": 1}, {"seed": 1, "epoch": 2}, {"seed": 2, "epoch": 1}]
    other = trainings.KeptLines(path, {**about, "commit": "def"})
    assert other.lines == [] and len(path.read_text().splitlines()) == 4  # gone only when the first new one comes
    other.add({"seed": 9})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"commit": "def", "epochs": 3, "sizes": [1, 2]}, {"seed": 9}]


def test_a_failed_run_is_told_with_its_last_words(trainings, tmp_path):
    from common.errors import UserError

    words = r"train --config cifar10_resnet18 .* ended with exit code 2: (.|\n)*nowhere does not exist"
    with pytest.raises(UserError, match=words):
        trainings.train(load_preset("cifar10_resnet18"), tmp_path / "nowhere", 1, tmp_path / "run")


@pytest.mark.parametrize("values, text", [([50.0], "50.0"), ([49.0, 51.0, 50.0], "50.0 +/- 1.0")])
def test_mean_and_deviation(trainings, values, text):
    assert trainings.mean_and_deviation(values) == text
