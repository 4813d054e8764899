"""A strong recipe with today's training techniques on CIFAR-10: ours against PyTorch, and the gain of each technique.

    PEER_PYTHON=/path/to/python-with-torch python benchmarks/cifar10_recipe.py
    PEER_PYTHON=... python benchmarks/cifar10_recipe.py --images-per-class 12 --batch-size 24 --image-size 32 \\
        --epochs 2 --results FOLDER                                                                # a try on a CPU

First ours (`python -m train --config cifar10_strong`, as a user starts it) and PyTorch (peer_recipe.py) train with
equal constants, alternating, alone on the GPU, with three seeds each. Times count as in cifar10_time_to_accuracy.py.
PyTorch augments whole batches on the GPU with compiled code; the speed of a DataLoader with torchvision's own
transforms, the alternative, is measured too. Then ours trains with one ingredient (technique) left out at a time,
several runs side by side: there only the accuracies count, not the times.

    python benchmarks/cifar10_recipe.py --epochs 100 --parts ingredients --without nothing "all of these" \\
        --results benchmarks/results/cifar10_recipe_100ep            # do they pay off in a longer training?

Every finished run is written to results/cifar10_recipe_1gpu.jsonl. The same command resumes there after an interruption
or after `--limit`. A complete part is published: .json (top-1 in % of the last epoch, a value for each seed),
cifar10_recipe_seconds_1gpu.json (seconds of whole runs) and .png; the table of the ingredients is printed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import record
from cifar10_time_to_accuracy import Peer, by_seed, one_of_each_size, recipe, run_ours
from torch_peer import require_peer
from trainings import (
    KeptLines,
    Line,
    SideBySide,
    TrainingOptions,
    decoded,
    keep_all,
    mean_and_deviation,
    tell_what_is_left,
    train,
    until,
    write_images,
)

from common.command_line import read_options
from common.errors import UserError
from pipelines.sources import open_source
from train.config import Config
from train.presets import load_preset

NAME, SECONDS = "cifar10_recipe_1gpu", "cifar10_recipe_seconds_1gpu"
PEER = Path(__file__).with_name("peer_recipe.py")
LOADER_SECONDS = 5.0  # warm-up, because workers start one after the other
NEW = ("auto_augment", "random_erasing", "mixup", "cutmix", "cutmix_share", "stochastic_depth",
       "repeated_augmentation", "clip_norm")  # options that peer_recipe.py has beyond peer_cifar10.py's
# Ingredient -> the options that leave it out of the recipe.
INGREDIENTS: dict[str, dict[str, Any]] = {
    "TrivialAugment": {"auto_augment": "none"},
    "random erasing": {"random_erasing": 0.0},
    "mixup": {"mixup": 0.0},
    "CutMix": {"cutmix": 0.0},
    "label smoothing": {"label_smoothing": 0.0},
    "stochastic depth": {"stochastic_depth": 0.0},
    "repeated augmentation": {"repeated_augmentation": 0},
    "clipping": {"clip_norm": 0.0},
    "moving average": {"ema_decay": 0.0},
}
NONE_LEFT_OUT, ALL = "nothing", "all of these"
BCE = "softmax cross entropy, for BCE"
PartName = Literal["comparison", "ingredients"]


@dataclass(frozen=True)
class Options(SideBySide, TrainingOptions):
    """Options of the measurement."""

    preset: str = "cifar10_strong"
    """The preset that defines network, images and recipe."""
    parts: tuple[PartName, ...] = ("comparison", "ingredients")
    """comparison: against PyTorch; ingredients: with one ingredient left out at a time."""
    without: Annotated[tuple[str, ...], "NAME"] = ()
    """Ingredients to leave out in `ingredients`, by the names in its table; default: each one."""
    epochs: int = 0
    """Epochs of each run; 0: the preset's."""
    image_size: int = 0
    """Pixels; 0: the preset's."""
    batch_size: int = 0
    """Images; 0: the preset's."""
    images_per_class: int = 0
    """For a quick try, train and validate with this many images of each class only; 0: all."""


def configuration(arguments: Options) -> Config:
    """The preset with the given options."""
    preset = load_preset(arguments.preset)
    given = {name: value for name in ("epochs", "image_size", "batch_size") if (value := getattr(arguments, name))}
    warmup = preset.warmup_epochs * given.get("epochs", preset.epochs) / preset.epochs
    return replace(preset, **given, warmup_epochs=warmup)


