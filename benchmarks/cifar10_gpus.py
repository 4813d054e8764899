"""Accuracy on several GPUs against one: CIFAR-10, the batch and the learning rate scaled with the GPUs.

    python benchmarks/cifar10_gpus.py [--gpus 2] [--epochs 18]

It trains the preset's recipe in three variants, each from several seeds:

    1 GPU                 the unchanged preset
    1 GPU, n passes       one step for n batches (`--accumulate n`): the global batch of n GPUs on one GPU
    n GPUs                each with the preset's batch

The second and the third variant are the same recipe, so their accuracies must agree within the spread of the seeds. The
first variant shows the cost of the larger batch itself. Runs on one GPU go side by side, each on its own GPU and cores.
But they share the machine's cores and memory, so their times are not those of a single run. Writes
results/cifar10_<epochs>ep_<n>gpu.jsonl (every validation; the same command resumes), .png and .json: seconds of
training and validation on n GPUs, one value for each seed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cifar10_time_to_accuracy import by_seed, in_epochs, summary
from record import ROOT, run, write_result
from several_gpus import check_gpus
from trainings import KeptLines, Line, TrainingOptions, arguments_of, validations

from common.command_line import Positive, read_options
from common.errors import error_of
from train.config import Config
from train.presets import load_preset
from train.processes.launch import Slot, plan


class Variant(NamedTuple):
    """A variant of the training."""

    name: str
    gpus: int
    passes: int  # forward and backward passes per step


def variants(num_gpus: int) -> tuple[Variant, Variant, Variant]:
    return (Variant("1 GPU", 1, 1), Variant(f"1 GPU, {num_gpus} passes", 1, num_gpus),
            Variant(f"{num_gpus} GPUs", num_gpus, 1))


def start(variant: Variant, slot: Slot, options: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a training run on the GPU and the cores of `slot`, or on several GPUs if the variant uses them."""
    alone = variant.gpus == 1
    module = ["train"] if alone else ["train.processes.launch", "-n", str(variant.gpus)]
    visible = {"CUDA_VISIBLE_DEVICES": slot.gpu.visible, **slot.environment} if alone and slot.gpu else {}
    process = subprocess.Popen([sys.executable, "-m", *module, *options, "--accumulate", str(variant.passes)], cwd=ROOT,
                               env={**os.environ, **visible}, stdout=sys.stderr)
    if alone:
        os.sched_setaffinity(process.pid, slot.cores)
    return process


def train(runs: Sequence[tuple[Variant, int]], slots: Sequence[Slot], config: Config, data: Path) -> list[Line]:
    """Train runs, each a variant and a seed, side by side in their own slots; returns their validations."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as running:
        launched = time.time()
        folders = [Path(scratch) / str(number) for number, _ in enumerate(runs)]
        processes = [running.enter_context(start(variant, slot, arguments_of(config, data, seed, folder)))
                     for (variant, seed), slot, folder in zip(runs, slots, folders, strict=False)]
        lines: list[Line] = []
        for (variant, seed), process, folder in zip(runs, processes, folders, strict=True):
            if code := process.wait():
                raise error_of(code)(f"training on {variant.name} failed with code {code}, see above")
            lines += validations(folder, launched, variant.name, seed)
    return lines


def plot(lines: Sequence[Line], num_gpus: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for color, variant in enumerate(variants(num_gpus)):
        for number, validated in enumerate(by_seed(lines, variant.name)):
            epochs, top1 = zip(*((line["epoch"], 100 * line["top1"]) for line in validated), strict=True)
            axes.plot(epochs, top1, f"C{color}.-", linewidth=1, label=None if number else variant.name)
    axes.set(xlabel="epochs", ylabel="validation top-1, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def measure(kept: KeptLines, num_gpus: int, seeds: Sequence[int], config: Config, data: Path) -> None:
    """Train all runs that `kept` lacks: first runs on one GPU, side by side, then runs on all GPUs, one by one."""
    slots, _ = plan(num_gpus, on_cpu=False)
    done = {(line["program"], line["seed"]) for line in kept.lines}
    left = [(variant, seed) for seed in seeds for variant in variants(num_gpus) if (variant.name, seed) not in done]
    for gpus in (1, num_gpus):
        runs, side_by_side = [run for run in left if run[0].gpus == gpus], num_gpus // gpus
        for first in range(0, len(runs), side_by_side):
            kept.add(*train(runs[first : first + side_by_side], slots, config, data), show=False)


def publish(lines: Sequence[Line], name: str, num_gpus: int, folder: Path) -> None:
    """Write the plot and the figure from the validations of all runs."""
    plot(lines, num_gpus, folder / f"{name}.png")
    runs = {variant: by_seed(lines, variant.name) for variant in variants(num_gpus)}
    print(*(summary(variant.name, validated) for variant, validated in runs.items()), sep="\n")
    several = runs[variants(num_gpus)[-1]]
    write_result(name, [1e3 * validated[-1]["seconds"] for validated in several], folder=folder)


@dataclass(frozen=True)
class Options(TrainingOptions):
    """Options of the measurement."""

    gpus: Positive = 2
    """Number of GPUs to use."""
    epochs: Positive = 18
    """Epochs of each run."""


def main() -> None:
    arguments = read_options(Options)
    check_gpus(arguments.gpus)
    config = in_epochs(load_preset(arguments.preset), arguments.epochs)
    name = f"cifar10_{arguments.epochs}ep_{arguments.gpus}gpu"
    kept = KeptLines(arguments.results / f"{name}.jsonl", {
        "what": "validations on CIFAR-10", "preset": arguments.preset, "epochs": arguments.epochs})
    measure(kept, arguments.gpus, range(1, arguments.seeds + 1), config, arguments.data)
    publish(kept.lines, name, arguments.gpus, arguments.results)


if __name__ == "__main__":
    run(main)
