"""The recorder: writes the training loop's reports to the terminal, metrics.jsonl, TensorBoard and MLPerf lines.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

from rich.console import Console

from common.phases import FIRST_BATCH
from graph_passes.executors import Metrics
from train.errors import TrainError
from train.processes.signals import StoppedBySignal
from train.recording.gpu_monitor import GpuReadings
from train.recording.metrics import EVALUATED, VALIDATION, RunRecord, Speed
from train.recording.run_logs import RunLogs
from train.recording.step_clock import Interval, Place, StepClock
from train.recording.terminal import Terminal

LONGEST_SILENCE = 10.0  # seconds without a line on the terminal, after which an extra line is printed
# Event -> message about an image.
IMAGE_EVENTS = {"bad_image": "skipped {file}: {reason}",
                "damaged_image": "a damaged image is used anyway: {file}: {reason}"}

T = TypeVar("T")


class Recorder:
    """Measures a run and logs its events. Methods are called in the order shown above.

    Every rank has a recorder, because `log_due` must be equal on all; only the `enabled` recorder (rank 0) writes and
    prints.

    Args: folder: the run's output folder; its metrics.jsonl is continued, if there is one (a resumed run). config: the
        resolved configuration, as plain JSON values. images_per_step: images per optimizer step, over all processes and
        accumulated batches. num_epochs: epochs of the whole run, for the time left; None: the run's end is unknown.
        log_every: optimizer steps between two log lines. num_processes: number of processes, for the report.
        num_classes: classes of the network; with five or fewer no top-5 accuracy is shown. None: unknown. evaluated:
        the images used in validation, a key of `metrics.EVALUATED`. first_step: optimizer steps done at the checkpoint
        that the run resumes from. first_epoch: epochs completed at that checkpoint. start_seconds: seconds that the
        command has taken so far, by phase (`common.phases`). warmup_steps: steps at the start of a session that
        throughput excludes, while kernels are chosen and caches
            fill.
        tensorboard, mlperf: write these logs too.
        console: the output, see `Terminal`.
        clock: returns seconds; tests replace it.

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
        num_classes: int | None = None,
        evaluated: str = VALIDATION,
        first_step: int = 0,
        first_epoch: int = 0,
        start_seconds: Mapping[str, float] = MappingProxyType({}),
        warmup_steps: int = 10,
        tensorboard: bool = True,
        mlperf: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.enabled = enabled
        self.folder = folder
        self.reason = "epochs"  # why the session ends, if no exception ends it: a key of `metrics.REASONS`
        self.all_removed: list[str] = []
        self.num_skipped = 0  # skipped images of this epoch, as counted by the loop
        self.evaluated = evaluated
        self.log_every = log_every
        self.record = RunRecord(config={}, command="", images_per_step=images_per_step)
        self._place = Place(num_epochs, first_step, first_epoch, first_step)
        self._clock = StepClock(clock, first_step, warmup_steps)
        self._first_step = self._last_log = first_step
        # the first step gets a log line, to show that the run works, and its first loss
        self._next_log = first_step + 1
        self._last_line = clock()  # time of the terminal's last line
        self._phase = ""  # the latest phase
        # seconds of this session by phase
        self._start_seconds, self._phase_seconds = dict(start_seconds), dict[str, float]()
        self._learning_rate = 0.0  # learning rate of the last step
        # number of images in the last step, if it had fewer images than the others
        self._last_step_images: int | None = None
        self._interval: Interval | None = None  # the closed interval, if it still has no metrics
        self._skipped_steps = 0  # skipped steps since the last log line
        self._logs: RunLogs | None = None
        self._terminal: Terminal | None = None
        self._named_bad: set[str] = set()  # bad and damaged images already named in the run's metrics
        self._num_damaged = 0
        if not enabled:
            return

        self._logs = RunLogs(folder, clock)
        self.record = self._logs.record
        self._named_bad.update(event["file"] for event in self.record.events if event["event"] in IMAGE_EVENTS)
        self._logs.begin_session(self._place, config, images_per_step=images_per_step, num_processes=num_processes,
                                 num_classes=num_classes, warmup_steps=warmup_steps, start_seconds=start_seconds,
                                 tensorboard=tensorboard, mlperf=mlperf)
        self._terminal = Terminal(num_epochs, console, self.record.examples, self.record.tells_top5)

    # --- steps ---

    def begin_epoch(self, epoch: int, num_steps: int, first_step: int = 0) -> None:
        """Begin epoch `epoch` (from 0) with `num_steps` steps; at `first_step` if the run resumes within it."""
        self._place.begin_epoch(epoch, num_steps, first_step)
        if self._logs and self._terminal:
            self._logs.begin_epoch(epoch + 1)
            self._terminal.begin_epoch(epoch, num_steps, first_step)
        self._last_line = self._clock.now()
        self._clock.begin_epoch(is_whole=not first_step)

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches; the time until each arrives counts as the step's wait for the loader.

        A loader's `bad_images` and `damaged_images` (file or record, reason) become events and lines on the terminal as
        soon as they are found. Images found before this call are reported at once.
        """
        iterator = iter(batches)
        while True:
            start = self._clock.now()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._clock.waited_since(start)
            for file, reason in _bad_images(batches):
                if file not in self._named_bad:
                    self._named_bad.add(file)
                    self.name_image("bad_image", file, reason)
            for file, message in _damaged_images(batches):
                if file not in self._named_bad:
                    self._named_bad.add(file)
                    self._num_damaged += 1
                    self.event("damaged_image", file=file, reason=message)
                    self.say(f"a damaged image is used anyway ({self._num_damaged} so far): {file}: {message}")
            yield batch

    @property
    def log_due(self) -> bool:
        """Whether the step that has just ended gets a log line, so that the loop should request the metrics.

        True at least for the first step of a session and the last step of an epoch.
        """
        place = self._place
        is_last = place.epoch_step == place.epoch_steps
        return place.step > self._last_log and (place.step >= self._next_log or is_last)

    @property
    def is_first_step(self) -> bool:
        """Whether the step that has just ended is the first of the session."""
        return self._place.step == self._first_step + 1

    def stop_clock(self, idle_seconds: float | None = None) -> None:
        """End the timing of the current step; the time until `end_step` counts for the next step.

        For devices that work one step ahead (`Executor.end_step`), a step ends when the step before it is done. Time
        spent waiting for the device is then time of the latest step, for which the next step would have waited anyway.
        While the loop waits for a batch, the device still computes, so the wait costs at most `idle_seconds`, the idle
        time of the device in the previous step (`Executor.idle_seconds`).
        """
        self._clock.stop(idle_seconds)

    def end_step(self, learning_rate: float, images: int | None = None) -> None:
        """Record the end of an optimizer step with this learning rate. `images`: the number of images in the step, if
        it is smaller because the epoch ended.
        """
        self._place.step += 1
        self._learning_rate, self._last_step_images = learning_rate, images
        self._clock.end_step(self._place.step, self.record.images_per_step if images is None else images)
        if self._terminal:
            self._terminal.end_step()
            if self._is_quiet and not (self.log_due or self._interval):
                self._show_line(str(self._place), self._recent_speed, None, learning_rate, self._time_left)

    @property
    def _is_quiet(self) -> bool:
        """Whether the terminal has been silent for too long."""
        return self._clock.now() - self._last_line > LONGEST_SILENCE

    @property
    def _recent_speed(self) -> Speed:
        return self._clock.recent_speed()

    @property
    def _time_left(self) -> str:
        return self._clock.time_left(self._place)

    def _show_line(
        self, place: str, rate: Speed | None, loss: float | None, learning_rate: float, time_left: str,
        skipped_steps: int = 0
    ) -> None:
        assert self._terminal
        self._terminal.log_step(place, rate, loss, learning_rate, time_left, skipped_steps)
        self._last_line = self._clock.now()

    def close_interval(self) -> None:
        """Close the interval; to be called when the metrics have been requested. The next call of `log` gets the
        metrics of all steps up to the step that has just ended.

        Call this whenever `log_due` is true, which prints a line, and at every other place that reads metrics.
        """
        assert self._interval is None, "the previous interval still waits for its metrics"
        place = self._place
        # the time of the first step does not predict the time of later steps
        starts = self.is_first_step and place.epoch_steps > 1
        self._interval = Interval(
            step=place.step,
            epoch=place.epochs_done,
            place=str(place),
            learning_rate=self._learning_rate,
            is_logged=self.log_due,
            time_left=self._time_left,
            rate=None if starts else self._recent_speed,
            times=self._clock.take(),
            last_step_images=self._last_step_images,
        )
        if self.log_due:
            self._last_log = place.step
            self._next_log = (self._first_step if self.is_first_step else place.step) + self.log_every

    @property
    def loader_waits(self) -> list[float]:
        """For each step of the closed interval, the milliseconds that this process waited for its batch."""
        assert self._interval, "close_interval() comes first"
        return self._interval.times.loader_wait_ms

    def log(
        self, metrics: Metrics, gpu: GpuReadings | None = None, loader_waits: Sequence[float] | None = None,
        skipped_steps: int = 0, gradient_norm: float | None = None
    ) -> None:
        """Log the metrics of the closed interval (sums over its images and all processes) and the GPUs' readings.

        `loader_waits`: like the property, but for the process that waited longest, for which all others wait.
        `skipped_steps`: steps of the interval that changed no weight because a gradient was not finite.
        `gradient_norm`: the gradient norm in the interval's last step, if gradients are clipped.
        """
        interval, self._interval = self._interval, None
        assert interval, "close_interval() comes first"
        if loader_waits is not None:
            interval.times.set_waits(loader_waits)
        self._clock.hold()  # time spent waiting for the metrics is part of the next step
        logs = self._whole_logs()
        if not (logs and self._terminal):
            return
        logs.steps(interval, metrics, gpu, skipped_steps, gradient_norm)
        self._skipped_steps += skipped_steps
        if interval.is_logged:
            loss = self.record.loss_curve[-1].loss if self.record.loss_curve else None
            self._show_line(interval.place, interval.rate, loss, interval.learning_rate, interval.time_left,
                            self._skipped_steps)
            self._skipped_steps = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time of an activity outside the steps (`validation`, `checkpoint`, ...), which the report shows
        separately."""
        start = self._clock.now()
        is_validation = name == VALIDATION
        if is_validation and self.evaluated != VALIDATION:
            name = f"evaluation on the {self.evaluated}"
        if self._logs and is_validation:
            self._logs.begin_validation(self._place.epoch + 1)
        self._phase = name
        if self._terminal:
            self._terminal.show(name)
        yield
        seconds = self._clock.now() - start
        if self._terminal:
            self._terminal.show()
        self._clock.leave_out(seconds)  # the time of a checkpoint within an epoch does not count for the next step
        self._phase_seconds[name] = self._phase_seconds.get(name, 0.0) + seconds
        if self._logs and is_validation:
            self._logs.end_validation(self._place.epoch + 1)
        self._emit("phase", name=name, seconds=seconds)

    def seconds(self) -> dict[str, float]:
        """The seconds of this session by phase, from the start of its command."""
        first = self.record.session_starts[-1]
        steps, waits = (sum(ms[first + 1 :]) / 1e3 for ms in (self.record.step_ms, self.record.loader_wait_ms))
        begun = {}
        if len(self.record.step_ms) > first:
            wait = self.record.loader_wait_ms[first] / 1e3
            begun = {FIRST_BATCH: wait, "first step": self.record.step_ms[first] / 1e3 - wait}
        return {**self._start_seconds, **begun, "steps": steps - waits, "waiting for batches": waits,
                **self._phase_seconds}

    def show_progress(self, done: int, total: int) -> None:
        """Report that `done` batches of the current phase are done; prints a line if the terminal has been silent for
        long."""
        if self._terminal and self._is_quiet:
            self.say(f"{self._phase}: batch {done} of {total}")
            self._last_line = self._clock.now()

    def end_epoch(self, validation: Metrics | None = None, balanced_top1: float | None = None,
                  plugin_metrics: Mapping[str, float] | None = None) -> None:
        """End the epoch, with its validation if any. `balanced_top1`: None if it must not be shown. `plugin_metrics`:
        means of the plug-ins' metrics.
        """
        if not (self._logs and self._terminal):
            return
        self._write_unread()
        row = self.record.epoch_row(self._place.epoch + 1, self._place.epoch_first_step, self._logs.hours())
        if validation:
            count, prefix = validation.count, EVALUATED[self.evaluated]
            values = {"loss": validation.loss_sum / count, "top1": validation.top1 / count,
                      "top5": validation.top5 / count, "balanced_top1": balanced_top1, "count": round(count)}
            for name, value in values.items():
                setattr(row, f"{prefix}_{name}", value)
            row.plugin_metrics = dict(plugin_metrics or {})
        row.skipped_images, self.num_skipped = self.num_skipped, 0
        self._emit("epoch", **vars(row))
        self._terminal.end_epoch(row)
        self._logs.end_epoch(row, self._place.step)

    @property
    def latest_epoch(self) -> dict[str, float]:
        """The numbers of the latest epoch by their names in metrics.jsonl, and the plug-ins' metrics by name. Empty on
        ranks that do not record.
        """
        if not self.record.epochs:
            return {}
        row = self.record.epochs[-1]
        numbers = {name: value for name, value in vars(row).items() if isinstance(value, (int, float))}
        return numbers | row.plugin_metrics

    # --- other events ---

    def event(self, kind: str, **fields: Any) -> None:
        """Log an event in metrics.jsonl and the report: `checkpoint`, `bad_image`, `stop`, ... The event's `step` is
        the present step unless given.
        """
        self._emit(kind, **{"step": self._place.step, **fields})

    def name_image(self, kind: str, file: str, reason: str) -> None:
        """Report an image that is skipped, or used although damaged; `kind`: a key of IMAGE_EVENTS."""
        self.say(IMAGE_EVENTS[kind].format(file=file, reason=reason))
        self.event(kind, file=file, reason=reason)

    def loader_speed(self, images_per_sec: float) -> None:
        """Record the speed of the loader alone, over all processes, as measured by the loop."""
        self._emit("loader", images_per_sec=images_per_sec)

    def removed(self, names: Sequence[str]) -> None:
        """Report that these files of the run's folder were removed; repeated at the end (`all_removed`)."""
        if names:
            self.all_removed += names
            self.say(f"removed while the run continues: {', '.join(names)} in {self.folder}; their known content will "
                     "be written again")
            self.event("removed", files=list(names))

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
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
        # A full disk may be the cause of the end. Write as much as possible, and raise the first error.
        with contextlib.suppress(TrainError):
            self._write_unread()
            if logs := self._whole_logs():
                logs.end(self._place.step, self.reason if error is None else _reason_of(error))
        if self._logs:
            self._logs.close()
        if error is None and len(self.record.counted_steps):
            self.say(f"total {self.record.examples}/sec: {self.record.speed().mean:.1f}")

    # --- helpers ---

    def _emit(self, event: str, **fields: Any) -> None:
        if logs := self._whole_logs():
            logs.emit(event, **fields)

    def _whole_logs(self) -> RunLogs | None:
        """The logs; None on ranks without logs. Removed files are written again, and reported."""
        if self._logs:
            self.removed(self._logs.restored())
        return self._logs

    def _write_unread(self) -> None:
        """Log the steps whose metrics were never read."""
        if self._interval and (logs := self._whole_logs()):
            logs.steps(self._interval, None)
            self._interval = None
        if self._clock.has_steps:
            self.close_interval()
            self._write_unread()


def _reason_of(error: BaseException) -> str:
    return "signal" if isinstance(error, (StoppedBySignal, KeyboardInterrupt)) else "error"


def _bad_images(batches: object) -> Sequence[tuple[str, str]]:
    """(file or record, reason) of the images that a loader has skipped so far; empty for plain iterables."""
    return getattr(batches, "bad_images", ())


def _damaged_images(batches: object) -> Sequence[tuple[str, str]]:
    """(file or record, decoder's message) of the damaged images that a loader has used so far."""
    return getattr(batches, "damaged_images", ())
