"""Section cost: time and money to an accuracy on CIFAR-10, by a whole run of `python -m train` as a user starts it.

On a CPU it is the built-in sample set, which trains in a minute. Time counts from the beginning of the first step to
the end of a validation, with all that is between; starting the program, which chooses kernels, is given apart.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from train.commands.compare_precision import run_training
from train.config import CONFIG_FILE, Config, default_warmup, load_preset
from train.gpu_report.figures import Figure, Section
from train.gpu_report.section import Bench
from train.reporting.metrics import RunRecord


@dataclass(frozen=True)
class Recipe:
    """What is trained: `what` in tables, the preset, its length and the accuracy that counts by default."""

    what: str
    preset: str
    epochs: int
    target_accuracy: float


# 88 %: what PyTorch reaches with this recipe, less two standard deviations, was 88.4 % (docs/recipes.md).
CIFAR10 = Recipe("CIFAR-10, ResNet-18, 128 pixels", "cifar10_resnet18", 18, 0.88)
SAMPLE = Recipe("sample set, ResNet-50, 32 pixels", "cpu_sample", 3, 0.5)


def measure(bench: Bench) -> Section:
    """The run; it goes on where it was stopped."""
    if bench.on_gpu and not bench.data:
        bench.leave_out("time and cost to accuracy", "no CIFAR-10 was given: add --data and a place that holds it "
                                                     "(docs/data.md)")
        return bench.found()
    recipe = CIFAR10 if bench.data else SAMPLE
    config, folder = _config(bench, recipe), bench.folder / "training"
    launched = time.time()
    record = run_training(config, folder)
    startup = (folder / CONFIG_FILE).stat().st_mtime - launched  # it is written when everything is built
    precision = "fp16" if bench.on_gpu and bench.placement.executor == "cuda" else "fp32"
    bench.add(*_figures(bench, recipe, record, precision, startup))
    return bench.found()


def _config(bench: Bench, recipe: Recipe) -> Config:
    preset = load_preset(recipe.preset)
    return replace(preset, epochs=recipe.epochs, warmup_epochs=default_warmup(preset, recipe.epochs),
                   data=bench.data or preset.data, device="gpu" if bench.on_gpu else "cpu",
                   price_per_hour=bench.price_per_hour, tensorboard=False, validate_every=1, checkpoint_minutes=0.0,
                   output=str(bench.folder / "training"))


def _figures(bench: Bench, recipe: Recipe, record: RunRecord, precision: str, startup: float) -> list[Figure]:
    target = bench.target_accuracy or recipe.target_accuracy
    rows = [(row.epoch, 3600 * row.hours, row.evaluation.top1) for row in record.epochs if row.evaluation]
    figures = [Figure(recipe.what, f"epoch {epoch}", precision, 100 * top1, "top-1 %", more={"seconds": seconds})
               for epoch, seconds, top1 in rows]
    reached = next((seconds for _, seconds, top1 in rows if top1 >= target), None)
    if reached is None:
        bench.leave_out(f"the time to {target:.0%}", f"{rows[-1][0]} epochs end at {rows[-1][2]:.1%}")
    spans = {f"to {target:.0%} top-1": reached, "the whole run": rows[-1][1]}
    for size, seconds in spans.items():
        if seconds is None:
            continue
        more = {"startup_seconds": startup} if startup > 0 else {}  # of a run that was complete already
        figures.append(Figure(recipe.what, size, precision, seconds, "s", more=more))
        if bench.price_per_hour:
            figures.append(Figure(recipe.what, size, precision, bench.price_per_hour * seconds / 3600, "price"))
    return figures
