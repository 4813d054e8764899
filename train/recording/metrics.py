"""The measurements of a run: the speed of steps, and the `RunRecord` behind metrics.jsonl, report.json and the report.

A run's metrics.jsonl has one JSON object per line. `RunRecord.apply` adds one such line to the record. The recorder
calls it during a run, and `RunRecord.read_jsonl` afterwards, so the record of a killed run is complete up to its last
line.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.content import content_of_file
from train.options.language_model import LANGUAGE_MODEL
from train.recording.gpu_monitor import GpuReadings

SCHEMA = 1
METRICS_FILE = "metrics.jsonl"  # in a run's output folder

UNITS = {
    "images": "of a language model's run: words",
    "count": "images that the accuracies are of",
    "time": "s since the start of the run, summed over its sessions",
    "step": "optimizer steps done since the start of the run",
    "epoch": "epochs, counted from 1",
    "step_ms": "ms",
    "loader_wait_ms": "ms",
    "compute_ms": "ms",
    "images_per_sec": "images/s, all processes together; without a session's first step where there are others",
    "images_per_sec_uncertainty": "images/s, standard error of the mean; null for a single step",
    "images_per_sec_jitter": "images/s, 1.4826 x median absolute deviation; null for a single step",
    "loader_images_per_sec": "images/s, all processes together",
    "loss": "nats per image",
    "top1": "fraction of images",
    "top5": "fraction of images",
    "balanced_top1": "fraction of images, mean of the classes; of uneven classes, and with --balance",
    "plugin_metrics": "of each plug-in's metric by name: its mean over the images of the evaluation",
    "learning_rate": "1",
    "last_step_images": "images of the last of the steps, where it has fewer than --accumulate batches",
    "skipped_steps": "optimizer steps that changed no weight, since a gradient was not finite",
    "skipped_images": "images of the epoch and its validation that cannot be decoded",
    "gradient_norm": "norm of all gradients of the last of the steps together, before clipping; with --clip-norm",
    "gpu_power": "W, all GPUs together",
    "gpu_utilization": "fraction of the time in which a kernel ran, mean of the GPUs",
    "gpu_memory": "GiB in use by any program, mean of the GPUs",
    "gpu_clock": "MHz of the multiprocessors, mean of the GPUs",
    "gpu_power_capped": "fraction of the time in which the power limit held the clock down, mean of the GPUs",
    "price": "whatever --price-per-hour is in",
    "hours": "h",
    "seconds": "s",
    "start_seconds": "s from the start of a session's command to its record, by phase; not part of time",
}


# Reason for the end of a session -> whether this completes the run. The reason "measured" belongs to benchmarks.
REASONS = {"epochs": True, "target_accuracy": True, "patience": True, "callback": True, "measured": True,
           "max_steps": False, "time_limit": False, "signal": False, "error": False}
STOPPED = ("signal", "error")
IMAGES, WORDS = "images", "words"  # the examples of a run: images, or the words of a language model


class Speed(NamedTuple):
    """Examples/sec of a series of steps: mean, standard error of the mean, jitter; for a single step only the mean."""

    mean: float
    uncertainty: float | None
    jitter: float | None

    @property
    def spread(self) -> str:
        """Uncertainty and jitter, in words."""
        if self.uncertainty is None or self.jitter is None:
            return "(a single step)"
        return f"+/- {self.uncertainty:,.1f} (jitter = {self.jitter:,.1f})"

    def __str__(self) -> str:
        return f"{self.mean:.1f} {self.spread.replace(',', '')}"


def speed(step_ms: Sequence[float] | np.ndarray, images_per_step: int | np.ndarray) -> Speed:
    """The speed of steps that took `step_ms` milliseconds each, as in tf_cnn_benchmarks. `images_per_step`: one number
    for all steps, or one for each.

    Mean: images divided by the mean step time. Uncertainty: standard deviation of the steps' speeds divided by the root
    of their number. Jitter: 1.4826 times the median absolute deviation of the speeds, a standard deviation robust to
    outliers. Source: github.com/tensorflow/benchmarks, scripts/tf_cnn_benchmarks/benchmark_cnn.py, `get_perf_timing`.
    """
    seconds = np.asarray(step_ms, dtype=np.float64) / 1e3
    if not len(seconds):
        raise ValueError("speed() needs at least one step")
    mean, speeds = float(np.mean(images_per_step) / seconds.mean()), images_per_step / seconds
    if len(seconds) == 1:
        return Speed(mean, None, None)
    return Speed(
        mean=mean,
        uncertainty=float(speeds.std() / math.sqrt(len(speeds))),
        jitter=float(1.4826 * np.median(np.abs(speeds - np.median(speeds)))),
    )


def perplexity(loss: float) -> float:
    """exp(loss), for the mean loss per word in nats; infinity if it does not fit into a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def shown_perplexity(loss: float) -> str:
    """The perplexity as text; only its order of magnitude if the model has diverged."""
    value = perplexity(loss)
    return f"{value:,.2f}" if value < 1e6 else f"{value:.1e}"


