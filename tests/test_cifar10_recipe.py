"""The runs that benchmarks/cifar10_recipe.py trains, keeps and publishes."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_results import faults

from common.errors import UserError
from train.config import check
from train.presets import load_preset

PRESET = load_preset("cifar10_strong")


@pytest.fixture
def benchmark(benchmark_module):
    return benchmark_module("cifar10_recipe")


@pytest.fixture
def program(benchmark, tmp_path, monkeypatch):
    """Run the program with fake trainings; returns the runs that it started, by their settings."""
    monkeypatch.setenv("PEER_PYTHON", sys.executable)
    monkeypatch.chdir(tmp_path)
    started = []

    def validations(program, seed):
        top1s = {"ours": (0.5, 0.9), "pytorch": (0.4, 0.8)}[program]
        return [{"program": program, "seed": seed, "epoch": epoch, "seconds": 10.0 * epoch + seed, "top1": top1,
                 "train_loss": 1.0, "startup_seconds": 3.0} for epoch, top1 in enumerate(top1s, 1)]

    class Peer:
        def __init__(self, constants, script):
            assert constants["stochastic_depth"] == PRESET.stochastic_depth and script.name == "peer_recipe.py"

        def wait(self):
            return "PyTorch 9"

        def run(self, seed):
            started.append(("pytorch", seed))
            yield from validations("pytorch", seed)

        def say(self, line):
            assert line == "loader"

        def answer(self):
            return json.dumps({"images_per_sec": 1000.0})

        def close(self): ...

    def run_ours(config, data, seed, folder):
        if seed:  # without a seed, the run only fills caches
            started.append(("ours", seed))
            yield from validations("ours", seed)

    def train(config, data, seed, run):
        names = [name for name, variant in benchmark.variants(PRESET, 10).items()
                 if replace(variant, validate_every=1) == replace(config, validate_every=1)]
        started.append((*names, seed))
        run.mkdir()
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (
            {"event": "epoch", "val_top1": None}, {"event": "epoch", "val_top1": 0.9 - 0.01 * (names != ["nothing"])},
            {"event": "steps"})))

    arrays = {"train_labels": np.arange(10).repeat(500), "val_labels": np.arange(10)}
    for name, fake in {"Peer": Peer, "run_ours": run_ours, "train": train, "decoded": lambda _: arrays}.items():
        monkeypatch.setattr(benchmark, name, fake)
    data = tmp_path / "data" / "train"
    for label in "abcdefghij":
        (data / label).mkdir(parents=True)
        (data / label / "0.jpg").touch()

    def run(*options):
        started.clear()
        monkeypatch.setattr(sys, "argv", [str(Path(benchmark.__file__)), "--data", "data", "--results", "results",
                                          "--side-by-side", "1", *options])
        benchmark.main()
        return list(started)

    return run


def test_each_variant_leaves_one_ingredient_out(benchmark):
    found = benchmark.variants(PRESET, 10)
    assert list(found) == [benchmark.NONE_LEFT_OUT, *benchmark.INGREDIENTS, benchmark.ALL, benchmark.BCE]
    assert found.pop(benchmark.NONE_LEFT_OUT) == PRESET  # fails if any ingredient is missing
    for name, config in found.items():
        check(config)
        differing = {field.name for field in dataclasses.fields(config)
                     if getattr(config, field.name) != getattr(PRESET, field.name)}
        if name in benchmark.INGREDIENTS:
            assert differing == benchmark.INGREDIENTS[name].keys()
    assert len(differing) == 4  # BCE: loss, smoothing, and what follows its smaller gradients
    without = replace(PRESET, clip_norm=0.0)
    assert "clipping" not in benchmark.variants(without, 10)  # only ingredients that it has can be left out


def test_both_programs_have_the_same_recipe(benchmark):
    job = benchmark.peer_recipe(PRESET, 10, 50_000)
    assert {name: job[name] for name in benchmark.NEW} == {name: getattr(PRESET, name) for name in benchmark.NEW}
    assert job["label_smoothing"] == pytest.approx(PRESET.label_smoothing * 10 / 9)
    for changes, sentence in (({"auto_augment": "randaugment"}, "--auto-augment randaugment, but the peer only has"),
                              ({"dropout": 0.5}, "--dropout 0.5, unlike the peer"),
                              ({"brightness": 0.5}, "--brightness 0.5, unlike the peer"),
                              ({"loss": "bce"}, "--loss bce, unlike the peer")):
        with pytest.raises(UserError, match=sentence):
            benchmark.peer_recipe(replace(PRESET, **changes), 10, 50_000)


def test_a_shorter_run_has_a_shorter_warm_up(benchmark):
    config = benchmark.configuration(benchmark.Options(epochs=PRESET.epochs // 5, image_size=32))
    assert config.warmup_epochs == pytest.approx(PRESET.warmup_epochs / 5) and config.image_size == 32
    assert config.batch_size == PRESET.batch_size


@pytest.mark.long
def test_it_goes_on_where_it_stopped(program, benchmark, capsys):
    assert program("--parts", "comparison", "--seeds", "1") == [("ours", 1), ("pytorch", 1)]
    assert program("--parts", "comparison") == [(name, seed) for seed in (2, 3) for name in ("ours", "pytorch")]
    names = list(benchmark.variants(PRESET, 10))
    assert program("--seeds", "1") == [(name, 1) for name in names]
    capsys.readouterr()
    assert program("--seeds", "2") == [(name, 2) for name in names]
    rows = capsys.readouterr().out.splitlines()[-len(names):]
    assert rows[0] == "| nothing | 90.0 +/- 0.0 |  |"
    assert rows[1] == "| TrivialAugment | 89.0 +/- 0.0 | 1.0 +/- 0.0 |"
    assert program("--seeds", "2") == []
    assert program("--seeds", "1", "--epochs", "3", "--parts", "comparison") == [("ours", 1), ("pytorch", 1)]


def test_some_of_what_can_be_left_out(program):
    assert program("--parts", "ingredients", "--seeds", "2", "--without", "nothing", "CutMix") == [
        (name, seed) for seed in (1, 2) for name in ("nothing", "CutMix")]
    with pytest.raises(UserError, match="--without cutmix: choose from nothing, TrivialAugment"):
        program("--parts", "ingredients", "--without", "cutmix")


@pytest.mark.long
def test_what_is_published(program, tmp_path):
    program()
    for name, value, theirs in (("cifar10_recipe_1gpu", 90.0, 80.0), ("cifar10_recipe_seconds_1gpu", 22.0, 22.0)):
        result = json.loads((tmp_path / "results" / f"{name}.json").read_text())
        result["commit"] = result["commit"] or "0" * 40
        assert faults(result, f"{name}.json") == []
        assert (result["value"], result["peer"]["value"]) == (pytest.approx(value), pytest.approx(theirs))
        assert result["peer"]["name"] == "PyTorch 9, same recipe"
    assert (tmp_path / "results" / "cifar10_recipe_1gpu.png").read_bytes().startswith(b"\x89PNG")
    about, *lines = map(json.loads, (tmp_path / "results" / "cifar10_recipe_1gpu.jsonl").read_text().splitlines())
    assert about["recipe"]["cutmix"] == PRESET.cutmix
    assert {line["part"] for line in lines} == {"comparison", "loader", "ingredients"}
    figure = tmp_path / "results" / "cifar10_recipe_1gpu.json"
    figure.unlink()
    program("--parts", "ingredients")  # its command differs from the one that measured it
    assert not figure.exists()


def test_no_run_begins_after_the_limit(program, benchmark, tmp_path, monkeypatch, capsys):
    now = iter([0.0, 5.0, 11.0])  # at the start, and when each run is about to begin
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: next(now))
    assert program("--limit", "10") == [("ours", 1)]
    assert "not all runs have begun" in capsys.readouterr().err
    assert not list((tmp_path / "results").glob("*.json"))  # one run is not enough for a figure
    now = iter([0.0, *[1.0] * 100])
    assert program("--limit", "10")[:2] == [("pytorch", 1), ("ours", 2)]
