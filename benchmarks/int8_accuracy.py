"""The accuracy that INT8 costs: trains networks on CIFAR-10, quantises them, and validates them in fp32 and INT8.

    python benchmarks/int8_accuracy.py                                                           # on a GPU
    python benchmarks/int8_accuracy.py --preset cifar10_resnet18 --image-size 32 --epochs 4 --results FOLDER  # on a CPU

Each run is `python -m train --config PRESET` and then `python -m train quantize`, as a user starts them. `quantize`
prints the top-1 over all validation images, for equal weights in fp32 and in INT8. Every finished run is written to
results/<name>.jsonl, and the same command resumes there. The result is published as results/<name>.json (top-1 in %,
peer: fp32); <name> is the preset's network with _int8_accuracy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import record
from trainings import KeptLines, Line, TrainingOptions, command, mean_and_deviation, run_program, train

from common.command_line import read_options
from common.environment import git_commit, hardware
from common.errors import ProgramError
from train import weights
from train.config import Config
from train.presets import load_preset
from train.weights import int8_file

LOSS = 1.0  # percentage points of top-1 that INT8 may lose at most


@dataclass(frozen=True)
class Options(TrainingOptions):
    """Options of the measurement."""

    epochs: int = 0
    """Epochs of each run; 0: the preset's."""
    image_size: int = 0
    """Pixels; 0: the preset's."""
    batch_size: int = 0
    """Images; 0: the preset's."""
    calibration: Literal["max", "percentile", "entropy"] = "entropy"
    """Method that finds the ranges of the activations."""


def configuration(arguments: Options) -> Config:
    """The preset with the given options."""
    given = {name: value for name in ("epochs", "image_size", "batch_size") if (value := getattr(arguments, name))}
    preset = load_preset(arguments.preset)
    warmup = preset.warmup_epochs * given.get("epochs", preset.epochs) / preset.epochs
    return replace(preset, **given, warmup_epochs=warmup)


def measured(config: Config, arguments: Options, seed: int, folder: Path) -> Line:
    """Train and quantise once; returns top-1 in both precisions, from 0 to 1."""
    run = folder / f"{config.model}-{seed}"
    train(config, arguments.data, seed, run)
    words = ("quantize", "--checkpoint", run, "--calibration", arguments.calibration)
    run_program(command(*words), run.with_name(f"{run.name}-quantize.log"))
    trained = weights.load(str(run))
    found = int8_file.load(str(run), trained)
    return {"seed": seed, **{f"top1_{precision}": value for precision, value in found.accuracy.items()}}


def publish(name: str, lines: Sequence[Line], folder: Path) -> None:
    """Write the figure, and a line with INT8's cost. Raises ProgramError if the cost is above LOSS."""
    exact, int8 = ([100 * line[f"top1_{precision}"] for line in lines] for precision in ("float32", "int8"))
    record.write_result(name, int8, peer=record.Peer("fp32", exact), folder=folder, unit="top-1 %")
    lost = [before - after for before, after in zip(exact, int8, strict=True)]
    print(f"top-1 in fp32 {mean_and_deviation(exact)} %, in INT8 {mean_and_deviation(int8)} %; at most "
          f"{max(lost):.2f} points lost")
    if max(lost) > LOSS:
        raise ProgramError(f"INT8 has lost {max(lost):.2f} percentage points of top-1, more than {LOSS:g}")


def main() -> None:
    arguments = read_options(Options)
    config = configuration(arguments)
    name = f"{config.model}_int8_accuracy"
    about = {"preset": config.to_dict(), "calibration": arguments.calibration, "commit": git_commit(),
             "hardware": hardware()}
    kept = KeptLines(arguments.results / f"{name}.jsonl", about)
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, arguments.seeds + 1):
            if not any(line["seed"] == seed for line in kept.lines):
                kept.add(measured(config, arguments, seed, Path(folder)))
    publish(name, kept.lines, arguments.results)


if __name__ == "__main__":
    record.run(main)
