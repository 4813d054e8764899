"""The position of a run in its epochs and steps, and the timing of its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from train.recording.metrics import Speed, speed

# steps averaged for the speed on the terminal: enough steps for a smooth value, but few enough to show a slow-down
SPEED_WINDOW = 100


@dataclass
class Place:
    """The position of a run: optimizer steps and epochs done, and the current epoch."""

    num_epochs: int | None  # epochs of the whole run; None: the end of the run is unknown
    step: int
    epoch: int
    epoch_first_step: int  # steps done when the epoch began
    epoch_steps: int = 0  # steps of the whole epoch

    def begin_epoch(self, epoch: int, num_steps: int, steps_done: int) -> None:
        """Begin an epoch; `steps_done` of its steps are already done if the run resumes within it."""
        self.epoch, self.epoch_steps, self.epoch_first_step = epoch, num_steps, self.step - steps_done

    @property
    def epoch_step(self) -> int:
        """Steps done in the current epoch."""
        return self.step - self.epoch_first_step

    @property
    def epochs_done(self) -> float:
        """Epochs done, including the fraction of the current epoch."""
        return self.epoch + self.epoch_step / max(self.epoch_steps, 1)

    def __str__(self) -> str:
        if self.num_epochs is None:
            return f"step {self.epoch_step}"
        return f"epoch {self.epoch + 1}/{self.num_epochs}, step {self.epoch_step}/{self.epoch_steps}"


@dataclass
class StepTimes:
    """Times of consecutive steps, in ms; fields are named as in RunRecord."""

    step_ms: list[float]
    loader_wait_ms: list[float]
    compute_ms: list[float]

    def append(self, step_ms: float, wait_ms: float) -> None:
        self.step_ms.append(round(step_ms, 4))
        self.loader_wait_ms.append(round(wait_ms, 4))
        self.compute_ms.append(round(step_ms - wait_ms, 4))

    def set_waits(self, loader_waits: Sequence[float]) -> None:
        """Replace the waits for the loader by the waits of another process, limited to the durations of the steps in
        this process.
        """
        self.loader_wait_ms = [min(wait, step) for wait, step in zip(loader_waits, self.step_ms, strict=True)]
        self.compute_ms = [round(step - wait, 4) for wait, step in zip(self.loader_wait_ms, self.step_ms, strict=True)]


@dataclass
class Interval:
    """The steps over which metrics are summed: the steps after the previous interval, up to `step`."""

    step: int
    epoch: float  # epochs done, with the fraction of the current epoch
    place: str  # the position in words
    learning_rate: float  # learning rate of the last step
    is_logged: bool  # whether the interval gets a line on the terminal
    time_left: str  # time left of the run, in words
    rate: Speed | None  # speed of the latest steps, to show; None for a session's first interval
    times: StepTimes
    last_step_images: int | None  # number of images in the last step, if it has fewer images


class StepClock:
    """Measures the steps of a session.

    A step lasts from the end of the previous step, or from the beginning of its epoch, to its own end. Time passed to
    `leave_out` (validation, checkpoints) does not count.

    Args:
        now: returns seconds.
        first_step: steps that the run has done before.
        warmup_steps: steps at the start of the session that the speed on the terminal soon forgets.
    """

    def __init__(self, now: Callable[[], float], first_step: int, warmup_steps: int) -> None:
        self.now = now
        self._forget_after = (first_step + 1, first_step + warmup_steps)  # the first step includes all set-up
        self._step_start = now()
        self._step_end: float | None = None  # end of the current step; `stop` sets it
        self._overhang = 0.0  # seconds from the last step's end to `end_step` or `hold`, which count for the next step
        self._waited = 0.0  # s; waits in this step so far
        self._waited_before = 0.0  # s; waits in the previous step, if the device works ahead
        self._times = StepTimes([], [], [])  # times of the steps since the last `take`
        self._recent_ms: deque[float] = deque(maxlen=SPEED_WINDOW)
        self._recent_images: deque[int] = deque(maxlen=SPEED_WINDOW)
        # start time of the current epoch, if the session has it from its first step
        self._epoch_began: float | None = None
        self._epoch_step_ms = 0.0  # sum of the times of the epoch's steps
        self._rests: list[float] = []  # s; time of the session's complete epochs outside their steps

    def begin_epoch(self, is_whole: bool) -> None:
        now = self.now()
        self._step_start, self._waited = now - self._overhang, 0.0
        if self._epoch_began is not None:
            self._rests.append(max(now - self._epoch_began - self._epoch_step_ms / 1e3, 0.0))
        self._epoch_began = now if is_whole else None
        self._epoch_step_ms = 0.0

    def waited_since(self, start: float) -> None:
        """Count the time since `start` as a wait for the loader."""
        self._waited += self.now() - start

    def stop(self, idle_seconds: float | None) -> None:
        """End the current step; see `Recorder.stop_clock`."""
        self._step_end = self.now()
        if idle_seconds is not None:
            waited_before, self._waited_before = self._waited_before, self._waited
            self._waited = min(waited_before, idle_seconds)

    def end_step(self, step: int, images: int) -> None:
        """Record the end of step `step`, now or at the call of `stop`."""
        now = self.now()
        step_end = now if self._step_end is None else self._step_end
        self._step_end = None
        step_ms, wait_ms = 1e3 * (step_end - self._step_start), 1e3 * self._waited
        self._step_start, self._overhang, self._waited = step_end, now - step_end, 0.0
        self._epoch_step_ms += step_ms
        self._times.append(step_ms, wait_ms)
        if step - 1 in self._forget_after:
            self._recent_ms.clear()
            self._recent_images.clear()
        self._recent_ms.append(step_ms)
        self._recent_images.append(images)

    def hold(self) -> None:
        """Count the time since the last step's end for the next step, even if an epoch begins before it."""
        self._overhang = self.now() - self._step_start

    def leave_out(self, seconds: float) -> None:
        """Exclude this many of the seconds since the last step's end from the next step."""
        self._step_start += seconds

    @property
    def has_steps(self) -> bool:
        """Whether there are steps that have not been taken."""
        return bool(self._times.step_ms)

    def take(self) -> StepTimes:
        """The times of the steps since the previous call."""
        times, self._times = self._times, StepTimes([], [], [])
        return times

    def recent_speed(self) -> Speed:
        """The speed of the latest steps."""
        return speed(self._recent_ms, np.asarray(self._recent_images))

    def time_left(self, place: Place) -> str:
        """The remaining time of the run, in words; "" if it cannot be estimated.

        The estimate is the time of the remaining steps plus the remaining epochs' time outside steps (validation,
        checkpoints). The latter is known after one complete epoch. The first epoch is left out of the mean if possible,
        because its time includes all set-up.
        """
        if place.num_epochs is None:
            return ""
        epochs = place.num_epochs - place.epoch
        steps = epochs * place.epoch_steps - place.epoch_step
        rests = self._rests[1:] or self._rests
        seconds = steps * float(np.mean(self._recent_ms)) / 1e3 + epochs * (float(np.mean(rests)) if rests else 0.0)
        return f"{'' if rests else '> '}{timedelta(seconds=round(max(seconds, 0)))}"
