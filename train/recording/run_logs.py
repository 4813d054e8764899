"""The files that a run writes while it runs: metrics.jsonl, TensorBoard's event file and MLPerf's lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from common import environment
from graph_passes.executors import Metrics
from train.processes.invocation import command_line
from train.recording.gpu_monitor import GpuReadings
from train.recording.metrics import EVALUATED, METRICS_FILE, REASONS, VALIDATION, EpochRow, speed
from train.recording.metrics_file import MetricsFile
from train.recording.mlperf import MLPerfLog
from train.recording.step_clock import Interval, Place
from train.recording.tensorboard import TensorBoardLog

TENSORBOARD, MLPERF = "tensorboard", "mlperf.log"  # in the run's folder


class RunLogs:
    """Opens metrics.jsonl in the run's folder; `begin_session` opens the other logs if requested.

    Epochs are counted from 1 here. Raises TrainError if a file cannot be written.
    """

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._metrics = MetricsFile(folder / METRICS_FILE, clock)
        self._tensorboard: TensorBoardLog | None = None
        self._mlperf: MLPerfLog | None = None
        self._first_step = 0  # number of steps done before the session
        self.record = self._metrics.record

    def begin_session(
        self, place: Place, config: Mapping[str, Any], *, images_per_step: int, num_processes: int,
        num_classes: int | None, warmup_steps: int, start_seconds: Mapping[str, float], tensorboard: bool, mlperf: bool
    ) -> None:
        """Begin or resume a run with this configuration at `place`."""
        self._first_step = place.step
        self.emit(
            "session",
            step=place.step,
            epoch=place.epoch + 1,
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            config=dict(config),
            command=command_line(),
            images_per_step=images_per_step,
            num_processes=num_processes,
            num_classes=num_classes,
            warmup_steps=warmup_steps,
            start_seconds={name: round(value, 3) for name, value in start_seconds.items()},
            git_commit=environment.git_commit(),
            versions=environment.versions(),
            hardware=environment.hardware(),
        )
        if tensorboard:
            self._tensorboard = TensorBoardLog(self._folder / TENSORBOARD, place.step)
        if mlperf:
            self._mlperf = MLPerfLog(self._folder / MLPERF)
            self._mlperf.run(config, images_per_step)

    def emit(self, event: str, **fields: Any) -> None:
        """Write a line of metrics.jsonl."""
        self._metrics.write(event, **fields)

    def restored(self) -> list[str]:
        """Recreate removed logs and return their names."""
        removed = []
        for name, log in ((METRICS_FILE, self._metrics), (TENSORBOARD, self._tensorboard), (MLPERF, self._mlperf)):
            if log and log.is_gone:
                log.write_anew()
                removed.append(name)
        return removed

    def hours(self) -> float:
        """Hours since the start of the run, summed over its sessions."""
        return self._metrics.seconds() / 3600

    def begin_epoch(self, epoch: int) -> None:
        if self._mlperf:
            self._mlperf.start("epoch_start", epoch_num=epoch)

    def steps(
        self, interval: Interval, metrics: Metrics | None, gpu: GpuReadings | None = None, skipped_steps: int = 0,
        gradient_norm: float | None = None
    ) -> None:
        """Log some steps with their metrics; None if the metrics were never read. The other arguments are those of
        `Recorder.log`.
        """
        loss, top1 = (metrics.loss_sum / metrics.count, metrics.top1 / metrics.count) if metrics else (None, None)
        step_ms = interval.times.step_ms
        images = np.full(len(step_ms), self.record.images_per_step)
        if interval.last_step_images is not None:
            images[-1] = interval.last_step_images
        first = int(interval.step - len(step_ms) == self._first_step and len(step_ms) > 1)
        rate = speed(step_ms[first:], images[first:])
        self.emit(
            "steps",
            step=interval.step,
            epoch=interval.epoch,
            loss=loss,
            top1=top1,
            learning_rate=interval.learning_rate,
            skipped_steps=skipped_steps,
            **({} if gradient_norm is None else {"gradient_norm": gradient_norm}),
            **({} if interval.last_step_images is None else {"last_step_images": interval.last_step_images}),
            images_per_sec=rate.mean,
            images_per_sec_uncertainty=rate.uncertainty,
            images_per_sec_jitter=rate.jitter,
            **({f"gpu_{name}": value for name, value in gpu._asdict().items()} if gpu else {}),
            **vars(interval.times),
        )
        if metrics and self._tensorboard:
            self._tensorboard.add("train", interval.step, loss=loss, top1=top1, learning_rate=interval.learning_rate,
                                  images_per_sec=rate.mean, skipped_steps=skipped_steps, gradient_norm=gradient_norm)
            self._tensorboard.add("gpu", interval.step, **(gpu._asdict() if gpu else {}))

    def begin_validation(self, epoch: int) -> None:
        if self._mlperf:
            self._mlperf.start("eval_start", epoch_num=epoch)

    def end_validation(self, epoch: int) -> None:
        if self._mlperf:
            self._mlperf.end("eval_stop", epoch_num=epoch)

    def end_epoch(self, row: EpochRow, step: int) -> None:
        """Record the end of the epoch, at optimizer step `step`."""
        if self._tensorboard and row.evaluation:
            values = row.evaluation._asdict()
            images, _ = values.pop("images"), values.pop("num_images")
            values |= row.plugin_metrics
            group = VALIDATION if images == VALIDATION else EVALUATED[images]
            self._tensorboard.add(group, step, **{name: value for name, value in values.items() if value is not None})
        if self._mlperf:
            if row.val_top1 is not None:
                self._mlperf.point("eval_accuracy", row.val_top1, epoch_num=row.epoch)
            self._mlperf.end("epoch_stop", epoch_num=row.epoch)

    def end(self, step: int, reason: str) -> None:
        """Record the end of the session; `reason`: a key of `metrics.REASONS`."""
        completed = REASONS[reason]
        price = {} if self.record.price is None else {"price": self.record.price}
        self.emit("end", step=step, completed=completed, reason=reason, **price)
        if self._mlperf:
            self._mlperf.end("run_stop", status="success" if completed else "aborted")

    def close(self) -> None:
        for log in (self._mlperf, self._tensorboard, self._metrics):
            if log:
                log.close()
        self._mlperf = self._tensorboard = None
