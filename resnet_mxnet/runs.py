"""Trains runs, and reads their results."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.phases import phases
from resnet_mxnet.networks import TrainedNetwork, load
from train.command_line import values_of
from train.commands import train as command
from train.config import Config
from train.errors import TrainError
from train.recording.metrics import accuracy_of
from train.report import runs
from train.report.comparison import Comparison
from train.report.comparison import compare as compare_folders
from train.report.notebook import columns, summary_html


class Run(runs.Run):
    """A run, with the results that its folder had when the run was read. `train`, `load_run` and `list_runs` make them.
    A notebook shows it as a table with its curves.
    """

    def __repr__(self) -> str:
        if self.damage:
            return f"Run({str(self.folder)!r}: {self.state})"
        best = self.best_epoch
        found = best.evaluation if best else None
        reached = f", {accuracy_of(found.images)} {found.top1:.1%} in epoch {best.epoch}" if best and found else ""
        return f"Run({str(self.folder)!r}: {len(self.record.epochs)} epochs{reached})"

    def _repr_html_(self) -> str:
        if self.damage:
            return f"<p>{html.escape(self.damage)}</p>"
        return summary_html(self.folder, self.record)

    @property
    def config(self) -> dict[str, Any]:
        """The run's options by name, with the values that it had."""
        return dict(self.record.config)

    @cached_property
    def history(self) -> dict[str, np.ndarray]:
        """Columns by epoch, each (epochs,): `epoch` (from 1), `hours`, `images_per_sec`, `train_loss` (nats),
        `train_top1`, `val_loss`, `val_top1`, `val_top5` (fractions) and others; NaN in epochs without a value. Columns
        without any value are left out.
        """
        return columns(self.record.epochs)

    @cached_property
    def steps(self) -> dict[str, np.ndarray]:
        """Columns by log line, each (lines,): `step`, `epoch` (with its fraction), `loss` (nats), `top1`,
        `learning_rate` and `skipped_steps`, each a mean over the steps since the previous line.
        """
        return columns(self.record.loss_curve)

    def load(self, **options: Any) -> TrainedNetwork:
        """The run's network with its best weights; options and errors as in `resnet_mxnet.load`."""
        return load(self.folder, **options)


def train(*, callbacks: Sequence[Any] = (), **options: Any) -> Run:
    """Train a network, as the command `train` does, and print its progress.

        run = rm.train(data="photos", val_split=0.1, epochs=5)
        run = rm.train(data="photos", weights="resnet18.safetensors", config="finetune", output="runs/photos")
        run = rm.train(resume="runs/photos", epochs=10)

    Args: callbacks: functions that are called at the end of each epoch with its number (from 1) and its results by
        name, such as `train_loss`, `val_top1` (fractions; `Run.history` has the names). If one returns True, or a
        sentence that says why, the run ends there. Objects and classes with the hooks of `callback` are accepted too.
        options: those of `resnet-mxnet train --help`, with underscores: `batch_size=64` for --batch-size 64,
            `tensorboard=False` for --no-tensorboard. Paths may be `pathlib.Path`; None counts as not given.

    Returns:
        The run. Its folder has the checkpoints and the report.

    Raises: UserError: a mistake in the options, the data or the weights. The text is the message of the command line.
        StoppedBySignal: Ctrl-C (in a notebook: interrupt), SIGTERM or SIGHUP arrived, in the main thread. The run is
            saved; `train(resume=folder)` resumes it. In other threads signals are left to the program.
    """
    phases.begin()
    return Run.read(command.run(values_of(Config, options, command="train"), callbacks))


def load_run(folder: str | os.PathLike[str]) -> Run:
    """Read the run in a folder; the run may still be training.

        rm.load_run("runs/photos").history["train_loss"]

    Raises: UserError: the folder has no run, or its metrics cannot be read.
    """
    return Run.read(_folder(folder))


def list_runs(folder: str | os.PathLike[str] = "runs") -> list[Run]:
    """The runs in a folder and up to three levels below it, as the command `runs` lists them: the run that changed last
    comes first.

        for run in rm.list_runs():
            print(run.folder, run.state, run.best_top1, run.config.get("learning_rate"))

    A run whose metrics cannot be read has the state "damaged", no history, and in `reason` a sentence that says why.

    Raises: UserError: the folder does not exist.
    """
    return Run.list_runs([_folder(folder)])


def compare(*folders: str | os.PathLike[str], accuracies: Sequence[float] = ()) -> Comparison:
    """Set runs side by side, as the command `compare` does: options in which they differ, accuracies with their 95 %
    intervals, speed, energy and memory. Runs that differ only in their seed are one row.

        found = rm.compare("runs/a", "runs/b")
        print(found.markdown())

    Args: folders: run folders, or folders that hold some. accuracies: top-1 accuracies (fractions) for the time to
        accuracy; (): a choice of accuracies that the runs reach.

    Raises: UserError: a folder does not exist or has no run that can be compared, or an accuracy is not above 0 and at
        most 1.
    """
    return compare_folders([_folder(folder) for folder in folders], _checked(accuracies))


def _folder(given: Any) -> Path:
    """The folder that a program has passed, as a Path. Raises TrainError if `given` is not a path, or is "", which
    would mean the working folder.
    """
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        raise TrainError(f"{given!r} is not a folder: give the path of a run, or of a folder that holds runs")
    return Path(given)


def _checked(accuracies: Any) -> tuple[float, ...]:
    try:
        found = tuple(map(float, accuracies))
    except (TypeError, ValueError):
        found = (math.nan,)
    if not all(0 < accuracy <= 1 for accuracy in found):
        raise TrainError(f"accuracies is {accuracies!r}: give a list of fractions above 0 and at most 1, such as [0.7]")
    return found
