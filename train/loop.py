"""The training loop.

A step: batches from the loader -> executor.forward_backward -> gradients averaged over the processes -> optimizer.
Between two steps the loop checks whether to log, save or stop.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.errors import UserError
from graph_passes.executors import Draws, Executor, Metrics
from pipelines import Batch, DataError, Loader
from train.callbacks import Callbacks, LiveRun
from train.checkpoint import Checkpoint
from train.config import Config, changes
from train.draws import draw
from train.errors import LostProcessError, TrainError
from train.optimizer import ema_decay, ema_in_use
from train.plugin_metrics import PluginMetrics
from train.processes.distributed import GradientAllReduce, Workers
from train.processes.invocation import launcher
from train.processes.pulse import Activity, pulse
from train.processes.signals import Signals, StoppedBySignal
from train.recording.gpu_monitor import GpuMonitor, GpuReadings
from train.recording.metrics import VALIDATION, accuracy_of
from train.recording.outcomes import Outcomes
from train.recording.recorder import IMAGE_EVENTS, Recorder
from train.run_state import RunState
from train.saver import Saver
from train.schedule import make_schedule
from train.validation import Validation, validate

# A run ends after this many consecutive steps with gradients that are not finite. Each such step halves the loss scale,
# which falls from its maximum of 2^24 to its minimum of 1 in 24 steps.
MAX_SKIPPED_STEPS = 50

# The run reports clipping if gradients are scaled down by more than this factor. (In the first steps of
# `cifar10_strong` on a CPU the norms are about 20 times its --clip-norm.)
LEAST_LEFT_BY_CLIPPING = 1000.0


class Stop(NamedTuple):
    """The reason why a run ends before its last epoch."""

    reason: str  # a key of `metrics.REASONS`
    text: str  # text for the user


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Inside, Python's garbage collector ignores all objects that exist now, because they will stay.

    Looking through them takes 60 to 90 ms (200,000 objects) every few hundred steps. That is three steps of a GPU,
    which has only one step queued; with several GPUs, all wait for each process's collection (measured: docs/data.md).
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Trainer:
    """A training run, from a fresh or restored state to its end."""

    def __init__(
        self,
        config: Config,
        workers: Workers,
        executor: Executor,
        train_loader: Loader,
        val_loader: Loader | None,
        run_folder: Path,
        checkpoint: Checkpoint | None,
        commit: Callable[[], None] | None = None,
    ) -> None:
        """`checkpoint`: the state from which the run resumes; `executor` has its parameters already. `commit`, in
        elastic runs, is called every few steps; it may call `capture`, and may end the session.

        Raises TrainError or DataError if the checkpoint does not fit this run.
        """
        self.config = config
        # configuration with which the run's last step was done
        self.before = checkpoint.config if checkpoint else config
        self.workers = workers
        self.executor = executor
        self.train_loader = train_loader
        self.state = RunState(config, workers, executor, train_loader)
        # notes: remarks for the user on how the run resumes; changes: the options that have changed.
        self.notes = self.state.restore(checkpoint) if checkpoint else []
        self.changes = changes(self.before, config)
        self.val_loader = val_loader
        self.plugin_metrics = PluginMetrics(config.plugin)
        self.validated: tuple[int, Outcomes] | None = None  # the session's latest validation: epochs done, outcomes
        self.run_folder = run_folder
        self.commit = commit
        self.all_reduce: GradientAllReduce | None = None  # set by `join` with several processes
        self.learning_rate = make_schedule(config, self.state.steps_per_epoch, workers.size)
        self.num_batches = 0  # batches of the last step, on each process
        self.origin: list[str] = []  # remarks on the trained weights from which the run starts
        self.saver = Saver(self.state, run_folder, f"{launcher()} --resume {shlex.quote(str(run_folder))}")
        run = LiveRun(run_folder, config.to_dict(), list(train_loader.class_names), workers.size)
        self.callbacks = Callbacks(config, run, workers.rank == 0)
        self.saver.on_saved = self.callbacks.saved
        self.during_last_save: Callable[[], None] = lambda: None  # called while the last checkpoint is written
        # receives the metrics that were requested at the last log line
        self.receive_metrics: Callable[[], Metrics] | None = None
        step = self.state.progress.step
        self.metrics_steps = (step, step) if checkpoint else (1, 0)  # first and last step of these metrics
        self.skipped_steps = self.skipped_in_a_row = 0  # values from the latest metrics
        self.monitor = GpuMonitor(executor.gpu_bus_id) if executor.gpu_bus_id else None
        self.reported_bad: set[tuple[str, str]] = set()
        self.has_told_of_clipping = False
        self.started_at = time.monotonic()

    def join(self) -> None:
        """Join the other processes, and give all processes the state of rank 0. Raises TrainError."""
        if self.workers.alone:
            return
        self.all_reduce = self.workers.gradient_all_reduce(self.executor)
        self.state.share()

    def settle(self) -> None:
        """Keep, in the run's files, the configuration of the run's last step, if a resumed run has no step left. A
        collective operation.
        """
        progress, epochs = self.state.progress, self.config.epochs
        self.saver.look_for_best()
        if progress.epoch >= epochs:
            self.notes = [f"nothing left to train: epoch {epochs} of {epochs} is done; raise --epochs to go on"]
        elif not (self._steps_used_up() or self._settled(VALIDATION)):
            return
        self.state.stated, self.changes = self.before, []

    # --- the loop ---

    def run(self, recorder: Recorder) -> None:
        """Train to the last epoch, or until a limit or target is reached. Raises StoppedBySignal, TrainError."""
        with self.callbacks.reporting_failures(), self.saver.finishing(recorder):
            self._run(recorder)

    def _run(self, recorder: Recorder) -> None:
        progress, epochs = self.state.progress, self.config.epochs
        # a resumed run may have reached its limit or target before
        stop = self._steps_used_up() or self._settled(recorder.evaluated)
        if self.changes:
            recorder.say(f"resuming with other options: {', '.join(self.changes)}")
            recorder.event("changed", options=self.changes)
        for note in self.notes:
            recorder.say(note)
        self.saver.report_best(recorder)
        if self.commit:
            self.commit()
        self.callbacks.start()
        stop = self._stop_of_callbacks(recorder) or stop
        with Signals(self.workers.alone) as signals:
            with self.monitoring(recorder), frozen_heap():
                while progress.epoch < epochs and not stop:
                    stop = self._train_epoch(recorder, signals)
                    if not stop:
                        stop = self._end_epoch(recorder, signals)
                        # `on_checkpoint` is called before the `on_epoch_end` of its epoch
                        if self.callbacks.hear_checkpoints:
                            self.saver.finish(recorder)
                        self.callbacks.end_epoch(progress.epoch, recorder.latest_epoch)
                        stop = self._stop_of_callbacks(recorder) or stop
            if stop:
                recorder.reason = stop.reason
                recorder.say(stop.text)
                recorder.event("stop", reason=stop.text)
            self.saver.save(recorder)
            self.during_last_save()
            self.saver.finish(recorder)
        self.callbacks.end(stop.reason if stop else "epochs")
        self._stop_of_callbacks(recorder)

    def _stop_of_callbacks(self, recorder: Recorder) -> Stop | None:
        """The reason for which the callbacks of process 0 end the run, or None. A collective operation. Raises
        TrainError, after a checkpoint, if a callback has failed.
        """
        if not self.callbacks:
            return None
        wish = self.workers.gather(self.callbacks.wish)[0]
        if wish.failure:
            if self.state.progress.step:
                self.saver.save_before_error(recorder)
            raise TrainError(wish.failure, on_all_ranks=True)
        return Stop("callback", f"stopped by a callback: {wish.reason}") if wish.reason else None

    @contextlib.contextmanager
    def monitoring(self, recorder: Recorder) -> Iterator[None]:
        """Monitor the GPU, if any, inside the block. A failed reading becomes an event."""
        if self.monitor:
            self.monitor.start()
        try:
            yield
        finally:
            if self.monitor:
                self.monitor.close()
                if self.monitor.problem:
                    recorder.event("gpu_readings", problem=self.monitor.problem)

    def _train_epoch(self, recorder: Recorder, signals: Signals) -> Stop | None:
        """Do the remaining steps of the epoch. Returns the reason why the run ends before the epoch, or None."""
        progress = self.state.progress
        sizes = self.train_loader.config
        if progress.epoch and sizes.size_in(progress.epoch) != sizes.size_in(progress.epoch - 1):
            recorder.say(f"epoch {progress.epoch + 1}: images of {sizes.size_in(progress.epoch)} pixels from now on")
            pulse.lose_pace()  # the next step builds the network for the new size
        recorder.begin_epoch(progress.epoch, self.state.steps_per_epoch, progress.epoch_step)
        # the run was resumed from a checkpoint that was saved before validation
        if self.train_loader.epoch > progress.epoch:
            return None
        batches = recorder.timed(self.train_loader)
        while self._step_or_save(batches, recorder):
            recorder.stop_clock(self.executor.idle_seconds)
            self.saver.report(recorder)
            save, failed, stop_signal, time_up, asked = self.workers.vote([
                signals.save or self.saver.is_due(), self.saver.has_failed, _is_to_stop(signals), self._time_up(),
                self.callbacks.is_to_stop])
            save |= stop_signal
            commits = self.commit is not None and progress.step % self.config.commit_every == 0
            is_last = time_up or asked or progress.step == self.config.max_steps
            self.end_step(recorder, read_now=save or failed or commits or is_last)
            if self.is_stuck:
                self.saver.save_completely(recorder)
                raise self.stuck()
            if save:
                signals.save = False
                self.saver.save(recorder)
            # A commit may contain the accuracy of a best checkpoint. Its weights must be on disk before, so that they
            # are not lost with this process.
            if failed or commits or stop_signal:
                self.saver.finish(recorder)
            # committed after logging, so that the steps of a commit are logged before a process resumes from it
            if self.commit and commits:
                with recorder.phase("commit"):
                    pulse.show(Activity.SAVING)
                    self.commit()
            if stop_signal:
                raise self._stopped(signals)
            if time_up:
                return Stop("time_limit", f"stopped: the time limit of {self.config.time_limit:g} minutes is reached")
            if stop := (asked and self._stop_of_callbacks(recorder)) or self._steps_used_up():
                return stop
        return None

    def _step_or_save(self, batches: Iterator[Batch], recorder: Recorder) -> bool:
        """As `step`, but a single process saves a checkpoint of the completed steps if an image cannot be read."""
        try:
            return self.step(batches)
        except DataError:
            if self.workers.alone and self.state.progress.step:
                self.saver.save_before_error(recorder)
            raise

    def _stopped(self, signals: Signals) -> StoppedBySignal:
        """The exception that ends the run after its state is saved."""
        return StoppedBySignal(
            signals.stop or signal.SIGTERM,  # with several processes, another process may have received the signal
            f"stopped after step {self.state.progress.step} with a checkpoint; resume with: "
            f"{self.saver.resume_command}",
        )

    @property
    def schedule_step(self) -> int:
        """The step for the schedule: the number of steps so far if all steps had had the present global batch."""
        return self.state.progress.epoch * self.state.steps_per_epoch + self.state.progress.epoch_step

    def step(self, batches: Iterator[Batch]) -> bool:
        """Do one optimizer step on the next batches. Returns False if the epoch has no batches left."""
        count = 0
        overlap: dict[str, Any] = {}
        if self.all_reduce and self.all_reduce.start and self.config.accumulate == 1:
            overlap["on_bucket"] = self.all_reduce.start
        pulse.show(Activity.LOADING)
        for batch in itertools.islice(batches, self.config.accumulate):
            pulse.show(Activity.COMPUTING)
            self.executor.forward_backward(
                batch.data, batch.label, accumulate=count > 0, draws=self._draws(count), **overlap
            )
            count += 1
            pulse.show(Activity.LOADING)
        if count == 0:
            return False
        self.num_batches = count
        if self.all_reduce:
            self.all_reduce.finish()
        decay = ema_decay(self.config.ema_decay, self.state.progress.step)
        self.state.optimizer.step(self.learning_rate(self.schedule_step), scale=1 / count, ema_decay=decay)
        self.state.shares.step(count, decay)
        self.executor.end_step()
        self.state.progress.step += 1
        self.state.progress.epoch_step += 1
        pulse.end_step(self.state.progress.epoch, self.state.progress.step)
        return True

    def _draws(self, number: int) -> Draws:
        """The random choices for batch `number` of the current step."""
        config, progress = self.config, self.state.progress
        batch = progress.epoch_step * config.accumulate + number
        return draw(config, progress.epoch, batch, self.workers.rank)

    def end_step(self, recorder: Recorder, read_now: bool = False) -> None:
        """Report the step to the recorder, with the metrics of the previous log line. Metrics are requested at one step
        and received after the next one has started, so the GPU never waits for them. Raises TrainError if they are not
        finite.

        `read_now`: receive the metrics of all steps so far. Checkpoints, commits and the end of an epoch need them; and
        the session's first step, whose line shows at once that the run is alive.
        """
        is_short = self.num_batches < self.config.accumulate
        images = self.num_batches * self.config.batch_size * self.workers.size if is_short else None
        recorder.end_step(self.learning_rate(self.schedule_step - 1), images)
        read_now |= recorder.is_first_step
        self._log(recorder)
        if recorder.log_due or read_now:
            recorder.close_interval()
            self.receive_metrics = self.executor.request_metrics()
            self.metrics_steps = (self.metrics_steps[1] + 1, self.state.progress.step)
        if read_now or self.state.progress.epoch_step == self.state.steps_per_epoch:
            self._log(recorder)

    def _log(self, recorder: Recorder) -> None:
        """Receive the requested metrics, if any, and log them."""
        if self.receive_metrics:
            readings = self.monitor.take() if self.monitor else ()
            # the sum over all ranks adds the other rows
            waits = np.zeros((self.workers.size, len(recorder.loader_waits)))
            waits[self.workers.rank] = recorder.loader_waits
            own = self.receive_metrics()
            skipped = self.executor.skipped_steps, self.executor.skipped_in_a_row  # equal on all processes
            values = self.workers.sum([*waits.ravel(), *own, *skipped, *readings])
            self.receive_metrics = None
            slowest = np.reshape(values[: waits.size], waits.shape).max(axis=0).tolist()
            metrics, values = Metrics(*values[waits.size :][:4]), values[waits.size + 4 :]
            before = self.skipped_steps
            self.skipped_steps, self.skipped_in_a_row = (round(value / self.workers.size) for value in values[:2])
            sums = values[2:]
            gpu = GpuReadings(*(value / self.workers.size for value in sums))._replace(power=sums[0]) if sums else None
            recorder.log(metrics, gpu, slowest, self.skipped_steps - before, self.executor.gradient_norm)
            self._tell_of_clipping(recorder)
            if not math.isfinite(metrics.loss_sum):
                self.saver.finish(recorder)  # finished first, because the error names the last complete checkpoint
                raise self.saver.diverged(*self.metrics_steps, self.state.progress.epoch)

    def _tell_of_clipping(self, recorder: Recorder) -> None:
        """Report once if clipping leaves almost nothing of the gradients. The loss alone would not show why the
        training stalls.
        """
        norm, clip_norm = self.executor.gradient_norm, self.config.clip_norm
        if self.has_told_of_clipping or norm is None or not clip_norm * LEAST_LEFT_BY_CLIPPING < norm < math.inf:
            return
        self.has_told_of_clipping = True
        recorder.say(f"step {self.metrics_steps[1]}: the norm of the gradients is {norm:.3g}, and --clip-norm "
                     f"{clip_norm:g} scales them down to {clip_norm:g}: weights may hardly change; 1 is usual")

    def _end_epoch(self, recorder: Recorder, signals: Signals) -> Stop | None:
        """Validate if a validation is due. Returns the reason why the run ends here, or None."""
        config, progress = self.config, self.state.progress
        done = progress.epoch + 1
        self._report_bad_images(recorder, self.train_loader)
        self.saver.look_for_removed(recorder)
        is_due = config.validate_every and (done % config.validate_every == 0 or done == config.epochs)
        validation = self._validate(recorder, signals, self.val_loader) if self.val_loader and is_due else None
        progress.epoch, progress.epoch_step = done, 0
        if not validation:
            recorder.end_epoch()
            return None
        metrics, outcomes = validation
        of_plugins = self.plugin_metrics.means(self.workers, metrics.count)
        is_balance_wanted = max(config.balance, config.class_weights) > 0 or outcomes.is_uneven
        recorder.end_epoch(metrics, outcomes.balanced_accuracy if is_balance_wanted else None, of_plugins)
        top1 = metrics.top1 / metrics.count
        if top1 > progress.best_top1:
            progress.best_top1, progress.validations_since_best = top1, 0
            self.saver.save(recorder, best=outcomes)
        else:
            progress.validations_since_best += 1
        return self._settled(recorder.evaluated)

    def _settled(self, images: str) -> Stop | None:
        """The reason for which the accuracies on `images` so far end the run, or None. Accuracies from before a
        resumption count, too.
        """
        config, progress, evaluated = self.config, self.state.progress, accuracy_of(images)
        if 0 < config.target_accuracy <= progress.best_top1:
            return Stop("target_accuracy", f"stopped: the {evaluated} is {progress.best_top1:.4f} and has reached the "
                                           f"target of {config.target_accuracy:g}")
        if 0 < config.patience <= progress.validations_since_best:
            return Stop("patience", f"stopped: {progress.validations_since_best} validations in a row have not raised "
                                    f"the {evaluated} above {progress.best_top1:.4f}, whose weights are kept")
        return None

    def _validate(self, recorder: Recorder, signals: Signals, loader: Loader) -> Validation:
        """Validate after an epoch's last step. The state is saved before, so that a run that is stopped or fails
        meanwhile resumes with this validation. Raises StoppedBySignal, and UserError if an image cannot be read."""
        self.saver.save_unless_fresh(recorder)
        self.plugin_metrics.begin()
        try:
            with recorder.phase("validation"), self.evaluating(together=True):
                validation = validate(self.executor, loader, self.workers, lambda: _is_to_stop(signals),
                                      partial(recorder.show_progress, total=loader.num_batches), self.plugin_metrics)
        except LostProcessError:
            raise
        except UserError:
            self.saver.save_before_error(recorder)
            raise
        if not validation:
            self.saver.save_completely(recorder)
            raise self._stopped(signals)
        self.validated = self.state.progress.epoch + 1, validation.outcomes
        self._report_bad_images(recorder, loader)
        return validation

    @contextlib.contextmanager
    def evaluating(self, together: bool = False) -> Iterator[None]:
        """A context in which the executor computes with the values to validate: the moving averages, if any, and
        BatchNorm's statistics without the share of their initial values. `together`: average the statistics over all
        processes; this is a collective operation.
        """
        with ema_in_use(self.state.optimizer):
            if together:
                self.workers.all_reduce_on_host(self.executor.trained_statistics, "aux")
            with self.state.shares.divided_out(self.executor, is_averaged=bool(self.state.optimizer.ema)):
                yield

    def _report_bad_images(self, recorder: Recorder, loader: Loader) -> None:
        """At the end of an epoch of the loader, report and count the images that any process has skipped, and report
        damaged ones that were used. (In training the recorder reports the images of its own process.) A collective
        operation.
        """
        found = self.workers.gather((loader.bad_images, loader.damaged_images, loader.num_skipped))
        for rank, (bad, damaged, num_skipped) in enumerate(found):
            recorder.num_skipped += num_skipped
            is_named = loader is self.train_loader and rank == 0
            for kind, images in zip(IMAGE_EVENTS, (bad, damaged), strict=True):
                for file, reason in [] if is_named else sorted(set(images) - self.reported_bad):
                    recorder.name_image(kind, file, reason)
            self.reported_bad.update(bad, damaged)

    # --- reasons to end ---

    def _time_up(self) -> bool:
        limit = self.config.time_limit
        return self.workers.rank == 0 and 0 < 60 * limit <= time.monotonic() - self.started_at

    def _steps_used_up(self) -> Stop | None:
        """The reason to end if --max-steps is reached; otherwise None."""
        done, limit = self.state.progress.step, self.config.max_steps
        return Stop("max_steps", f"stopped after step {done}: --max-steps is {limit}") if 0 < limit <= done else None

    @property
    def is_stuck(self) -> bool:
        """Whether steps no longer change any weight, according to the latest metrics."""
        return self.skipped_in_a_row >= MAX_SKIPPED_STEPS

    def stuck(self) -> TrainError:
        """The error for a run that is stuck."""
        progress = self.state.progress
        saved = f"; the weights are in {self.saver.last_saved}" if self.saver.last_saved else ""
        return TrainError(
            f"{self.skipped_in_a_row} steps in a row have changed no weight, since gradients are not finite even at a "
            f"loss scale of 1 (step {progress.step}, epoch {progress.epoch + 1}){saved}: resume with --dtype "
            f"bfloat16, or begin anew with a lower --learning-rate (now {self.config.shown_rate})",
            on_all_ranks=True,
        )


def _is_to_stop(signals: Signals) -> bool:
    return signals.stop > 0 or pulse.is_to_stop
