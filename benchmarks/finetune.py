"""Fine-tuning with few images: CIFAR-10, ours against PyTorch, from equal weights, with one recipe.

    PEER_PYTHON=/path/to/python-with-torch python benchmarks/finetune.py

First a ResNet-18 is trained on five classes of CIFAR-10 and exported for torchvision. Then both programs train on the
other five classes, with 20, 100 and 500 training images per class:

    whole     all weights, starting from the exported ones
    head      the classifier alone; the rest stays frozen
    nothing   all weights, starting from random ones

Both use equal constants and three seeds, and validate on the 5,000 validation images of these classes. Ours is
`python -m train` as a user starts it. A seed draws the new classifier, the order, the augmentation, and the training
images; the images are equal for both programs.

Every finished run is written to results/finetune_1gpu.jsonl (its final top-1). The same command resumes there after an
interruption or after `--limit`; the exported weights are then made again, with identical bits. When all runs are
complete, writes .png and .json: top-1 in % of whole networks with 100 images per class, one value for each seed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import record
from cifar10_time_to_accuracy import recipe
from torch_peer import LinePeer, require_peer
from trainings import (
    KeptLines,
    Line,
    SideBySide,
    TrainingOptions,
    command,
    decoded,
    keep_all,
    mean_and_deviation,
    run_program,
    tell_what_is_left,
    train,
    until,
    validations,
    write_images,
)

from common.command_line import Positive, read_options
from pipelines.sources import open_source
from train.config import Config, default_warmup
from train.presets import load_preset

NAME = "finetune_1gpu"
PEER = Path(__file__).with_name("peer_finetune.py")
NUM_PRETRAINED = 5  # the first classes of the data set
WAYS = ("whole", "head", "nothing")
# Training images per class -> epochs: with fewer images an epoch has fewer steps.
SIZES = {20: 40, 100: 20, 500: 10}
PUBLISHED = ("whole", 100)


class Case(NamedTuple):
    """The settings of one run."""

    way: str
    images_per_class: int
    seed: int


def cases(seeds: int) -> list[Case]:
    return [Case(*case) for case in itertools.product(WAYS, SIZES, range(1, seeds + 1))]


def write_data(data: Path, folder: Path, seeds: int) -> None:
    """Write the folders `pretrain` and, for each case, `<images per class>-<seed>`, with their classes' images."""
    train, val = (open_source(data, split) for split in ("train", "val"))
    first, others = np.split(np.arange(len(train.classes)), [NUM_PRETRAINED])
    write_images(train, first, folder / "pretrain" / "train")
    write_images(val, first, folder / "pretrain" / "val")
    write_images(val, others, folder / "val")
    for count, seed in itertools.product(SIZES, range(1, seeds + 1)):
        write_images(train, others, folder / f"{count}-{seed}" / "train", count, seed)
        (folder / f"{count}-{seed}" / "val").symlink_to(folder / "val")


def configured(preset: Config, images_per_class: int) -> Config:
    """The recipe of a case: the preset's, with smaller steps for few images."""
    return replace(preset, epochs=SIZES[images_per_class], batch_size=50, learning_rate=0.1, warmup_epochs=1.0,
                   cutout=0.0, validate_every=SIZES[images_per_class])


def pretrain(preset: Config, epochs: int, folder: Path) -> None:
    """Train on the first classes into the folder `pretrained`, and export `weights.pth` for torchvision beside it."""
    run = folder / "pretrained"
    short = replace(preset, epochs=epochs, warmup_epochs=default_warmup(preset, epochs), deterministic=True)
    train(short, folder / "pretrain", preset.seed, run)
    run_program(command("export", "--checkpoint", run, "--torchvision", folder / "weights.pth"), folder / "export.log")


def ours(case: Case, preset: Config, folder: Path) -> Line:
    """Train one case with our program."""
    run = folder / f"ours-{case.way}-{case.images_per_class}-{case.seed}"
    start = [] if case.way == "nothing" else ["--weights", folder / "pretrained"]
    frozen = ["--freeze", "backbone"] if case.way == "head" else []
    data = folder / f"{case.images_per_class}-{case.seed}"
    train(configured(preset, case.images_per_class), data, case.seed, run, *start, *frozen)
    *_, last = validations(run, launched=0.0, program="ours", seed=case.seed)
    return {"program": "ours", **case._asdict(), "top1": last["top1"]}