Z_95 = 1.959964  # standard deviations of the normal distribution that contain 95 %
WIDE = 0.02  # width from which an interval is worth printing


def interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share of `count` (at least 1) independent cases, by Wilson's score.

    This interval is also valid for few cases, and near 0 and 1. Source: Wilson, J. Am. Stat. Assoc. 22 (1927), 209-212;
    recommended by Brown, Cai and DasGupta, Statistical Science 16 (2001), 101-133.
    """
    z2 = Z_95**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z_95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def shown_interval(share: float, count: int | None) -> str:
    """The interval of an accuracy as text, in percent: "53 to 80 %". "" if `count` is unknown, or so large that the
    interval is narrow."""
    if not count:
        return ""
    low, high = interval(share, count)
    return f"{100 * low:.0f} to {100 * high:.0f} %" if high - low >= WIDE else ""


VALIDATION, TRAINING_IMAGES = "validation", "training images"
# Images used for the accuracy after an epoch -> prefix of the fields in an `EpochRow`, metrics.jsonl and TensorBoard.
EVALUATED = {VALIDATION: "val", TRAINING_IMAGES: "train_eval"}


def accuracy_of(images: str, top: str = "top-1") -> str:
    """The name of an accuracy: on the validation images, or on the training images if there are no validation images.
    """
    return f"{VALIDATION} {top}" if images == VALIDATION else f"{top} on the {images}"


def tells_top5(num_classes: int | None) -> bool:
    """Whether top-5 accuracy is meaningful for this number of classes (None: unknown); with five classes it is always
    100 %.
    """
    return num_classes is None or num_classes > 5


class Evaluation(NamedTuple):
    """The results of an evaluation after an epoch."""

    images: str  # VALIDATION or TRAINING_IMAGES
    loss: float
    top1: float  # fraction of the images
    top5: float
    balanced_top1: float | None  # mean over the classes; only for uneven classes, and with --balance
    num_images: int | None  # None in runs of earlier versions


@dataclass
class EpochRow:
    """Results of one epoch. Accuracies are fractions; None without an evaluation on these images."""

    epoch: int  # counted from 1
    hours: float  # training time from the start of the run to the end of the epoch's validation
    images_per_sec: float | None  # training steps only; None if all of them were warm-up
    train_loss: float | None = None
    train_top1: float | None = None
    val_loss: float | None = None
    val_top1: float | None = None
    val_top5: float | None = None
    val_balanced_top1: float | None = None
    # loss on the training images, prepared as for validation, if there are no validation images
    train_eval_loss: float | None = None
    train_eval_top1: float | None = None
    train_eval_top5: float | None = None
    train_eval_balanced_top1: float | None = None
    skipped_images: int = 0  # images of training and validation that cannot be decoded
    val_count: int | None = None  # images that were evaluated
    train_eval_count: int | None = None
    # plug-ins' metrics by name, means over the images of the evaluation; empty if there are none
    plugin_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def evaluation(self) -> Evaluation | None:
        """The evaluation on validation images, or on training images if there are no validation images; None: no
        evaluation in this epoch.
        """
        for images, prefix in EVALUATED.items():
            names = (*Evaluation._fields[1:-1], "count")
            values = [getattr(self, f"{prefix}_{name}") for name in names]
            if values[1] is not None:
                return Evaluation(images, *values)
        return None


@dataclass
class LossPoint:
    """Means over the steps since the previous point."""

    step: int
    epoch: float  # including the fraction of the current epoch
    loss: float
    top1: float
    learning_rate: float
    skipped_steps: int = 0  # steps that changed no weight; missing in runs of earlier versions


@dataclass
class GpuPoint:
    """Readings over the steps since the previous point, see `gpu_monitor.GpuReadings`; None: unknown."""

    step: int
    power: float | None
    utilization: float | None
    memory: float | None
    clock: float | None = None  # missing in runs of earlier versions, like the next field
    power_capped: float | None = None


@dataclass
class RunRecord:
    """All data of a run's report, over all its sessions.

    In the lists by step, item i belongs to step `steps_before` + i + 1.
    """

    config: dict[str, Any]  # configuration of the last session
    command: str  # command of the first session
    images_per_step: int  # images per step in the last session, over all processes and accumulated batches
    num_processes: int = 1
    num_classes: int | None = None  # classes of the network; missing in runs of earlier versions
    warmup_steps: int = 0  # steps at the start of every session that throughput excludes
    steps_before: int = 0  # step of the checkpoint, if the run began from another run's checkpoint
    start_date: str = ""  # ISO 8601, UTC
    git_commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    # time of each step, from requesting the batch to updated parameters
    step_ms: list[float] = field(default_factory=list)
    # part of step_ms: the longest wait of any process for its batch
    loader_wait_ms: list[float] = field(default_factory=list)
    compute_ms: list[float] = field(default_factory=list)  # step_ms without loader_wait_ms
    short_steps: list[list[int]] = field(default_factory=list)  # (index, images) of steps with fewer images
    session_starts: list[int] = field(default_factory=list)  # steps done at the start of each session
    session_images: list[int] = field(default_factory=list)  # images per step in each session
    seconds: float = 0.0  # total time of all sessions
    # time of the sessions' commands before training, by phase: imports, data, network, ...
    start_seconds: dict[str, float] = field(default_factory=dict)
    phase_seconds: dict[str, float] = field(default_factory=dict)  # validation, checkpoint, ...: time outside the steps
    loader_images_per_sec: float | None = None  # speed of the loader running alone, all processes together
    epochs: list[EpochRow] = field(default_factory=list)
    loss_curve: list[LossPoint] = field(default_factory=list)
    gpu_curve: list[GpuPoint] = field(default_factory=list)  # empty without a GPU
    events: list[dict[str, Any]] = field(default_factory=list)  # checkpoints, bad images, resumes, ...: {"event": ...}
    schema: int = SCHEMA

    @property
    def examples(self) -> str:
        """The unit of all fields named images: IMAGES, or WORDS for a language model."""
        return WORDS if self.config.get("config") == LANGUAGE_MODEL else IMAGES

    @property
    def tells_top5(self) -> bool:
        """Whether to show the run's top-5 accuracy."""
        return tells_top5(self.num_classes)

    @property
    def model(self) -> str:
        """The name of the network, also for runs of earlier versions, which had only ResNets; "": unknown."""
        if "vocabulary" in self.config:
            return "language model"
        return self.config.get("model") or (f"resnet{self.config['depth']}" if "depth" in self.config else "")

    @property
    def plugin_metrics(self) -> list[str]:
        """The names of the plug-ins' metrics that the run has measured."""
        return list(dict.fromkeys(name for row in self.epochs for name in row.plugin_metrics))

    def speed(self) -> Speed:
        """Speed of the whole run, with waits for the loader, without warm-up, validation and checkpoints."""
        return speed(np.asarray(self.step_ms)[self.counted_steps], self.images[self.counted_steps])

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunRecord:
        """The inverse of `to_dict`. Raises TypeError or KeyError for values that are not a record."""
        known = {f.name for f in dataclasses.fields(cls)}
        record = cls(**{name: value for name, value in values.items() if name in known})
        record.epochs = [EpochRow(**row) for row in values["epochs"]]
        record.loss_curve = [LossPoint(**point) for point in values["loss_curve"]]
        record.gpu_curve = [GpuPoint(**point) for point in values.get("gpu_curve", ())]
        return record

    @property
    def images(self) -> np.ndarray:
        """Images of each step."""
        images = np.full(len(self.step_ms), self.images_per_step)
        # these lists are empty in older reports
        for start, number in zip(self.session_starts, self.session_images, strict=False):
            images[start:] = number
        for index, number in self.short_steps:
            images[index] = number
        return images

    @property
    def counted_steps(self) -> np.ndarray:
        """Indices of the steps that count for throughput: all but the first `warmup_steps` of every session.

        If a session has no more steps than `warmup_steps`, its last step counts.
        """
        bounds = [*self.session_starts, len(self.step_ms)] if self.session_starts else [0, len(self.step_ms)]
        parts = [
            np.arange(min(first + self.warmup_steps, last - 1), last)
            for first, last in itertools.pairwise(bounds)
            if last > first
        ]
        return np.concatenate(parts) if parts else np.arange(0)

    @property
    def best(self) -> EpochRow | None:
        """The epoch whose weights are kept as the best; None without an evaluation. In runs of earlier versions, and if
        that epoch was undone, this is the epoch with the highest top-1.
        """
        rows = {row.epoch: row for row in self.epochs if row.evaluation}
        saved = [event["epoch"] for event in self.events if event.get("is_best") and "epoch" in event]
        if saved and saved[-1] in rows:
            return rows[saved[-1]]
        return max(rows.values(), key=lambda row: row.evaluation.top1 if row.evaluation else -1, default=None)

    @property
    def is_over(self) -> bool:
        """Whether the last session has ended regularly, not by a signal or an error."""
        last = self.events[-1] if self.events else {}
        # earlier versions gave no reason
        return last.get("event") == "end" and last.get("reason", "error" * (not last["completed"])) not in STOPPED

    @property
    def price(self) -> float | None:
        """The price of the run so far, with validation and with steps that were repeated; None without a price per
        hour."""
        per_hour = self.config.get("price_per_hour")
        return per_hour * self.seconds / 3600 if per_hour else None

    @property
    def skipped_steps(self) -> int:
        """The number of steps that changed no weight because a gradient was not finite."""
        return sum(point.skipped_steps for point in self.loss_curve)

    @property
    def steps_done(self) -> int:
        return self.steps_before + len(self.step_ms)

    def epoch_row(self, epoch: int, first_step: int, hours: float) -> EpochRow:
        """The training results of an epoch, which consists of all steps after `first_step`."""
        # Each point is a mean over the steps since the previous point.
        points = [point for point in self.loss_curve if point.step > first_step]
        weights = np.diff([first_step, *(point.step for point in points)])
        counted = self.counted_steps
        # A session shorter than its warm-up counts its last step, but that step does not measure the epoch's speed.
        warm = max(first_step - self.steps_before, self.session_starts[-1] + self.warmup_steps)
        counted = counted[counted >= warm]
        ms = np.asarray(self.step_ms)[counted].sum()
        return EpochRow(
            epoch=epoch,
            hours=hours,
            images_per_sec=self.images[counted].sum() / (ms / 1e3) if ms else None,
            train_loss=float(np.average([p.loss for p in points], weights=weights)) if points else None,
            train_top1=float(np.average([p.top1 for p in points], weights=weights)) if points else None,
        )

    def apply(self, line: Mapping[str, Any]) -> None:
        """Add one line of metrics.jsonl. Both the recorder and `read_jsonl` call this method, so their records are
        equal.
        """
        kind = line["event"]
        self.seconds = max(self.seconds, float(line.get("time", 0.0)))
        if kind == "units":
            return
        if kind == "session":
            self._begin_session(line)
        elif kind == "steps":
            self.step_ms += line["step_ms"]
            self.loader_wait_ms += line["loader_wait_ms"]
            self.compute_ms += line["compute_ms"]
            if "last_step_images" in line:
                self.short_steps.append([len(self.step_ms) - 1, line["last_step_images"]])
            if line["loss"] is not None:
                known = {f.name: line[f.name] for f in dataclasses.fields(LossPoint) if f.name in line}
                self.loss_curve.append(LossPoint(**known))
            if "gpu_power" in line:
                self.gpu_curve.append(GpuPoint(line["step"], *(line.get(f"gpu_{f}") for f in GpuReadings._fields)))
        elif kind == "epoch":
            # Earlier versions did not distinguish evaluations on training and validation images.
            names = [field.name for field in dataclasses.fields(EpochRow)]
            self.epochs.append(EpochRow(**{name: line[name] for name in names if name in line}))
        elif kind == "phase":
            self.phase_seconds[line["name"]] = self.phase_seconds.get(line["name"], 0.0) + line["seconds"]
        elif kind == "loader":
            self.loader_images_per_sec = line["images_per_sec"]
        else:
            self.events.append(dict(line))

    def _begin_session(self, line: Mapping[str, Any]) -> None:
        """Begin a first or a resumed session, at `step`. Steps after the last checkpoint of an interrupted session are
        removed, because they are done again; only their time stays in `seconds`. If earlier steps are missing (done in
        another run, or lost in a power cut), the lists by step begin here."""
        if not self.session_starts:
            self.start_date, self.command = line["date"], line["command"]
        else:
            self.events.append(self._resumed(line))
        keep = line["step"] - self.steps_before
        if not 0 <= keep <= len(self.step_ms):
            self.steps_before, keep = line["step"], 0
            self.loss_curve, self.gpu_curve = [], []
        for steps in (self.step_ms, self.loader_wait_ms, self.compute_ms):
            del steps[keep:]
        self.short_steps = [short for short in self.short_steps if short[0] < keep]
        self.session_starts = [start for start in self.session_starts if start < keep] + [keep]
        self.session_images = [*self.session_images[: len(self.session_starts) - 1], line["images_per_step"]]
        self.loss_curve = [point for point in self.loss_curve if point.step <= line["step"]]
        self.gpu_curve = [point for point in self.gpu_curve if point.step <= line["step"]]
        self.epochs = [row for row in self.epochs if row.epoch < line["epoch"]]
        for name in ("config", "images_per_step", "num_processes", "warmup_steps"):
            setattr(self, name, line[name])
        self.num_classes = line.get("num_classes")
        for name, seconds in line.get("start_seconds", {}).items():
            self.start_seconds[name] = self.start_seconds.get(name, 0.0) + seconds
        for name in ("git_commit", "versions", "hardware"):
            setattr(self, name, line[name])

    def _resumed(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """The event of a resumed session: the steps that it undoes, and the number of processes if it has changed."""
        event = {key: line[key] for key in ("time", "step", "date", "command")} | {"event": "resume"}
        if (undone := self.steps_before + len(self.step_ms) - line["step"]) > 0:
            event["steps_undone"] = undone
        if line["num_processes"] != self.num_processes:
            event["processes"] = f"{line['num_processes']}, before {self.num_processes}"
        return event

    @classmethod
    def read_jsonl(cls, path: Path, with_steps: bool = True) -> RunRecord:
        """Read a run's record from its metrics.jsonl. If a kill has cut off the last line, that line is left out.

        `with_steps`: False leaves out the steps, which make up nearly all of a long run's file.

        Raises TrainError if a line does not belong to a run's metrics.
        """
        record = cls(config={}, command="", images_per_step=1)
        *lines, _ = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            if with_steps or not line.startswith(b'{"event": "steps"'):
                record._apply_line(line, f"line {number} of {path}")
        return record

    def _apply_line(self, line: bytes, place: str) -> None:
        def sentence(_: str) -> str:
            beginning = line[:40].decode(errors="backslashreplace").strip()
            return (f"{place} is not a line of a run's metrics ({beginning!r}): delete that line, or the file to start "
                    "the record anew")

        with content_of_file(sentence):
            self.apply(json.loads(line))
