"""The items of a comparison: runs with their figures, and the runs of one configuration."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from common.command_line import option_name
from train.errors import TrainError
from train.recording.metrics import interval
from train.report import classifier
from train.report.runs import Run
from train.report.summary import Summary

SEED = "seed"
OF_PLACE = ("output", "resume")  # options that only determine where a run is stored


@dataclass(frozen=True)
class Figure:
    """A figure of the runs of one configuration. `values` has the values of all runs that have the figure, at least
    one.
    """

    values: tuple[float, ...]
    num_runs: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The sample's standard deviation; None for a single value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def text(self, form: Callable[[float], str]) -> str:
        """Mean and deviation as text; if not all runs have the figure, also the number of runs that have it."""
        spread = "" if self.deviation is None else f" ± {form(self.deviation)}"
        share = f" ({len(self.values)} of {self.num_runs})" if len(self.values) < self.num_runs else ""
        return f"{form(self.mean)}{spread}{share}"


@dataclass(frozen=True)
class Member:
    """A run of the comparison."""

    name: str
    run: Run
    summary: Summary

    @cached_property
    def validated(self) -> list[tuple[int, float, float]]:
        """(epoch, hours, top-1) of each validation; evaluations on training images do not count."""
        return [(row.epoch, row.hours, row.val_top1) for row in self.run.record.epochs if row.val_top1 is not None]

    @cached_property
    def validation_images(self) -> int | None:
        """The number of validation images; runs of earlier versions have it only in their report."""
        known = next((row.val_count for row in reversed(self.run.record.epochs) if row.val_count), None)
        if known or not self.validated:
            return known
        try:
            found = classifier.read(self.run.folder / "report")
        except TrainError:
            return None
        return found.outcomes.num_images if found and not found.is_of_training else None

    @property
    def best_top1(self) -> float | None:
        """`Run.best_top1`; None without validation."""
        return None if math.isnan(self.run.best_top1) else self.run.best_top1

    @property
    def plugin_metrics(self) -> Mapping[str, float]:
        """The metrics of plug-ins on the validation images, by name, in the epoch of `best_top1`."""
        best = self.run.best_epoch
        return best.plugin_metrics if best and self.best_top1 is not None else {}

    @property
    def last_top1(self) -> float | None:
        return self.validated[-1][-1] if self.validated else None

    def interval(self, top1: float) -> tuple[float, float] | None:
        """The 95 % interval of an accuracy of this run; None without a known number of images."""
        count = self.validation_images
        return interval(top1, count) if count else None

    def seconds_to(self, accuracy: float) -> float | None:
        """Seconds from the run's start to the end of the first validation that reaches an accuracy; None if no
        validation does.
        """
        return next((3600 * hours for _, hours, top1 in self.validated if top1 >= accuracy), None)

    @property
    def joules(self) -> float | None:
        per_image = self.summary.joules_per_image
        return None if per_image is None else per_image * float(self.run.record.images.sum())

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Options and surroundings, by the names that the table of differences shows."""
        record = self.run.record
        options = {option_name(name): value for name, value in self.run.options.items() if name not in OF_PLACE}
        machine = ", ".join(record.hardware.get("gpus") or [str(record.hardware.get("cpu", ""))])
        return {**options, "machine": machine, "processes": record.num_processes,
                "commit": (record.git_commit or "")[:8]}

    @cached_property
    def configuration(self) -> str:
        """The options without the seed: equal for runs of one row."""
        return repr(sorted((name, value) for name, value in self.run.options.items()
                           if name not in (*OF_PLACE, SEED)))


@dataclass(frozen=True)
class Row:
    """The runs of one configuration."""

    name: str
    members: tuple[Member, ...]

    def figure(self, of: Callable[[Member], float | None]) -> Figure | None:
        values = tuple(value for value in map(of, self.members) if value is not None)
        return Figure(values, len(self.members)) if values else None

    def setting(self, name: str) -> list[Any]:
        """The values of a setting in the runs, without duplicates."""
        found: list[Any] = []
        for member in self.members:
            if (value := member.settings.get(name)) not in found:
                found.append(value)
        return found


MEASURES: Mapping[str, Callable[[Member], float | None]] = {
    "best_top1": lambda member: member.best_top1,
    "last_top1": lambda member: member.last_top1,
    "images_per_sec": lambda member: member.summary.total.mean,
    "seconds": lambda member: member.run.record.seconds,
    "joules_per_image": lambda member: member.summary.joules_per_image,
    "joules": lambda member: member.joules,
    "gpu_memory": lambda member: member.summary.gpu_memory,
    "price": lambda member: member.summary.price,
}
