"""Fine-tuning trained weights on new classes of photographs at 224 pixels: the seconds of a whole run.

    python benchmarks/finetune_photographs.py

First ResNet-50 memorises the photographs of RESNET_REAL_DATA/imagenet_sample, each as its own class (preset
overfit_900). Then some of the photographs are regrouped into new classes; a class consists of neighbours in ImageNet's
order, which show related things. Three new runs with different seeds train on these classes, starting from the first
run's weights:

    python -m train --config finetune --weights RUN --data FOLDER --target-accuracy 0.95

The time is that of the whole command, report included. The accuracy is measured on the training images, as there are no
others.

Writes results/finetune_photographs_1gpu.jsonl (seconds, epochs and top-1 of each run) and .json (the seconds).
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import record
from trainings import Line, command, run_program, train

from common.command_line import Positive, read_options
from common.errors import ProgramError
from train.presets import load_preset

NAME = "finetune_photographs_1gpu"
NUM_CLASSES, IMAGES_PER_CLASS = 10, 20
TARGET = 0.95
LEARNING_RATE = 0.1  # the preset's rate suits thousands of steps; here an epoch has three


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    data: Path = record.REAL_DATA / "imagenet_sample"
    """Class folders of photographs."""
    seeds: Positive = 3
    """Runs on the other classes; a published result needs 3."""
    preset: str = "overfit_900"
    """Preset of the first run, whose weights are fine-tuned."""
    epochs: Positive = 100
    """Largest number of epochs of each run on the new classes."""
    results: Path = record.RESULTS
    """Folder to write to."""


def write_data(data: Path, folder: Path, per_class: int) -> None:
    """Write class folders `group0` ..., each with the photographs of several neighbouring classes of `data`."""
    classes = sorted(path for path in data.iterdir() if path.is_dir())
    for number, path in enumerate(classes[:NUM_CLASSES * per_class]):
        shutil.copytree(path, folder / f"group{number // per_class}", dirs_exist_ok=True)


def measure(arguments: Options) -> Iterator[Line]:
    """Train all runs; yields a result line for each."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_data(arguments.data, folder / "groups", IMAGES_PER_CLASS)
        first = load_preset(arguments.preset)
        train(first, arguments.data, first.seed, folder / "first")
        for seed in range(1, arguments.seeds + 1):
            run, launched = folder / f"run-{seed}", time.monotonic()
            run_program(command("--config", "finetune", "--weights", folder / "first", "--data", folder / "groups",
                                "--seed", seed, "--epochs", arguments.epochs, "--learning-rate", LEARNING_RATE,
                                "--validate-every", 5, "--target-accuracy", TARGET, "--no-tensorboard",
                                "--output", run), folder / f"run-{seed}.log")
            seconds = time.monotonic() - launched
            *_, last = (line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
                        if line["event"] == "epoch")
            if last["train_eval_top1"] < TARGET:
                raise ProgramError(f"the run with seed {seed} ended with a top-1 of {last['train_eval_top1']:.3f} "
                                   f"after {last['epoch']} epochs, not {TARGET}: nothing is published")
            yield {"seed": seed, "seconds": seconds, "epochs": last["epoch"], "top1": last["train_eval_top1"]}


def main() -> None:
    arguments = read_options(Options)
    lines = []
    for line in measure(arguments):
        lines.append(line)
        print(json.dumps(line), flush=True)
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / f"{NAME}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if len(lines) >= record.MIN_RUNS:
        record.write_result(NAME, [1e3 * line["seconds"] for line in lines], folder=arguments.results)


if __name__ == "__main__":
    record.run(main)
