"""Run folders in the recorder's format, made without training: their times and accuracies are given."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from graph_passes.executors import Metrics
from train.config import CONFIG_FILE, Config
from train.recording.gpu_monitor import GpuReadings
from train.recording.metrics import METRICS_FILE, VALIDATION
from train.recording.recorder import Recorder

IMAGES_PER_STEP, STEPS = 10, 4  # STEPS: steps of an epoch
VALIDATION_IMAGES = 44


class Clock:
    """A clock in seconds that the test advances."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def make_run(folder: Path, right: Sequence[int | None], *, step_seconds: float = 1.0, watts: float | None = None,
             evaluated: str = VALIDATION, plugin_metrics: Sequence[Mapping[str, float]] = (),
             error: Exception | None = None, leave_open: bool = False, **options: Any) -> Recorder:
    """Write a run of `len(right)` epochs, each of STEPS steps of `step_seconds` and 2 s of validation.

    Args:
        right: for each epoch how many of VALIDATION_IMAGES are right; None: no validation.
        watts: the power of a GPU; None: there is none.
        plugin_metrics: metrics of plug-ins, for each epoch by name.
        error: the exception that ends the run; None: the run completes.
        leave_open: do not end the run.
        options: fields of the configuration.
    """
    config = dataclasses.replace(Config(), **{"epochs": len(right), **options})
    clock = Clock()
    recorder = Recorder(folder, config=config.to_dict(), images_per_step=IMAGES_PER_STEP, num_epochs=config.epochs,
                        log_every=2, num_classes=10, evaluated=evaluated, warmup_steps=0, tensorboard=False,
                        console=Console(file=io.StringIO()), clock=clock)
    (folder / CONFIG_FILE).write_text(json.dumps(config.to_dict()))
    recorder.__enter__()
    for epoch, hits in enumerate(right):
        _train_epoch(recorder, clock, epoch, step_seconds, watts)
        found = None
        if hits is not None:
            with recorder.phase(VALIDATION):
                clock.seconds += 2
            found = Metrics(1.5 * VALIDATION_IMAGES, hits, VALIDATION_IMAGES, VALIDATION_IMAGES)
        recorder.end_epoch(found, plugin_metrics=plugin_metrics[epoch] if plugin_metrics else None)
    if not leave_open:
        recorder.__exit__(type(error) if error else None, error, None)
    return recorder


def _train_epoch(recorder: Recorder, clock: Clock, epoch: int, step_seconds: float, watts: float | None) -> None:
    recorder.begin_epoch(epoch, STEPS)
    for _ in recorder.timed(range(STEPS)):
        clock.seconds += step_seconds
        recorder.end_step(0.1)
        if recorder.log_due:
            recorder.close_interval()
            count = IMAGES_PER_STEP
            gpu = None if watts is None else GpuReadings(watts, 0.5, 3.0, 1500.0, 0.0)
            recorder.log(Metrics(2.0 / (epoch + 1) * count, 0.5 * count, count, count), gpu)


def rewrite(folder: Path, change: Any) -> None:
    """Change the lines of a run's metrics. `change` maps a line, a dict, to the new one; None removes the line."""
    path = folder / METRICS_FILE
    lines = map(change, map(json.loads, path.read_text().splitlines()))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))
