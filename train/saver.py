"""Saves a run: decides when a checkpoint is due, writes the checkpoint while training continues, and notices removed
checkpoints.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.files import shown_size
from train.background import Background
from train.checkpoint import BEST, FOLDER, Checkpoint, CheckpointFolder, Progress, read_outcomes
from train.errors import TrainError
from train.processes.pulse import Activity, pulse
from train.recording.outcomes import Outcomes
from train.recording.recorder import Recorder
from train.run_state import RunState

BYTES = 4  # bytes of each value in a checkpoint
FRESH_SECONDS = 30.0  # no checkpoint is saved before validation if the last checkpoint is younger than this


class _Begun(NamedTuple):
    """A checkpoint that is being written."""

    progress: Progress  # progress at the capture
    is_best: bool


class Saver:
    """Writes the checkpoints of a run into its folder.

    The state is copied to host memory between two steps, and rank 0 writes the copy in a thread while training
    continues. At most one write is in flight: the next checkpoint waits for the previous one. A checkpoint is reported
    to the recorder and to `on_saved` by the training thread, once its files are complete. The error of a write ends the
    run at the next step or checkpoint (`has_failed`, `finish`).
    """

    def __init__(self, state: RunState, run_folder: Path, resume_command: str) -> None:
        """`state`: the state of the run, already restored if the run resumes."""
        self.state = state
        self.resume_command = resume_command
        self.checkpoints = CheckpointFolder(run_folder, state.config.keep_checkpoints)
        self.on_saved: Callable[[Path], None] = lambda path: None  # called with each complete checkpoint
        self.last_saved: Path | None = None  # rank 0: the latest complete checkpoint
        self.saved_progress: Progress | None = None  # progress at the last capture
        self.saved_at = time.monotonic()  # time of the last capture
        self._writer = Background()  # used by rank 0
        self._unreported: _Begun | None = None  # rank 0: the checkpoint in flight, until it is reported
        self._is_finished = True  # whether all ranks know that the latest checkpoint is complete; equal on all ranks
        resumed = self.checkpoints.path_of(state.progress.step)
        if state.progress.step and resumed.exists():
            self.last_saved, self.saved_progress = resumed, replace(state.progress)

    def check_space(self) -> None:
        """Raise TrainError if the run's folder has no room for a checkpoint, so that this error comes before training
        and not after an epoch.
        """
        state = self.state
        if state.workers.rank:
            return
        optimizer = state.optimizer
        groups = (state.executor.params, state.executor.aux, *optimizer.state.values(), optimizer.ema)
        size = BYTES * sum(math.prod(array.shape) for arrays in groups for array in arrays.values())
        folder = next(path for path in (self.checkpoints.path, *self.checkpoints.path.parents) if path.exists())
        free = shutil.disk_usage(folder).free
        if free < size:
            raise TrainError(f"a checkpoint of this run takes {shown_size(size)}, and the disk of {folder} has "
                             f"{shown_size(free)} free: make room, or give another --output")

    def is_due(self) -> bool:
        """Whether rank 0 requests a checkpoint, by the time since the last one."""
        minutes = self.state.config.checkpoint_minutes
        return self.state.workers.rank == 0 and 0 < 60 * minutes <= time.monotonic() - self.saved_at

    def save_unless_fresh(self, recorder: Recorder) -> None:
        """Save, unless the last checkpoint is only seconds old; a collective operation."""
        workers = self.state.workers
        if workers.sum([workers.rank == 0 and time.monotonic() - self.saved_at > FRESH_SECONDS])[0]:
            self.save(recorder)

    def save(self, recorder: Recorder, best: Outcomes | None = None) -> None:
        """Capture a checkpoint, unless the last one has this state, and begin to write it. A collective operation.

        `best`: the outcomes of the latest validation, if it is the best so far; the outcomes are kept with the weights.
        Raises TrainError if the previous checkpoint is not finite or cannot be written.
        """
        workers, progress, is_best = self.state.workers, self.state.progress, best is not None
        self.finish(recorder)
        self.look_for_removed(recorder)
        if progress == self.saved_progress and not is_best:
            return
        with recorder.phase("checkpoint"):
            pulse.show(Activity.SAVING)
            make = self.state.request()
        self.saved_progress, self.saved_at = replace(progress), time.monotonic()
        self._is_finished = False
        if workers.rank == 0:
            self._writer.start(partial(self._write, make, best))
            self._unreported = _Begun(self.saved_progress, is_best)

    def _write(self, make: Callable[[], Checkpoint], best: Outcomes | None) -> None:
        checkpoint = replace(make(), outcomes=vars(best) if best else {})
        self._check_finite(checkpoint)
        self.checkpoints.save(checkpoint, is_best=best is not None)

    def save_completely(self, recorder: Recorder) -> None:
        """Like `save`, but also waits for the file."""
        self.save(recorder)
        self.finish(recorder)

    def save_before_error(self, recorder: Recorder) -> None:
        """Save a checkpoint before a user's mistake ends the run, and report how to resume."""
        self.save_completely(recorder)
        recorder.say(f"step {self.state.progress.step} is saved; fix that, then resume with: {self.resume_command}")

    @property
    def is_writing(self) -> bool:
        """Whether this process is writing a checkpoint at present."""
        return self._writer.is_running

    @property
    def has_failed(self) -> bool:
        """Whether rank 0 could not write the checkpoint in flight, so that `finish` raises its error."""
        return self._writer.has_failed

    def report(self, recorder: Recorder) -> None:
        """Report the checkpoint in flight, if its files are complete by now. Never waits."""
        if self._unreported and not (self.is_writing or self.has_failed):
            self._wait(recorder)

    def finish(self, recorder: Recorder) -> None:
        """Wait until the checkpoint in flight, if any, is complete, and report it. A collective operation. Raises
        TrainError if the checkpoint's parameters are not finite, or if it cannot be written.
        """
        if not self._is_finished:
            self._is_finished = True
            with self.state.workers.agreement():
                self._wait(recorder)

    def _wait(self, recorder: Recorder) -> None:
        """`finish` in this process; nothing to do on ranks other than 0."""
        begun, self._unreported = self._unreported, None
        if not begun:
            return
        if self.is_writing:
            with recorder.phase("checkpoint"):
                pulse.show(Activity.SAVING)
                self._writer.wait()
        self._writer.wait()
        self.last_saved = self.checkpoints.path_of(begun.progress.step)
        self._report_saved(recorder, *begun)
        self.on_saved(self.last_saved)

    @contextlib.contextmanager
    def finishing(self, recorder: Recorder) -> Iterator[None]:
        """A context in which the run trains. If an error ends it, the checkpoint in flight is still completed; but not
        after a second Ctrl-C, because the user has been told that it ends the run without saving.
        """
        try:
            yield
        except Exception:
            with contextlib.suppress(TrainError):  # the first error is shown
                self._wait(recorder)
            raise

    def capture(self) -> Checkpoint:
        """The state as a checkpoint; a collective operation. Raises TrainError if parameters are not finite."""
        checkpoint = self.state.capture()
        self._check_finite(checkpoint)
        return checkpoint

    def _check_finite(self, checkpoint: Checkpoint) -> None:
        progress = checkpoint.progress
        if not all(np.isfinite(array).all() for arrays in (checkpoint.params, checkpoint.aux)
                   for array in arrays.values()):
            raise self.diverged(progress.step, progress.step, progress.epoch)

    def diverged(self, first: int, last: int, epochs_done: int) -> TrainError:
        """The error for a loss that is not finite in the steps `first` to `last`."""
        steps = f"step {last}" if first == last else f"steps {first} to {last}"
        saved = f"the last good checkpoint is {self.last_saved}" if self.last_saved else "there is no checkpoint yet"
        return TrainError(
            f"the loss is no longer finite ({steps}, epoch {epochs_done + 1}); {saved}: "
            f"{self.state.config.divergence_advice}",
            on_all_ranks=True,
        )

    def look_for_removed(self, recorder: Recorder) -> None:
        """Report removed checkpoints, and no longer rely on them. Does nothing while a checkpoint is being written."""
        workers = self.state.workers
        removed = self.checkpoints.removed() if workers.rank == 0 and not self.is_writing else []
        recorder.removed([f"{FOLDER}/{name}" for name in removed])
        any_removed, best_removed = workers.sum([len(removed), BEST in removed])
        if any_removed:
            self.saved_progress = None
        if best_removed:
            self._forget_best()

    def look_for_best(self) -> None:
        """Forget the best accuracy if best.npz is missing, because the run has resumed in another folder, or the file
        was removed.
        """
        workers = self.state.workers
        if workers.sum([workers.rank == 0 and not self.checkpoints.has_best])[0]:
            self._forget_best()

    def report_best(self, recorder: Recorder) -> None:
        """Report best.npz if an earlier session was killed between its completion and its event."""
        found, record = read_outcomes(self.checkpoints.path / BEST) if recorder.enabled else None, recorder.record
        told = [event["epoch"] for event in record.events if event.get("is_best") and "epoch" in event]
        if found and told[-1:] != [found[0].epoch] and any(row.epoch == found[0].epoch for row in record.epochs):
            self._report_saved(recorder, found[0], is_best=True)

    def _report_saved(self, recorder: Recorder, progress: Progress, is_best: bool) -> None:
        recorder.event("checkpoint", step=progress.step, file=self.checkpoints.path_of(progress.step).name,
                       is_best=is_best, **({"epoch": progress.epoch} if is_best else {}))

    def _forget_best(self) -> None:
        self.state.progress.best_top1 = -1.0  # an accuracy is kept only with its weights in best.npz
        self.state.progress.validations_since_best = 0


def best_outcomes(run_folder: Path) -> tuple[int, Outcomes] | None:
    """Epochs done at a run's best validation, and its outcomes, from best.npz. None if the file does not exist, or if
    an earlier version has written it.
    """
    found = read_outcomes(run_folder / FOLDER / BEST)
    if not found:
        return None
    progress, arrays = found
    names = {field.name for field in fields(Outcomes)}
    return (progress.epoch, Outcomes(**arrays)) if arrays.keys() == names else None
