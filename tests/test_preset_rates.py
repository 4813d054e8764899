"""benchmarks/preset_rates.py: the measurements that it makes and keeps."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from common.errors import ProgramError
from train.presets import load_preset, presets


@pytest.fixture
def benchmark(benchmark_module):
    return benchmark_module("preset_rates")


def line(preset, size, rate, commit="new"):
    return {"preset": preset, "image_size": size, "batch": 512, "images_per_sec": rate, "spread": 1.0,
            "step_ms": [1.0], "hardware": "1x GPU", "commit": commit, "command": "python"}


@pytest.fixture
def run(benchmark, tmp_path, monkeypatch):
    """Run the program with a fake measurement; returns the measured cases."""
    monkeypatch.setattr(benchmark, "machine", lambda: {"hardware": "1x GPU", "commit": "new"})
    monkeypatch.setattr(benchmark, "presets", lambda: [*presets(), "two_sizes"])
    sizes = replace(load_preset("resnet50_90ep"), epochs=4, first_image_size=160, image_size=192, resize_epochs=(1, 3))
    monkeypatch.setattr(benchmark, "load_preset", lambda name: sizes if name == "two_sizes" else load_preset(name))

    def run(*options):
        measured = []
        monkeypatch.setattr(benchmark, "measure", lambda name, size, _: measured.append((name, size)) or line(
            name, size, 1000.0 if size == 160 else 500.0))
        monkeypatch.setattr(sys, "argv", ["preset_rates.py", "--results", str(tmp_path), *options])
        benchmark.main()
        return measured

    return run


def test_every_size_of_a_preset_is_measured_once(run, tmp_path, capsys):
    """Lines of another commit are replaced, lines of deleted presets dropped; hours are those of all epochs."""
    path = tmp_path / "preset_rates_1gpu.jsonl"
    path.write_text("".join(json.dumps(of) + "\n" for of in (
        line("two_sizes", 160, 9.0, "old"), line("gone", 224, 9.0, "old"), line("resnet50_90ep", 224, 9.0, "old"))))
    measured = run("--presets", "two_sizes")
    assert measured == [("two_sizes", 160), ("two_sizes", 192)]
    kept = [json.loads(text) for text in path.read_text().splitlines()]
    assert [(of["preset"], of["image_size"], of["commit"]) for of in kept] == [
        ("resnet50_90ep", 224, "old"), ("two_sizes", 160, "new"), ("two_sizes", 192, "new")]
    row = capsys.readouterr().out.splitlines()[-1]
    # Sizes 160, 160, 192, 192: 1,281,167 images at 1,000/s twice, and at 500/s twice.
    assert row == "| `two_sizes` | 512 | 1,000 at 160, 500 at 192 | 2.14 |"
    assert run("--presets", "two_sizes") == []  # resumes: everything is measured


def test_the_presets_are_those_of_imagenet(benchmark):
    assert {"resnet50_90ep", "resnet50_lars_37ep"} <= set(benchmark.of_imagenet())
    assert not {"cifar10_resnet18", "cpu_sample", "finetune"} & set(benchmark.of_imagenet())


@pytest.mark.long
@pytest.mark.parametrize("preset", ["resnet50_90ep", "resnet50_torchvision_v2"])
def test_a_measurement(benchmark, monkeypatch, preset):
    """The recorded command runs, on a CPU with a tiny batch."""
    real = benchmark.command
    monkeypatch.setattr(benchmark, "command", lambda *arguments: [
        *real(*arguments), "--batch-size", "4", "--model", "resnet18", "--device", "cpu", "--warmup-steps", "1",
        "--accumulate", "1"])
    found = benchmark.measure(preset, 32, 3)
    assert len(found["step_ms"]) == 3 and found["batch"] == 4 and found["images_per_sec"] > 0
    assert found["command"].startswith("python -m train benchmark --config " + preset + " --data synthetic ")


def test_a_measurement_that_fails(benchmark):
    with pytest.raises(ProgramError, match="ended with exit code 2: error: there is no preset 'no_such'"):
        benchmark.measure("no_such", 32, 3)