class Peer(LinePeer):
    """peer_finetune.py, started once."""

    def __init__(self) -> None:
        super().__init__(PEER)
        self.name = f"PyTorch {json.loads(self.answer())['torch']}"

    def run(self, case: Case, preset: Config, folder: Path) -> Line:
        data = folder / f"{case.images_per_class}-{case.seed}"
        arrays = data / "arrays.npz"
        if not arrays.exists():
            images: dict[str, Any] = decoded(data)  # Any: in NumPy 2's types, savez's keywords include a bool
            np.savez(arrays, **images)
        with np.load(arrays) as loaded:
            labels = loaded["train_labels"]
        job = recipe(configured(preset, case.images_per_class), int(labels.max()) + 1, len(labels)) | {
            "arrays": str(arrays), "weights": None if case.way == "nothing" else str(folder / "weights.pth"),
            "frozen": case.way == "head", "seed": case.seed,
        }
        self.say(json.dumps(job))
        return {"program": "pytorch", **case._asdict(), **json.loads(self.answer()), "peer": self.name}


def measure(kept: KeptLines, arguments: Options) -> bool:
    """Train the runs that `kept` lacks; PyTorch's go one by one beside ours. Returns whether all are complete."""
    preset, ends = load_preset(arguments.preset), time.monotonic() + arguments.limit
    known = {(line["program"], *(line[field] for field in Case._fields)) for line in kept.lines}
    left = {program: [case for case in cases(arguments.seeds) if (program, *case) not in known]
            for program in ("ours", "pytorch")}
    if not any(left.values()):
        return True
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        write_data(arguments.data, folder, arguments.seeds)
        pretrain(preset, arguments.epochs, folder)
        peer = Peer()
        stack.callback(peer.close)
        start_ours, start_peer = (stack.enter_context(until(ends, count)) for count in (arguments.side_by_side, 1))
        return keep_all(kept, [*(start_ours(ours, case, preset, folder) for case in left["ours"]),
                               *(start_peer(peer.run, case, preset, folder) for case in left["pytorch"])])


def top1s(lines: Sequence[Line], program: str, way: str, images_per_class: int) -> list[float]:
    """Top-1 in % of each seed."""
    found = {line["seed"]: 100 * line["top1"] for line in lines
             if (line["program"], line["way"], line["images_per_class"]) == (program, way, images_per_class)}
    return [found[seed] for seed in sorted(found)]


def table(lines: Sequence[Line]) -> str:
    """Mean and standard deviation of each case as a Markdown table."""
    def cell(program: str, way: str, count: int) -> str:
        return mean_and_deviation(top1s(lines, program, way, count))

    rows = ["| trained | images a class | ours, top-1 % | PyTorch, top-1 % |", "|---|---|---|---|"]
    rows += [f"| {way} | {count} | {cell('ours', way, count)} | {cell('pytorch', way, count)} |"
             for way, count in itertools.product(WAYS, SIZES)]
    return "\n".join(rows)


def plot(lines: Sequence[Line], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for color, way in enumerate(WAYS):
        for program, style, shift in (("ours", "o-", 0.97), ("pytorch", "s--", 1.03)):
            values = [top1s(lines, program, way, count) for count in SIZES]
            means = [statistics.mean(of_size) for of_size in values]
            axes.errorbar([shift * count for count in SIZES], means, yerr=[statistics.stdev(v) for v in values],
                          fmt=style, color=f"C{color}", capsize=3, label=f"{way}, {program}")
    axes.set_xscale("log")
    axes.set_xticks(list(SIZES), list(map(str, SIZES)))
    axes.minorticks_off()
    axes.set(xlabel="training images a class", ylabel="validation top-1, %")
    axes.grid(alpha=0.3)
    axes.legend(ncols=3, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def publish(lines: Sequence[Line], folder: Path = record.RESULTS) -> None:
    """Write the plot and the figure."""
    plot(lines, folder / f"{NAME}.png")
    print(table(lines))
    own, theirs = (top1s(lines, program, *PUBLISHED) for program in ("ours", "pytorch"))
    peer_name = next(line["peer"] for line in lines if "peer" in line)
    record.write_result(NAME, own, peer=record.Peer(f"{peer_name}, same recipe", theirs), folder=folder, unit="top-1 %")


@dataclass(frozen=True)
class Options(SideBySide, TrainingOptions):
    """Options of the measurement."""

    epochs: Positive = 12
    """Epochs of the training on the first five classes."""


def main() -> None:
    arguments = read_options(Options)
    require_peer()
    kept = KeptLines(arguments.results / f"{NAME}.jsonl", {"preset": arguments.preset, "epochs": arguments.epochs})
    if measure(kept, arguments):
        publish(kept.lines, arguments.results)
    else:
        tell_what_is_left()


if __name__ == "__main__":
    record.run(main)
