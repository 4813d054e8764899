"""Saves a run: decides when a checkpoint is due, and notices removed checkpoints."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from common.files import shown_size
from train.checkpoint import BEST, FOLDER, Checkpoint, CheckpointFolder, Progress, read_outcomes
from train.errors import TrainError
from train.processes.pulse import Activity, pulse
from train.recording.outcomes import Outcomes
from train.recording.recorder import Recorder
from train.run_state import RunState

BYTES = 4  # bytes of each value in a checkpoint
FRESH_SECONDS = 30.0  # a checkpoint younger than this makes another one before validation unnecessary


class Saver:
    """Writes the checkpoints of a run into its folder."""

    def __init__(self, state: RunState, run_folder: Path, resume_command: str) -> None:
        """`state`: already restored, if the run resumes."""
        self.state = state
        self.resume_command = resume_command
        self.checkpoints = CheckpointFolder(run_folder, state.config.keep_checkpoints)
        self.on_saved: Callable[[Path], None] = lambda path: None  # called with each new checkpoint
        self.last_saved: Path | None = None
        self.saved_progress: Progress | None = None  # progress in the last checkpoint
        self.saved_at = time.monotonic()
        resumed = self.checkpoints.path_of(state.progress.step)
        if state.progress.step and resumed.exists():
            self.last_saved, self.saved_progress = resumed, replace(state.progress)

    def check_space(self) -> None:
        """Raise TrainError if the run's folder has no room for a checkpoint: better now than after an epoch."""
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
        """Save a checkpoint, unless the last one has this state. `best`: the outcomes of the validation just made, if
        it is the best so far; they are kept with the weights. Raises TrainError if it is not finite or cannot be
        written."""
        workers, progress, is_best = self.state.workers, self.state.progress, best is not None
        self.look_for_removed(recorder)
        if progress == self.saved_progress and not is_best:
            return
        path = self.checkpoints.path_of(progress.step)
        with recorder.phase("checkpoint"):
            pulse.show(Activity.SAVING)
            checkpoint = replace(self.capture(), outcomes=vars(best) if best else {})
            with workers.agreement():
                if workers.rank == 0:
                    self.checkpoints.save(checkpoint, is_best)
        self.last_saved, self.saved_at = path, time.monotonic()
        self.saved_progress = replace(progress)
        recorder.event("checkpoint", file=path.name, is_best=is_best, **({"epoch": progress.epoch} if is_best else {}))
        self.on_saved(path)

    def save_before_error(self, recorder: Recorder) -> None:
        """Save before a user's mistake ends the run, and report how to resume."""
        self.save(recorder)
        recorder.say(f"step {self.state.progress.step} is saved; fix that, then resume with: {self.resume_command}")

    def capture(self) -> Checkpoint:
        """The state as a checkpoint; a collective operation. Raises TrainError if parameters are not finite."""
        checkpoint, step = self.state.capture(), self.state.progress.step
        if not all(np.isfinite(array).all() for arrays in (checkpoint.params, checkpoint.aux)
                   for array in arrays.values()):
            raise self.diverged(step, step)
        return checkpoint

    def diverged(self, first: int, last: int) -> TrainError:
        """The error for a loss that is not finite in the steps `first` to `last`."""
        steps = f"step {last}" if first == last else f"steps {first} to {last}"
        saved = f"the last good checkpoint is {self.last_saved}" if self.last_saved else "there is no checkpoint yet"
        return TrainError(
            f"the loss is no longer finite ({steps}, epoch {self.state.progress.epoch + 1}); {saved}: "
            f"{self.state.config.divergence_advice}",
            on_all_ranks=True,
        )

    def look_for_removed(self, recorder: Recorder) -> None:
        """Report removed checkpoints, and no longer count on them."""
        workers = self.state.workers
        removed = self.checkpoints.removed() if workers.rank == 0 else []
        recorder.removed([f"{FOLDER}/{name}" for name in removed])
        any_removed, best_removed = workers.sum([len(removed), BEST in removed])
        if any_removed:
            self.saved_progress = None
        if best_removed:
            self._forget_best()

    def look_for_best(self) -> None:
        """Forget the best accuracy if best.npz is missing: the run may resume in another folder, or the file was
        removed."""
        workers = self.state.workers
        if workers.sum([workers.rank == 0 and not self.checkpoints.has_best])[0]:
            self._forget_best()

    def _forget_best(self) -> None:
        self.state.progress.best_top1 = -1.0  # an accuracy is kept only with its weights in best.npz
        self.state.progress.validations_since_best = 0


def best_outcomes(run_folder: Path) -> tuple[int, Outcomes] | None:
    """Epochs done at a run's best validation, and its outcomes, from best.npz. None without that file, or if an earlier
    version has written it."""
    found = read_outcomes(run_folder / FOLDER / BEST)
    if not found:
        return None
    progress, arrays = found
    names = {field.name for field in fields(Outcomes)}
    return (progress.epoch, Outcomes(**arrays)) if arrays.keys() == names else None
