"""Section cost: time and money until CIFAR-10 reaches an accuracy, from a whole run of `python -m train` as a user
starts it.

On a CPU the run trains on the built-in sample set, which takes a minute. The time runs from the first step to the end
of a validation. Two parts are excluded: writing checkpoints, and steps that the run repeats after a kill. The start-up
of the program, which chooses kernels, is reported separately.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from gpu_report.figures import PRICE, Figure, Section
from gpu_report.section import Bench
from pipelines.options import SAMPLES
from pipelines.sources import open_source
from train.commands.compare_precision import run_training
from train.config import CONFIG_FILE, Config, default_warmup
from train.errors import TrainError
from train.presets import load_preset
from train.recording.metrics import METRICS_FILE


@dataclass(frozen=True)
class Recipe:
    """A training to measure: its name in tables (`what`), preset, epochs, and default target accuracy."""

    what: str
    preset: str
    epochs: int
    target_accuracy: float


# 88 %: PyTorch's accuracy with this recipe minus two standard deviations was 88.4 % (docs/recipes.md).
CIFAR10 = Recipe("CIFAR-10, ResNet-18, 128 pixels", "cifar10_resnet18", 18, 0.88)
SAMPLE = Recipe("sample set, ResNet-50, 32 pixels", "cpu_sample", 3, 0.5)

LEAST_SECONDS = 30.0  # seconds left below which the run is not begun; the run itself takes a minute or two on a CPU
RUN_FOLDER = "cost_run"  # inside the report's folder
WHOLE_RUN = "the whole run"  # `size` of the figure that every run has
COUNTED_BY = ("target_accuracy", "price_per_hour")  # options whose values the figure WHOLE_RUN records
CIFAR10_IMAGES, CIFAR10_CLASSES = {"train": 50_000, "val": 10_000}, 10


def check_data(data: str) -> None:
    """Check that the data has as many images and classes as CIFAR-10, because the figures are labelled CIFAR-10.

    Raises:
        DataError: there are no images, or they cannot be read.
        TrainError: the number of images or classes differs.
    """
    if data == SAMPLES:
        raise TrainError("--data samples is not CIFAR-10: leave it out; on a CPU the section cost then trains on the "
                         "sample set")
    for split, num_images in CIFAR10_IMAGES.items():
        source = open_source(data, split, CIFAR10_CLASSES)
        if (len(source), len(source.classes)) != (num_images, CIFAR10_CLASSES):
            raise TrainError(
                f"--data {data} is not CIFAR-10, on which the section cost trains: its split {split} has "
                f"{len(source):,} images of {len(source.classes):,} classes, not {num_images:,} of {CIFAR10_CLASSES}; "
                "give the path of CIFAR-10, or leave --data out"
            )


def measure(bench: Bench) -> Section:
    """Train, or resume the run. If the run is complete, only compute time and price again, for a new target or price.
    """
    if bench.on_gpu and not bench.data:
        bench.leave_out("time and cost to accuracy", "CIFAR-10 is missing: give its path with --data "
                                                     "(docs/data.md)")
        return bench.found()
    folder = bench.folder / RUN_FOLDER
    if not bench.figures and not folder.exists() and not bench.has_time("time and cost to accuracy", LEAST_SECONDS):
        return bench.found()
    recipe = CIFAR10 if bench.data else SAMPLE
    config = _config(bench, recipe)
    launched = time.time()
    run_training(config, folder)
    # the run writes its configuration as soon as everything is built
    startup = (folder / CONFIG_FILE).stat().st_mtime - launched
    if startup < 0:  # the run was complete before, so this process has not started it
        startup = max((figure.more.get("startup_seconds", 0.0) for figure in bench.figures), default=0.0)
    bench.figures = []
    precision = "fp16" if bench.on_gpu and bench.placement.executor == "cuda" else "fp32"
    lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    bench.add(*_figures(bench, recipe, validations(map(json.loads, lines)), precision, startup))
    return bench.found()


def given_before(folder: Path, section: Section) -> dict[str, Any]:
    """The options --data and COUNTED_BY of the earlier start that computed this section's figures, by name; only
    options that were given.
    """
    whole = [figure for figure in section.figures if (figure.size, figure.unit) == (WHOLE_RUN, "s")]
    found = {name: figure.more[name] for figure in whole for name in COUNTED_BY if name in figure.more}
    config_file = folder / RUN_FOLDER / CONFIG_FILE
    if config_file.exists():
        data = json.loads(config_file.read_text(encoding="utf-8"))["data"]
        found |= {"data": data} if data != load_preset(SAMPLE.preset).data else {}
    return found


class Validation(NamedTuple):
    """The result of the validation after an epoch."""

    epoch: int  # counted from 1
    seconds: float  # since the beginning of the first step
    top1: float  # fraction of the images


def validations(lines: Iterable[Mapping[str, Any]]) -> list[Validation]:
    """A run's validations, from the lines of its metrics.jsonl.

    Steps repeated after a kill count once: when a session resumes from a checkpoint, its clock starts with the seconds
    counted up to that checkpoint.
    """
    found: dict[int, Validation] = {}
    left_out = 0.0  # seconds of the run that are not counted
    step = 0  # the latest logged step; the step of a checkpoint is logged before the phase that captures the checkpoint
    counted: dict[int, float] = {}  # number of optimizer steps done -> seconds counted up to that step
    is_first_session = True
    for line in lines:
        event = line["event"]
        if event == "session":
            if not is_first_session:
                left_out = line["time"] - counted.get(line["step"], 0.0)
            is_first_session, step = False, line["step"]
        elif event == "phase" and line["name"] == "checkpoint":
            left_out += line["seconds"]
            counted[step] = line["time"] - left_out
        elif event == "steps":
            step = line["step"]
            counted[step] = line["time"] - left_out
        elif event == "epoch" and line["val_top1"] is not None:
            found[line["epoch"]] = Validation(line["epoch"], line["time"] - left_out, line["val_top1"])
    return list(found.values())


def _config(bench: Bench, recipe: Recipe) -> Config:
    preset = load_preset(recipe.preset)
    return replace(preset, epochs=recipe.epochs, warmup_epochs=default_warmup(preset, recipe.epochs),
                   data=bench.data or preset.data, device="gpu" if bench.on_gpu else "cpu",
                   tensorboard=False, validate_every=1, checkpoint_minutes=0.0, output=str(bench.folder / RUN_FOLDER))


def _figures(bench: Bench, recipe: Recipe, rows: Sequence[Validation], precision: str,
             startup: float) -> Iterator[Figure]:
    target = bench.target_accuracy or recipe.target_accuracy
    percent = f"{100 * target:.10g}%"  # with all digits, because figures are compared only if their targets are equal
    for epoch, seconds, top1 in rows:
        yield Figure(recipe.what, f"epoch {epoch}", precision, 100 * top1, "top-1 %", more={"seconds": seconds})
    reached = next((seconds for _, seconds, top1 in rows if top1 >= target), None)
    if reached is None:
        bench.leave_out(f"the time to {percent}", f"{rows[-1].epoch} epochs reach only {rows[-1].top1:.1%}")
    spans = {} if reached is None else {f"to {percent} top-1": reached}
    more = {"startup_seconds": startup} if startup > 0 else {}
    given = {name: value for name in COUNTED_BY if (value := getattr(bench, name))}
    for size, seconds in (spans | {WHOLE_RUN: rows[-1].seconds}).items():
        yield Figure(recipe.what, size, precision, seconds, "s", more=more | given if size == WHOLE_RUN else more)
        if bench.price_per_hour:
            yield Figure(recipe.what, size, precision, bench.price_per_hour * seconds / 3600, PRICE)