def variants(config: Config, num_classes: int) -> dict[str, Config]:
    """The recipe without each of its ingredients, without all of them, and with BCE instead of softmax."""
    found = {NONE_LEFT_OUT: config}
    for name, off in INGREDIENTS.items():
        without = replace(config, **off)
        found |= {name: without} if without != config else {}
    found[ALL] = replace(config, **{option: off for changes in INGREDIENTS.values() for option, off in changes.items()})
    # BCE also averages over the classes, so its gradients are that much smaller; it has no label smoothing
    # (arXiv:2110.00476).
    found[BCE] = replace(config, loss="bce", label_smoothing=0.0, learning_rate=config.learning_rate * num_classes,
                         clip_norm=config.clip_norm / num_classes)
    return found


def peer_recipe(config: Config, num_classes: int, num_images: int) -> dict[str, Any]:
    """The recipe in peer_recipe.py's form. Raises UserError for a setting that the peer does not have."""
    if config.auto_augment not in ("none", "trivialaugment"):
        raise UserError(f"--preset {config.config} has --auto-augment {config.auto_augment}, but the peer only has "
                        "trivialaugment: give a preset with trivialaugment")
    return recipe(config, num_classes, num_images, knows=NEW) | {name: getattr(config, name) for name in NEW} | {
        "loader_seconds": LOADER_SECONDS}


def few(data: Path, per_class: int, folder: Path) -> Path:
    """Write class folders with `per_class` training and `per_class` validation images of each class."""
    for split in ("train", "val"):
        source = open_source(data, split)
        write_images(source, range(len(source.classes)), folder / split, per_class)
    return folder


# --- the runs ---


def compared(lines: Sequence[Line]) -> list[Line]:
    """The lines of the comparison's validations."""
    return [line for line in lines if line["part"] == "comparison"]


def has(lines: Sequence[Line], **values: Any) -> bool:
    """Whether one of the lines has these values."""
    return any(line.items() >= values.items() for line in lines)


def compare(kept: KeptLines, config: Config, arguments: Options, data: Path, folder: Path, ends: float) -> bool:
    """Train the runs of ours and of PyTorch that `kept` lacks, alternating; returns whether all are complete."""
    wanted = [(program, seed) for seed in range(1, arguments.seeds + 1) for program in ("ours", "pytorch")
              if not has(compared(kept.lines), program=program, seed=seed)]
    loader_is_there = has(kept.lines, part="loader")
    if not wanted and loader_is_there:
        return True
    arrays: dict[str, Any] = decoded(data)  # Any: in NumPy 2's types, savez's keywords include a bool
    np.savez(folder / "arrays.npz", **arrays)
    constants = peer_recipe(config, int(arrays["val_labels"].max()) + 1, len(arrays["train_labels"]))
    peer = Peer(constants | {"arrays": str(folder / "arrays.npz")}, PEER)
    # This run fills our caches of compiled kernels and chosen plans, as PyTorch's own warm-up does.
    list(run_ours(one_of_each_size(config), data, 0, folder / "warm-up"))
    peer_name = peer.wait()
    for program, seed in wanted:
        if time.monotonic() >= ends:
            peer.close()
            return False
        runs = run_ours(config, data, seed, folder / f"ours-{seed}") if program == "ours" else peer.run(seed)
        kept.add(*({"part": "comparison", "peer": peer_name, **line} for line in runs))
    if not loader_is_there:
        peer.say("loader")
        kept.add({"part": "loader", **json.loads(peer.answer())})
    peer.close()
    return True


def leave_out(kept: KeptLines, config: Config, num_classes: int, arguments: Options, data: Path, folder: Path,
              ends: float) -> bool:
    """Train the runs with one ingredient left out that `kept` lacks, side by side; returns whether all are complete.

    It goes seed by seed, so that an interrupted measurement has all ingredients for some seeds.
    """
    possible = variants(config, num_classes)
    if unknown := set(arguments.without) - possible.keys():
        raise UserError(f"--without {', '.join(sorted(unknown))}: choose from {', '.join(possible)}")
    cases = [(name, possible[name], seed) for seed, name in itertools.product(
        range(1, arguments.seeds + 1), arguments.without or possible)
        if not has(kept.lines, part="ingredients", without=name, seed=seed)]

    def run(name: str, variant: Config, seed: int) -> Line:
        place = folder / f"{'-'.join(name.split())}-{seed}"
        train(replace(variant, validate_every=variant.epochs), data, seed, place)
        return {"part": "ingredients", "without": name, "seed": seed, "top1": last_top1(place)}

    with until(ends, arguments.side_by_side) as start:
        return keep_all(kept, [start(run, *case) for case in cases])


