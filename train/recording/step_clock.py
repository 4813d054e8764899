"""Where a run stands, and where the time of its steps goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from train.recording.metrics import Speed, speed

SPEED_WINDOW = 100  # steps that the speed on the terminal looks back on: smooth, yet a slow-down shows


@dataclass
class Place:
    """Where a run stands: optimizer steps and whole epochs behind it, and the epoch under way."""

    num_epochs: int | None  # of the whole run; None: nobody can tell its end
    step: int
    epoch: int
    epoch_first_step: int  # steps that the run had behind it where the epoch began
    epoch_steps: int = 0  # of the whole epoch

    def begin_epoch(self, epoch: int, num_steps: int, steps_done: int) -> None:
        """The epoch, of which `steps_done` are done already where a run is resumed in its middle."""
        self.epoch, self.epoch_steps, self.epoch_first_step = epoch, num_steps, self.step - steps_done

    @property
    def epoch_step(self) -> int:
        """Steps of the epoch that are done."""
        return self.step - self.epoch_first_step

    @property
    def epochs_done(self) -> float:
        """With the fraction of the one under way."""
        return self.epoch + self.epoch_step / max(self.epoch_steps, 1)

    def __str__(self) -> str:
        if self.num_epochs is None:
            return f"step {self.epoch_step}"
        return f"epoch {self.epoch + 1}/{self.num_epochs}, step {self.epoch_step}/{self.epoch_steps}"


@dataclass
class StepTimes:
    """Of some steps that follow each other, in ms; named as in the RunRecord."""

    step_ms: list[float]
    loader_wait_ms: list[float]
    compute_ms: list[float]

    def append(self, step_ms: float, wait_ms: float) -> None:
        self.step_ms.append(round(step_ms, 4))
        self.loader_wait_ms.append(round(wait_ms, 4))
        self.compute_ms.append(round(step_ms - wait_ms, 4))

    def set_waits(self, loader_waits: Sequence[float]) -> None:
        """Waits that another process has told: no longer than the steps were here."""
        self.loader_wait_ms = [min(wait, step) for wait, step in zip(loader_waits, self.step_ms, strict=True)]
        self.compute_ms = [round(step - wait, 4) for wait, step in zip(self.loader_wait_ms, self.step_ms, strict=True)]


@dataclass
class Interval:
    """Steps whose metrics are summed: those since the interval before, up to `step`."""

    step: int
    epoch: float  # with the fraction done
    place: str  # the same for people
    learning_rate: float  # of its last step
    is_logged: bool  # with a line on the terminal
    time_left: str  # of the run, for people
    rate: Speed | None  # of the latest steps, for people; None for a session's first
    times: StepTimes
    last_step_images: int | None  # where they are fewer than those of the others


class StepClock:
    """Measures the steps of a session.

    A step lasts from the end of the one before it, or from the beginning of its epoch, to its own end. What is
    `left_out` (validation, checkpoints) is no part of it.

    Args:
        now: tells seconds.
        first_step: steps that the run has behind it.
        warmup_steps: first steps of the session that the speed shown soon forgets.
    """

    def __init__(self, now: Callable[[], float], first_step: int, warmup_steps: int) -> None:
        self.now = now
        self._forget_after = (first_step + 1, first_step + warmup_steps)  # the first step starts everything
        self._step_start = now()
        self._step_end: float | None = None  # where `stop` has been called
        self._overhang = 0.0  # seconds from the last step's end until `end_step` or `hold`: they are the next step's
        self._waited = 0.0  # seconds of this step so far
        self._waited_before = 0.0  # of the step before, where the device works ahead
        self._times = StepTimes([], [], [])  # since `take`
        self._recent_ms: deque[float] = deque(maxlen=SPEED_WINDOW)
        self._recent_images: deque[int] = deque(maxlen=SPEED_WINDOW)
        self._epoch_began: float | None = None  # time; of the epoch under way, if it began with its first step
        self._epoch_step_ms = 0.0  # the steps of it
        self._rests: list[float] = []  # s; what whole epochs of this session took beyond their steps

    def begin_epoch(self, is_whole: bool) -> None:
        now = self.now()
        self._step_start, self._waited = now - self._overhang, 0.0
        if self._epoch_began is not None:
            self._rests.append(max(now - self._epoch_began - self._epoch_step_ms / 1e3, 0.0))
        self._epoch_began = now if is_whole else None
        self._epoch_step_ms = 0.0

    def waited_since(self, start: float) -> None:
        """The loop has waited for the loader since then."""
        self._waited += self.now() - start

    def stop(self, idle_seconds: float | None) -> None:
        """The step under way is over; see `Recorder.stop_clock`."""
        self._step_end = self.now()
        if idle_seconds is not None:
            waited_before, self._waited_before = self._waited_before, self._waited
            self._waited = min(waited_before, idle_seconds)

    def end_step(self, step: int, images: int) -> None:
        """The step of that number has ended, now or where `stop` was called."""
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
        """What has passed since the last step's end is part of the next step, even if an epoch begins before that."""
        self._overhang = self.now() - self._step_start

    def leave_out(self, seconds: float) -> None:
        """So many of the seconds since the last step's end are no part of the next one."""
        self._step_start += seconds

    @property
    def has_steps(self) -> bool:
        """Whether there are some that have not been taken."""
        return bool(self._times.step_ms)

    def take(self) -> StepTimes:
        """The times of the steps since this was called before."""
        times, self._times = self._times, StepTimes([], [], [])
        return times

    def recent_speed(self) -> Speed:
        """Of the latest steps."""
        return speed(self._recent_ms, np.asarray(self._recent_images))

    def time_left(self, place: Place) -> str:
        """Of the run, for people; "" where nobody can foretell its end.

        It is that of its steps, and that of what else its epochs hold (validation, checkpoints), which is known once
        one is over. The first of them is a bad example, because it starts everything.
        """
        if place.num_epochs is None:
            return ""
        epochs = place.num_epochs - place.epoch
        steps = epochs * place.epoch_steps - place.epoch_step
        rests = self._rests[1:] or self._rests
        seconds = steps * float(np.mean(self._recent_ms)) / 1e3 + epochs * (float(np.mean(rests)) if rests else 0.0)
        return f"{'' if rests else '> '}{timedelta(seconds=round(max(seconds, 0)))}"
