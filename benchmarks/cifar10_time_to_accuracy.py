"""Time to accuracy on CIFAR-10: ours from JPEGs against PyTorch with the same recipe, in alternating runs.

    PEER_PYTHON=/path/to/python-with-torch python benchmarks/cifar10_time_to_accuracy.py

Ours is `python -m train --config cifar10_resnet18` as a user starts it: it decodes the images once at its start, and
the DALI graph crops, resizes and mirrors them in every epoch. PyTorch (peer_cifar10.py) keeps all decoded images on the
GPU. Both train with equal constants, use the same augmentation, and validate the moving average of the weights after
the same epochs.

Time counts from the start of the first training step to the end of a validation, and includes all training and all
validations in between. It excludes start-up, which is reported separately (imports, opening the data, decoding them for
PyTorch, compilation, choice of kernels), and our writing of checkpoints, because PyTorch's side writes none.

The target is PyTorch's own final accuracy: the mean over its seeds minus two standard deviations, so that every seed of
an equally good program reaches it. Writes results/cifar10_time_to_accuracy.json (seconds to the target, one value for
each seed), .jsonl (a line for each validation of all runs) and .png.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import record
from torch_peer import LinePeer, require_peer
from trainings import Line, TrainingOptions, decoded, train, validations

from common.command_line import option_name, read_options
from common.errors import ProgramError, UserError
from train.config import Config
from train.presets import load_preset
from train.schedule import image_sizes, make_schedule

NAME = "cifar10_time_to_accuracy"
PEER = Path(__file__).with_name("peer_cifar10.py")
# Preset options that the peer does not get under their own names.
TAKEN_OTHERWISE = ("config", "data", "learning_rate", "final_learning_rate", "label_smoothing", "image_size",
                   "first_image_size", "resize_epochs", "val_image_size", "val_crop_fraction")


def recipe(config: Config, num_classes: int, num_images: int, knows: Sequence[str] = ()) -> dict[str, Any]:
    """The preset in peer_cifar10.py's form.

    `knows` names further options that another peer supports; the caller adds their values. Raises UserError for a
    preset with a setting that the peer does not have.
    """
    peak = make_schedule(config, num_images // config.batch_size, num_processes=1)
    names = ("model", "batch_size", "epochs", "warmup_epochs", "momentum", "nesterov", "weight_decay", "crop_padding",
             "cutout", "ema_decay", "validate_every", "zero_init_residual")
    foreign = [f"{option_name(field.name)} {value}" for field in dataclasses.fields(config)
               if (value := getattr(config, field.name)) != field.default
               and field.name not in (*names, *TAKEN_OTHERWISE, *knows)]
    if foreign or not config.crop_padding:
        raise UserError(f"--preset {config.config} has {', '.join(foreign) or 'no --crop-padding'}, unlike the peer: "
                        "give a preset that trains on crops of padded images, by SGD with a cosine schedule, and that "
                        "uses no other options")
    return {name: getattr(config, name) for name in names} | {
        # Our label smoothing is spread over the wrong classes only, as in MXNet; PyTorch's is spread over all classes.
        "label_smoothing": config.label_smoothing * num_classes / (num_classes - 1),
        "num_classes": num_classes,
        "image_sizes": image_sizes(config),
        "val_image_size": config.inference_image_size,
        "peak_learning_rate": peak.peak,
        "final_learning_rate": peak.final,
    }


def in_epochs(config: Config, epochs: int) -> Config:
    """Stretch the recipe to `epochs` epochs; the image size rises during the same fraction of them."""
    start, end = (epoch * epochs / config.epochs for epoch in config.resize_epochs)
    return replace(config, epochs=epochs, resize_epochs=(start, end))


def one_of_each_size(config: Config) -> Config:
    """A run with one epoch of each image size: the shortest run that uses all kernels."""
    last = len(set(image_sizes(config))) - 1
    return replace(config, epochs=last + 1, warmup_epochs=0.0, resize_epochs=(0.0, float(last)))


def run_ours(config: Config, data: Path, seed: int, folder: Path) -> Iterator[Line]:
    """Train once with our program; yields its validations."""
    launched = time.time()
    train(config, data, seed, folder)
    yield from validations(folder, launched, "ours", seed)


class Peer(LinePeer):
    """A program such as peer_cifar10.py, started once, so that it stays compiled between the seeds."""

    def __init__(self, config: dict[str, Any], program: Path = PEER) -> None:
        super().__init__(program)
        self.say(json.dumps(config))

    def wait(self) -> str:
        """Wait until the peer is ready; returns its name."""
        self._started = json.loads(self.answer())
        return f"PyTorch {self._started['torch']}, torch.compile"

    def run(self, seed: int) -> Iterator[Line]:
        """Train once; yields the validations."""
        self.say(str(seed))
        while line := self.answer().strip():
            yield {"program": "pytorch", "seed": seed, **json.loads(line),
                   "startup_seconds": self._started["startup_seconds"]}


def by_seed(lines: Sequence[Line], program: str) -> list[list[Line]]:
    """The validations of a program, grouped by run, in order."""
    seeds = sorted({line["seed"] for line in lines if line["program"] == program})
    return [[line for line in lines if line["program"] == program and line["seed"] == seed] for seed in seeds]


def seconds_to(target: float, runs: Sequence[Sequence[Line]]) -> list[float]:
    """For each run, the seconds until it first reached the target."""
    reached = [next((line["seconds"] for line in run if line["top1"] >= target), None) for run in runs]
    if None in reached:
        missed = runs[reached.index(None)][0]
        raise ProgramError(f"{missed['program']}, seed {missed['seed']}, did not reach {target:.2%}: nothing is "
                           "published")
    return [seconds for seconds in reached if seconds is not None]


def summary(name: str, runs: Sequence[Sequence[Line]]) -> str:
    finals, ends = [run[-1]["top1"] for run in runs], [run[-1]["seconds"] for run in runs]
    return (f"{name}: final top-1 {statistics.mean(finals):.2%} +/- {statistics.stdev(finals):.2%} "
            f"({min(finals):.2%} to {max(finals):.2%}), whole run {statistics.median(ends):.1f} s, "
            f"start-up {runs[0][0]['startup_seconds']:.1f} s")


def plot(lines: Sequence[Line], target: float, peer_name: str, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for program, label, color in (("ours", "ours", "C0"), ("pytorch", peer_name, "C1")):
        for number, run in enumerate(by_seed(lines, program)):
            axes.plot([line["seconds"] for line in run], [100 * line["top1"] for line in run], color=color, linewidth=1,
                      marker=".", label=None if number else label)
    axes.axhline(100 * target, color="grey", linestyle="--", linewidth=1, label=f"target {target:.2%}")
    axes.set_xlabel("seconds of training and validation")
    axes.set_ylabel("validation top-1, %")
    axes.set_ylim(bottom=max(0.0, 100 * min(line["top1"] for line in lines) - 2))
    axes.legend()
    figure.savefig(path, dpi=150)


def publish(lines: Sequence[Line], peer_name: str, folder: Path = record.RESULTS) -> None:
    """Write the three result files from the validations of all runs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{NAME}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ours, theirs = by_seed(lines, "ours"), by_seed(lines, "pytorch")
    finals = [run[-1]["top1"] for run in theirs]
    target = statistics.mean(finals) - 2 * statistics.stdev(finals)
    print(summary("ours", ours), summary(peer_name, theirs), f"target {target:.2%}", sep="\n")
    plot(lines, target, peer_name, folder / f"{NAME}.png")
    peer = record.Peer(f"{peer_name}, same recipe", [1e3 * s for s in seconds_to(target, theirs)])
    record.write_result(NAME, [1e3 * s for s in seconds_to(target, ours)], peer=peer, folder=folder)