def last_top1(run: Path) -> float:
    """Top-1 of a run's last validation, as a fraction."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    top1: float = [line["val_top1"] for line in lines if line["event"] == "epoch" and line["val_top1"] is not None][-1]
    return top1


# --- table, plot and figures ---


def without(lines: Sequence[Line], name: str) -> dict[int, float]:
    """Top-1 in % by seed, of the runs without an ingredient."""
    return {line["seed"]: 100 * line["top1"] for line in lines
            if line["part"] == "ingredients" and line["without"] == name}


def table(lines: Sequence[Line]) -> str:
    """The gain of each ingredient as a Markdown table: accuracies, and differences between runs of equal seeds."""
    whole = without(lines, NONE_LEFT_OUT)
    rows = ["| left out | top-1, % | it adds, points |", "|---|---|---|"]
    for name in (NONE_LEFT_OUT, *INGREDIENTS, ALL, BCE):
        found = without(lines, name)
        if not found:
            continue
        adds = [whole[seed] - top1 for seed, top1 in found.items() if seed in whole]
        shown = "" if name == NONE_LEFT_OUT or not adds else mean_and_deviation(adds)
        rows.append(f"| {name} | {mean_and_deviation(list(found.values()))} | {shown} |")
    return "\n".join(rows)


def plot(lines: Sequence[Line], path: Path) -> None:
    """Plot accuracy over seconds, and accuracy without each ingredient."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for color, program in enumerate(("ours", "pytorch")):
        for number, run in enumerate(by_seed(compared(lines), program)):
            label = None if number else {"ours": "ours"}.get(program, run[0]["peer"])
            left.plot([line["seconds"] for line in run], [100 * line["top1"] for line in run], f"C{color}.-",
                      linewidth=1, label=label)
    left.set(xlabel="seconds of training and validation", ylabel="validation top-1, %")
    names = [name for name in (NONE_LEFT_OUT, *INGREDIENTS, ALL, BCE) if without(lines, name)]
    for place, name in enumerate(names):
        values = list(without(lines, name).values())
        right.plot(values, [place] * len(values), "C0.", alpha=0.5)
        right.plot(statistics.mean(values), place, "C0|", markersize=14)
    right.set(xlabel="validation top-1, %", title="left out")
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    if compared(lines):
        left.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def publish(lines: Sequence[Line], folder: Path, parts: Sequence[PartName]) -> None:
    """Write the plot, and the figures of the comparison if it is complete and one of `parts`."""
    folder.mkdir(parents=True, exist_ok=True)
    plot(lines, folder / f"{NAME}.png")
    ours, theirs = (by_seed(compared(lines), program) for program in ("ours", "pytorch"))
    if "comparison" in parts and min(len(ours), len(theirs)) >= record.MIN_RUNS:
        name = f"{theirs[0][0]['peer']}, same recipe"
        top1s, seconds = ([[scale * run[-1][key] for run in runs] for runs in (ours, theirs)]
                          for key, scale in (("top1", 100), ("seconds", 1e3)))
        record.write_result(NAME, top1s[0], peer=record.Peer(name, top1s[1]), folder=folder, unit="top-1 %")
        record.write_result(SECONDS, seconds[0], peer=record.Peer(name, seconds[1]), folder=folder)
    print(table(lines))


def about(config: Config, arguments: Options) -> dict[str, Any]:
    """The settings that all lines of a file share."""
    changed: Mapping[str, Any] = {field.name: value for field in dataclasses.fields(config)
                                  if (value := getattr(config, field.name)) != field.default}
    return {"recipe": dict(changed), "images_per_class": arguments.images_per_class}


def main() -> None:
    arguments = read_options(Options)
    if "comparison" in arguments.parts:
        require_peer()
    config = configuration(arguments)
    kept = KeptLines(arguments.results / f"{NAME}.jsonl", about(config, arguments))
    ends = time.monotonic() + arguments.limit if arguments.limit else math.inf
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = arguments.data
        if arguments.images_per_class:
            data = few(data, arguments.images_per_class, folder / "data")
        num_classes = len(open_source(data, "train").classes)
        done = ("comparison" not in arguments.parts or compare(kept, config, arguments, data, folder, ends)) and (
            "ingredients" not in arguments.parts
            or leave_out(kept, config, num_classes, arguments, data, folder, ends))
    publish(kept.lines, arguments.results, arguments.parts)
    if not done:
        tell_what_is_left()


if __name__ == "__main__":
    record.run(main)
