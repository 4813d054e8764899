"""The recorder: what the training loop tells it goes to the terminal, metrics.jsonl, TensorBoard and MLPerf lines.

    with Recorder(folder, config=..., images_per_step=..., num_epochs=..., log_every=...) as recorder:
        for epoch in range(first_epoch, num_epochs):
            recorder.begin_epoch(epoch, num_steps)
            for batch in recorder.timed(loader):
                ...                                                 # forward, backward, update
                recorder.stop_clock()
                recorder.end_step(learning_rate)
                if recorder.log_due:
                    recorder.close_interval()
                    recorder.log(read_metrics())                    # now, or one step later
            with recorder.phase("validation"):
                ...
            recorder.end_epoch(validation_metrics)
    write_report(folder / "report", recorder.record)
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from rich.console import Console

from common import environment
from graph_passes.executors import Metrics
from train.errors import TrainError
from train.processes.invocation import command_line
from train.reporting.gpu_monitor import GpuReadings
from train.reporting.metrics import EVALUATED, METRICS_FILE, VALIDATION, EpochRow, RunRecord, Speed, speed
from train.reporting.metrics_file import MetricsFile
from train.reporting.mlperf import MLPerfLog
from train.reporting.tensorboard import TensorBoardLog
from train.reporting.terminal import Terminal

SPEED_WINDOW = 100  # steps that the speed on the terminal looks back on: smooth, yet a slow-down shows
LONGEST_SILENCE = 10.0  # seconds of steps without a line on the terminal, after which one comes between two log lines
IMAGE_EVENTS = ("bad_image", "damaged_image")

T = TypeVar("T")


@dataclass
class _Interval:
    """Steps whose metrics are summed: those since the interval before, up to `step`."""

    step: int
    epoch: float  # with the fraction done
    place: str  # the same for people
    learning_rate: float  # of its last step
    is_logged: bool  # with a line on the terminal
    time_left: str  # of the run, for people
    rate: Speed | None  # of the latest steps, for people; None for a session's first
    times: dict[str, list[float]]  # by name of the RunRecord's lists, ms


class Recorder:
    """Measures a run and writes down what happened. Methods are called in the order shown above.

    Every rank makes one, since `log_due` must be the same on each; only the `enabled` one (rank 0) writes and prints.

    Args:
        folder: the run's output folder; a metrics.jsonl in it is continued (a resumed run).
        config: the resolved configuration, as plain JSON values.
        images_per_step: images per optimizer step, over all processes and accumulated batches.
        num_epochs: epochs of the whole run, for the time left; None: nobody can tell its end.
        log_every: optimizer steps between two log lines.
        num_processes: for the report.
        evaluated: which images validation sees, one of `metrics.EVALUATED`.
        first_step: optimizer steps that the checkpoint resumed from has behind it.
        first_epoch: whole epochs likewise.
        warmup_steps: first steps of a session that no throughput counts: libraries choose kernels, caches fill.
        tensorboard, mlperf: write these logs too.
        console: where to print, see `Terminal`.
        clock: seconds; tests replace it.

    Raises:
        TrainError: the folder's metrics.jsonl is foreign, cannot be written, or is being written by another process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: Mapping[str, Any],
        images_per_step: int,
        num_epochs: int | None,
        log_every: int,
        enabled: bool = True,
        num_processes: int = 1,
        evaluated: str = VALIDATION,
        first_step: int = 0,
        first_epoch: int = 0,
        warmup_steps: int = 10,
        tensorboard: bool = True,
        mlperf: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.enabled = enabled
        self.folder = folder
        self.all_removed: list[str] = []
        self.num_epochs = num_epochs
        self.evaluated = evaluated
        self.log_every = log_every
        self.record = RunRecord(config={}, command="", images_per_step=images_per_step)
        self._clock = clock
        self._step = self._last_log = first_step
        self._next_log = first_step + 1  # the first step has a line: the run has begun, and with this loss
        self._first_step, self._warm_step = first_step, first_step + warmup_steps
        self._epoch, self._epoch_steps, self._epoch_first_step = first_epoch, 0, first_step
        self._step_start = self._last_line = clock()
        self._step_end: float | None = None  # where `stop_clock` has been called
        self._overhang = 0.0  # seconds from the last step's end until `end_step` or `log`: they belong to the next step
        self._waited = 0.0  # seconds of this step so far
        self._waited_before = 0.0  # of the step before, where the device works ahead
        self._pending: dict[str, list[float]] = {"step_ms": [], "loader_wait_ms": [], "compute_ms": []}
        self._learning_rate = 0.0  # of the last step
        self._interval: _Interval | None = None  # closed, its metrics still to come
        self._skipped_steps = 0  # since the last log line
        self._recent_ms: deque[float] = deque(maxlen=SPEED_WINDOW)
        self._epoch_began: float | None = None  # time; of the epoch under way, if it began with its first step
        self._epoch_step_ms = 0.0  # the steps of it
        self._rests: list[float] = []  # s; what whole epochs of this session took beyond their steps
        self._file: MetricsFile | None = None
        self._tensorboard: TensorBoardLog | None = None
        self._mlperf: MLPerfLog | None = None
        self._terminal: Terminal | None = None
        self._named_bad: set[str] = set()  # bad and damaged images that the run's metrics name
        self._num_damaged = 0
        if not enabled:
            return

        self._file = MetricsFile(folder / METRICS_FILE, clock)
        self.record = self._file.record
        self._named_bad.update(event["file"] for event in self.record.events if event["event"] in IMAGE_EVENTS)
        self._emit(
            "session",
            step=first_step,
            epoch=first_epoch + 1,
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            config=dict(config),
            command=command_line(),
            images_per_step=images_per_step,
            num_processes=num_processes,
            warmup_steps=warmup_steps,
            git_commit=environment.git_commit(),
            versions=environment.versions(),
            hardware=environment.hardware(),
        )
        if tensorboard:
            self._tensorboard = TensorBoardLog(folder / "tensorboard", first_step)
        if mlperf:
            self._mlperf = MLPerfLog(folder / "mlperf.log")
            self._mlperf.run(config, images_per_step)
        self._terminal = Terminal(num_epochs, console)

    # --- steps ---

    def begin_epoch(self, epoch: int, num_steps: int, first_step: int = 0) -> None:
        """Epoch `epoch` (from 0) of `num_steps` steps begins, at its step `first_step` if resumed in the middle."""
        self._epoch, self._epoch_steps, self._epoch_first_step = epoch, num_steps, self._step - first_step
        if self._mlperf:
            self._mlperf.start("epoch_start", epoch_num=epoch + 1)
        if self._terminal:
            self._terminal.begin_epoch(epoch, num_steps, first_step)
        self._last_line = now = self._clock()
        self._step_start, self._waited = now - self._overhang, 0.0
        if self._epoch_began is not None:
            self._rests.append(max(now - self._epoch_began - self._epoch_step_ms / 1e3, 0.0))
        self._epoch_began = None if first_step else now
        self._epoch_step_ms = 0.0

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Pass batches through; the time that each takes to arrive counts as the step's wait for the loader.

        A loader's `bad_images` and `damaged_images` (file or record, reason) become events, and lines on the terminal,
        as they are found, or now if it has met them before.
        """
        iterator = iter(batches)
        while True:
            start = self._clock()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._waited += self._clock() - start
            for file, reason in _bad_images(batches):
                if file not in self._named_bad:
                    self._named_bad.add(file)
                    self.event("bad_image", file=file, reason=reason)
                    self.say(f"skipped a bad image: {file}: {reason}")
            for file, message in _damaged_images(batches):
                if file not in self._named_bad:
                    self._named_bad.add(file)
                    self._num_damaged += 1
                    self.event("damaged_image", file=file, reason=message)
                    self.say(f"a damaged image is used as it decodes ({self._num_damaged} so far): {file}: {message}")
            yield batch

    @property
    def log_due(self) -> bool:
        """Whether the step that has just ended is one with a log line, so that the loop should ask for the metrics.

        The first step of a session and the last one of an epoch always are.
        """
        is_last = self._step == self._epoch_first_step + self._epoch_steps
        return self._step > self._last_log and (self._step >= self._next_log or is_last)

    @property
    def is_first_step(self) -> bool:
        """Whether the step that has just ended is the session's first."""
        return self._step == self._first_step + 1

    def stop_clock(self, idle_seconds: float | None = None) -> None:
        """The step under way is over; what follows until `end_step` counts in the next step.

        For devices that work a step ahead (`Executor.end_step`), whose step ends when the one before it is done: to
        wait for the device then is to wait for the latest step, as the next step would have done. Such a device still
        computes while the loop waits for a batch; `idle_seconds`, for which it stood still in the step before, is all
        that this waiting can have cost (`Executor.idle_seconds`).
        """
        self._step_end = self._clock()
        if idle_seconds is not None:
            waited_before, self._waited_before = self._waited_before, self._waited
            self._waited = min(waited_before, idle_seconds)

    def end_step(self, learning_rate: float) -> None:
        """An optimizer step with this learning rate has ended."""
        now = self._clock()
        step_end = now if self._step_end is None else self._step_end
        self._step_end = None
        step_ms, wait_ms = 1e3 * (step_end - self._step_start), 1e3 * self._waited
        self._step_start, self._overhang, self._waited = step_end, now - step_end, 0.0
        self._step += 1
        self._learning_rate = learning_rate
        self._epoch_step_ms += step_ms
        self._pending["step_ms"].append(round(step_ms, 4))
        self._pending["loader_wait_ms"].append(round(wait_ms, 4))
        self._pending["compute_ms"].append(round(step_ms - wait_ms, 4))
        if self._step in (self._first_step + 2, self._warm_step + 1):
            self._recent_ms.clear()  # of the first step, which starts everything; of the warm-up
        self._recent_ms.append(step_ms)
        if self._terminal:
            self._terminal.end_step()
            is_quiet = now - self._last_line > LONGEST_SILENCE
            if is_quiet and not (self.log_due or self._interval):
                self._show_line(self._place, speed(self._recent_ms, self.record.images_per_step), None,
                                learning_rate, self._time_left)

    @property
    def _place(self) -> str:
        """The step that has just ended, for people."""
        done = self._step - self._epoch_first_step
        if self.num_epochs is None:
            return f"step {done}"
        return f"epoch {self._epoch + 1}/{self.num_epochs}, step {done}/{self._epoch_steps}"

    @property
    def _time_left(self) -> str:
        """Of the run, for people; "" where nobody can foretell its end.

        It is that of its steps, and that of what else its epochs hold (validation, checkpoints), which is known once
        one is over. The first of them is a bad example, because it starts everything.
        """
        if self.num_epochs is None:
            return ""
        epochs = self.num_epochs - self._epoch
        steps = epochs * self._epoch_steps - (self._step - self._epoch_first_step)
        rests = self._rests[1:] or self._rests
        seconds = steps * float(np.mean(self._recent_ms)) / 1e3 + epochs * (float(np.mean(rests)) if rests else 0.0)
        return f"{'' if rests else '> '}{timedelta(seconds=round(max(seconds, 0)))}"

    def _show_line(
        self, place: str, rate: Speed | None, loss: float | None, learning_rate: float, time_left: str,
        skipped_steps: int = 0
    ) -> None:
        assert self._terminal
        self._terminal.log_step(place, rate, loss, learning_rate, time_left, skipped_steps)
        self._last_line = self._clock()

    def close_interval(self) -> None:
        """The metrics have been asked for: those that `log` gets belong to the steps up to the one that has just ended.

        To be called where `log_due` says so, which puts a line on the terminal, and wherever else metrics are read.
        """
        assert self._interval is None, "the metrics of the interval before have not come yet"
        starts = self.is_first_step and self._epoch_steps > 1  # such a step's time says nothing of those that follow
        self._interval = _Interval(
            step=self._step,
            epoch=self._epoch + (self._step - self._epoch_first_step) / max(self._epoch_steps, 1),
            place=self._place,
            learning_rate=self._learning_rate,
            is_logged=self.log_due,
            time_left=self._time_left,
            rate=None if starts else speed(self._recent_ms, self.record.images_per_step),
            times=self._pending,
        )
        if self.log_due:
            self._last_log = self._step
            self._next_log = (self._first_step if self.is_first_step else self._step) + self.log_every
        self._pending = {name: [] for name in self._pending}

    @property
    def loader_waits(self) -> list[float]:
        """Of each step of the closed interval: ms for which this process waited for its batch."""
        assert self._interval, "close_interval() comes first"
        return self._interval.times["loader_wait_ms"]

    def log(
        self, metrics: Metrics, gpu: GpuReadings | None = None, loader_waits: Sequence[float] | None = None,
        skipped_steps: int = 0, gradient_norm: float | None = None
    ) -> None:
        """The metrics of the closed interval: sums over all its images, over all processes; and the GPUs' readings.

        `loader_waits`: as the property of that name, but of the process that waited longest, for which all wait.
        `skipped_steps`: those of the interval that changed no weight, since a gradient was not finite.
        `gradient_norm`: of its last step, where gradients are clipped.
        """
        interval, self._interval = self._interval, None
        assert interval, "close_interval() comes first"
        if loader_waits is not None:
            times = interval.times
            waits = [min(wait, step) for wait, step in zip(loader_waits, times["step_ms"], strict=True)]
            times["loader_wait_ms"] = waits
            times["compute_ms"] = [round(step - wait, 4) for wait, step in zip(waits, times["step_ms"], strict=True)]
        self._overhang = self._clock() - self._step_start  # the wait for them
        if not self._terminal:
            return
        self._write_steps(interval, metrics, gpu, skipped_steps, gradient_norm)
        self._skipped_steps += skipped_steps
        if interval.is_logged:
            loss = self.record.loss_curve[-1].loss if self.record.loss_curve else None
            self._show_line(interval.place, interval.rate, loss, interval.learning_rate, interval.time_left,
                            self._skipped_steps)
            self._skipped_steps = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time outside the steps (`validation`, `checkpoint`, ...), told apart in the report."""
        start = self._clock()
        is_validation = name == VALIDATION
        if is_validation and self.evaluated != VALIDATION:
            name = f"evaluation on the {self.evaluated}"
        if self._mlperf and is_validation:
            self._mlperf.start("eval_start", epoch_num=self._epoch + 1)
        if self._terminal:
            self._terminal.show(name)
        yield
        seconds = self._clock() - start
        if self._terminal:
            self._terminal.show()
        self._step_start += seconds  # a checkpoint in mid-epoch is no part of the next step
        if is_validation and self._mlperf:
            self._mlperf.end("eval_stop", epoch_num=self._epoch + 1)
        self._emit("phase", name=name, seconds=seconds)

    def end_epoch(self, validation: Metrics | None = None, balanced_top1: float | None = None) -> None:
        """The epoch's steps, and its validation if there was one, have ended; `balanced_top1` where it is told."""
        if not (self._terminal and self._file):
            return
        self._write_unread()
        record, first = self.record, self._epoch_first_step
        # Each point of the curve is a mean over the steps since the point before.
        points = [point for point in record.loss_curve if point.step > first]
        weights = np.diff([first, *(point.step for point in points)])
        counted = record.counted_steps
        # Of a session shorter than its warm-up the record counts the last step, which is no epoch's speed.
        warm = max(first - record.steps_before, record.session_starts[-1] + record.warmup_steps)
        counted = counted[counted >= warm]
        row = EpochRow(
            epoch=self._epoch + 1,
            hours=self._file.seconds() / 3600,
            images_per_sec=_rate(record.images_per_step * len(counted), np.asarray(record.step_ms)[counted].sum()),
            train_loss=float(np.average([p.loss for p in points], weights=weights)) if points else None,
            train_top1=float(np.average([p.top1 for p in points], weights=weights)) if points else None,
        )
        if validation:
            sums = {"loss": validation.loss_sum, "top1": validation.top1, "top5": validation.top5}
            for name, value in sums.items():
                setattr(row, f"{EVALUATED[self.evaluated]}_{name}", value / validation.count)
            setattr(row, f"{EVALUATED[self.evaluated]}_balanced_top1", balanced_top1)
        self._emit("epoch", **vars(row))
        self._terminal.end_epoch(row)
        if self._tensorboard and row.evaluation:
            values = row.evaluation._asdict()
            images = values.pop("images")
            group = VALIDATION if images == VALIDATION else EVALUATED[images]
            self._tensorboard.add(group, self._step, **{n: value for n, value in values.items() if value is not None})
        if self._mlperf:
            if row.val_top1 is not None:
                self._mlperf.point("eval_accuracy", row.val_top1, epoch_num=self._epoch + 1)
            self._mlperf.end("epoch_stop", epoch_num=self._epoch + 1)

    # --- anything else ---

    def event(self, kind: str, **fields: Any) -> None:
        """Something worth a line in metrics.jsonl and the report: `checkpoint`, `bad_image`, `stop`, ..."""
        self._emit(kind, step=self._step, **fields)

    def loader_speed(self, images_per_sec: float) -> None:
        """Speed of the loader alone, over all processes, as the loop measured it."""
        self._emit("loader", images_per_sec=images_per_sec)

    def removed(self, names: Sequence[str]) -> None:
        """Somebody has removed these files of the run's folder: said here, and again at the end (`all_removed`)."""
        if names:
            self.all_removed += names
            self.say(f"removed while the run goes on: {', '.join(names)} in {self.folder}; what is still known will be "
                     "written again")
            self.event("removed", files=list(names))

    def say(self, text: str) -> None:
        """Print a line, above the progress bar where there is one."""
        if self._terminal:
            self._terminal.say(text)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._terminal:
            return
        self._terminal.close()
        # A full disk may be the very reason for the end: what can be written is, the first error is the one to show.
        with contextlib.suppress(TrainError):
            self._write_unread()
            price = {} if self.record.price is None else {"price": self.record.price}
            self._emit("end", step=self._step, completed=error is None, **price)
            if self._mlperf:
                self._mlperf.end("run_stop", status="aborted" if error else "success")
        for log in (self._mlperf, self._tensorboard, self._file):
            if log:
                log.close()
        if error is None and len(self.record.counted_steps):
            self.say(f"total images/sec: {self.record.speed().mean:.1f}")

    # --- inside ---

    def _emit(self, event: str, **fields: Any) -> None:
        if not self._file:
            return
        if self._file.is_gone:
            self._file.write_anew()
            self.removed([METRICS_FILE])
        self._file.write(event, **fields)

    def _write_unread(self) -> None:
        """Write the steps whose metrics nobody has read, or will read."""
        if self._interval:
            self._write_steps(self._interval, None)
            self._interval = None
        if self._pending["step_ms"]:
            self.close_interval()
            self._write_unread()

    def _write_steps(
        self, interval: _Interval, metrics: Metrics | None, gpu: GpuReadings | None = None, skipped_steps: int = 0,
        gradient_norm: float | None = None
    ) -> None:
        loss, top1 = (metrics.loss_sum / metrics.count, metrics.top1 / metrics.count) if metrics else (None, None)
        has_first = interval.step - len(interval.times["step_ms"]) == self._first_step
        rate = speed(interval.times["step_ms"][has_first:] or interval.times["step_ms"], self.record.images_per_step)
        self._emit(
            "steps",
            step=interval.step,
            epoch=interval.epoch,
            loss=loss,
            top1=top1,
            learning_rate=interval.learning_rate,
            skipped_steps=skipped_steps,
            **({} if gradient_norm is None else {"gradient_norm": gradient_norm}),
            images_per_sec=rate.mean,
            images_per_sec_uncertainty=rate.uncertainty,
            images_per_sec_jitter=rate.jitter,
            **({f"gpu_{name}": value for name, value in gpu._asdict().items()} if gpu else {}),
            **interval.times,
        )
        if metrics and self._tensorboard:
            self._tensorboard.add("train", interval.step, loss=loss, top1=top1, learning_rate=interval.learning_rate,
                                  images_per_sec=rate.mean, skipped_steps=skipped_steps, gradient_norm=gradient_norm)
            self._tensorboard.add("gpu", interval.step, **(gpu._asdict() if gpu else {}))


def _bad_images(batches: object) -> Sequence[tuple[str, str]]:
    """(file or record, reason) of the images that a loader has skipped so far; plain iterables have none."""
    return getattr(batches, "bad_images", ())


def _damaged_images(batches: object) -> Sequence[tuple[str, str]]:
    """(file or record, what its decoder says) of the images that a loader has used so far though they are damaged."""
    return getattr(batches, "damaged_images", ())


def _rate(images: int, milliseconds: float) -> float | None:
    return images / (milliseconds / 1e3) if milliseconds else None