@dataclass(frozen=True)
class Options(TrainingOptions):
    """Options of the measurement."""

    epochs: int = 0
    """Epochs of both programs' runs; 0: the preset's."""


def main() -> None:
    arguments = read_options(Options)
    if arguments.seeds < 2:
        raise UserError(f"--seeds {arguments.seeds}: give at least 2, because the target depends on their spread")
    require_peer()
    config = load_preset(arguments.preset)
    if arguments.epochs:
        config = in_epochs(config, arguments.epochs)
    arrays: dict[str, Any] = decoded(arguments.data)  # Any: in NumPy 2's types, savez's keywords include a bool
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as scratch:
        np.savez(Path(scratch) / "arrays.npz", **arrays)
        constants = recipe(config, int(arrays["val_labels"].max()) + 1, len(arrays["train_labels"]))
        peer = Peer(constants | {"arrays": str(Path(scratch) / "arrays.npz")})
        # This run fills our caches of compiled kernels and chosen plans, as PyTorch's own warm-up does.
        list(run_ours(one_of_each_size(config), arguments.data, 0, Path(scratch) / "warm-up"))
        peer_name = peer.wait()
        for seed in range(1, arguments.seeds + 1):
            for run in (run_ours(config, arguments.data, seed, Path(scratch) / f"ours-{seed}"), peer.run(seed)):
                for line in run:
                    lines.append(line)
                    print(json.dumps(line), flush=True)
        peer.close()
    publish(lines, peer_name, arguments.results)


if __name__ == "__main__":
    record.run(main)
