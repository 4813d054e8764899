"""The runs that benchmarks/cifar10_gpus.py starts, and the results that it computes from their validations."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from test_results import faults

from common.errors import UserError
from train.presets import load_preset
from train.processes.launch import plan


@pytest.fixture
def benchmark(benchmark_module):
    return benchmark_module("cifar10_gpus")


def test_files(benchmark, tmp_path, rng):
    seconds = {variant.name: rng.uniform(10, 20, 3) for variant in benchmark.variants(4)}
    lines = [{"program": name, "seed": seed, "epoch": epoch, "seconds": epoch * times[seed] / 2, "top1": 0.4 * epoch,
              "train_loss": 1.0, "startup_seconds": 3.0}
             for name, times in seconds.items() for seed in range(3) for epoch in (1, 2)]
    benchmark.publish(lines, "cifar10_2ep_4gpu", 4, tmp_path)
    result = json.loads((tmp_path / "cifar10_2ep_4gpu.json").read_text())
    result["commit"] = result["commit"] or "0" * 40
    assert faults(result, "cifar10_2ep_4gpu.json") == []
    assert result["value"] == pytest.approx(sorted(seconds["4 GPUs"])[1])
    assert (tmp_path / "cifar10_2ep_4gpu.png").read_bytes().startswith(b"\x89PNG")


PROGRAM = """
import json, pathlib, sys
output, passes = (sys.argv[sys.argv.index(option) + 1] for option in ("--output", "--accumulate"))
if passes == "3":
    sys.exit(2)
folder = pathlib.Path(output)
folder.mkdir()
(folder / "config.json").write_text("{}")
lines = [{"event": "phase", "name": "checkpoint", "seconds": 0.5},
         {"event": "epoch", "epoch": 1, "time": 7.0, "val_top1": 0.1 * int(passes), "train_loss": 1.0}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + chr(10) for line in lines))
"""


def test_runs_side_by_side(benchmark, tmp_path, monkeypatch):
    def start(variant, slot, options):
        return subprocess.Popen([sys.executable, "-c", PROGRAM, *options, "--accumulate", str(variant.passes)])

    monkeypatch.setattr(benchmark, "start", start)
    config, slots = load_preset("cifar10_resnet18"), plan(2, on_cpu=True)[0]
    *alone, together = benchmark.variants(2)
    lines = benchmark.train([(alone[0], 5), (alone[1], 6)], slots, config, tmp_path)
    assert [(line["program"], line["seed"], line["top1"], line["seconds"]) for line in lines] == [
        ("1 GPU", 5, 0.1, 6.5), ("1 GPU, 2 passes", 6, 0.2, 6.5)
    ]
    with pytest.raises(UserError, match="training on 1 GPU, 3 passes failed with code 2"):
        benchmark.train([(together, 5), (benchmark.variants(3)[1], 5)], slots, config, tmp_path)


def test_goes_on_where_it_was_stopped(benchmark, tmp_path, monkeypatch):
    trained, wanted = [], 3

    def train(runs, *_):
        nonlocal wanted
        if wanted == 0:
            raise KeyboardInterrupt
        wanted -= 1
        trained.append([(variant.name, seed) for variant, seed in runs])
        return [{"program": variant.name, "seed": seed} for variant, seed in runs]

    monkeypatch.setattr(benchmark, "train", train)
    monkeypatch.setattr(benchmark, "plan", lambda count, on_cpu: (range(count), None))
    path, config = tmp_path / "x.jsonl", load_preset("cifar10_resnet18")
    with pytest.raises(KeyboardInterrupt):
        benchmark.measure(benchmark.KeptLines(path, {}), 2, (1, 2), config, tmp_path)
    wanted = 1
    benchmark.measure(benchmark.KeptLines(path, {}), 2, (1, 2), config, tmp_path)
    one, passes, together = (variant.name for variant in benchmark.variants(2))
    assert trained == [[(one, 1), (passes, 1)], [(one, 2), (passes, 2)], [(together, 1)], [(together, 2)]]
