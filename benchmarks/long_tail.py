"""Unbalanced CIFAR-10: balanced accuracy with and without `--balance`.

    python benchmarks/long_tail.py
    python benchmarks/long_tail.py --largest 40 --imbalance 10 --val-images 10 --epochs 1 --seeds 1   # a try on a CPU

The most frequent class keeps 5,000 training images, the next classes fewer and fewer, down to a hundredth (exponential
profile of Cui et al., arXiv:1901.05555, section 5.1: 12,406 images); the seed draws which images. A ResNet-18 trains on
them from random weights, as a user starts it, with `--balance 0`, 0.5 and 1. It validates on the 10,000 validation
images, which are equally many of each class.

Every finished run is written to results/long_tail_1gpu.jsonl (balanced accuracy, and the accuracy of the three rarest
classes). The same command resumes there after an interruption or after `--limit`. When the runs of at least three seeds
are complete, writes .json: balanced accuracy in % with `--balance 1`; the peer is training without it.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import record
from trainings import (
    KeptLines,
    Line,
    SideBySide,
    TrainingOptions,
    keep_all,
    mean_and_deviation,
    tell_what_is_left,
    train,
    until,
    write_images,
)

from common.command_line import Positive, read_options
from common.errors import UserError
from pipelines.sources import Source, open_source
from train.presets import load_preset

NAME = "long_tail_1gpu"
BALANCES = (0.0, 0.5, 1.0)
NUM_RARE = 3  # rarest classes, reported separately
BATCH_SIZE, WARMUP_EPOCHS = 128, 1.0  # the preset's batch would give only 24 steps per epoch


@dataclass(frozen=True)
class Options(SideBySide, TrainingOptions):
    """Options of the measurement."""

    largest: Positive = 5000
    """Training images of the most frequent class."""
    imbalance: float = 100.0
    """Images of the most frequent class / images of the rarest class."""
    val_images: Positive = 1000
    """Validation images of each class."""
    epochs: Positive = 50
    """Epochs of each run."""


def class_sizes(largest: int, imbalance: float, num_classes: int) -> list[int]:
    """The number of images of each class, most frequent first; it falls by a constant factor."""
    return [max(1, int(largest * imbalance ** (-label / (num_classes - 1)))) for label in range(num_classes)]


def write_data(arguments: Options, train: Source, val: Source, folder: Path) -> None:
    """Write `<seed>/train` and `<seed>/val` as class folders."""
    sizes = class_sizes(arguments.largest, arguments.imbalance, len(train.classes))
    write_images(val, range(len(val.classes)), folder / "val", arguments.val_images)
    for seed in range(1, arguments.seeds + 1):
        for label, size in enumerate(sizes):
            write_images(train, [label], folder / str(seed) / "train", size, seed)
        (folder / str(seed) / "val").symlink_to(folder / "val")


def train_once(arguments: Options, balance: float, seed: int, folder: Path) -> Line:
    """Train once with our program."""
    run = folder / f"run-{balance:g}-{seed}"
    config = replace(load_preset(arguments.preset), balance=balance, batch_size=BATCH_SIZE, epochs=arguments.epochs,
                     warmup_epochs=WARMUP_EPOCHS, validate_every=arguments.epochs)
    train(config, folder / str(seed), seed, run)
    found = json.loads((run / "report" / "report.json").read_text())["classifier"]
    of_class = [right / images for right, images in zip(found["class_right"], found["class_images"], strict=True)]
    return {"balance": balance, "seed": seed, "balanced_accuracy": statistics.fmean(of_class),
            "rare": statistics.fmean(of_class[-NUM_RARE:]), "of_class": of_class}


def measure(kept: KeptLines, arguments: Options) -> bool:
    """Train the runs that `kept` lacks; returns whether all are complete."""
    ends = time.monotonic() + arguments.limit
    known = {(line["balance"], line["seed"]) for line in kept.lines}
    left = [case for case in itertools.product(BALANCES, range(1, arguments.seeds + 1)) if case not in known]
    train, val = (open_source(arguments.data, split) for split in ("train", "val"))
    with tempfile.TemporaryDirectory() as scratch, until(ends, arguments.side_by_side) as start:
        write_data(arguments, train, val, Path(scratch))
        return keep_all(kept, [start(train_once, arguments, *case, Path(scratch)) for case in left])


def of(lines: Sequence[Line], balance: float, figure: str) -> list[float]:
    """A figure of the runs with `balance`, in %, one value for each seed."""
    return [100 * line[figure] for line in lines if line["balance"] == balance]


def table(lines: Sequence[Line]) -> str:
    """Mean and standard deviation as a Markdown table."""
    def cell(balance: float, figure: str) -> str:
        return mean_and_deviation(of(lines, balance, figure))

    rows = [f"| `--balance` | balanced accuracy, % | of the {NUM_RARE} rarest classes, % |", "|---|---|---|"]
    return "\n".join(rows + [f"| {balance:g} | {cell(balance, 'balanced_accuracy')} | {cell(balance, 'rare')} |"
                             for balance in BALANCES])


def publish(lines: Sequence[Line], folder: Path) -> None:
    """Write the figure and print the table."""
    print(table(lines))
    plain, *_, balanced = (of(lines, balance, "balanced_accuracy") for balance in BALANCES)
    if len(plain) >= record.MIN_RUNS:
        record.write_result(NAME, balanced, peer=record.Peer("the same with --balance 0", plain), folder=folder,
                            unit="balanced accuracy %")


def main() -> None:
    arguments = read_options(Options)
    if arguments.imbalance < 1:
        raise UserError(f"--imbalance {arguments.imbalance:g} must be at least 1")
    about = {name: getattr(arguments, name) for name in ("preset", "largest", "imbalance", "val_images", "epochs")}
    kept = KeptLines(arguments.results / f"{NAME}.jsonl", about)
    if measure(kept, arguments):
        publish(kept.lines, arguments.results)
    else:
        tell_what_is_left()


if __name__ == "__main__":
    record.run(main)
