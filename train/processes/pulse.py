"""The pulse of a process: what it shows its launcher of what it does, in a few bytes of shared memory.

A process writes its `Record` between steps, batches and operations among the processes; the launcher (watch.py) reads
all of them and tells a process that hangs from those that only wait for it. It costs a store into memory, asks nothing
of the process that is looked at, and stays readable whatever that process is blocked in.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

# Where an elastic run goes on with a single commit: the first one of a run is what it began with.
BEGINNING = "where the run began: nothing it trained was committed yet (--commit-every)"
PULSE_VARIABLE = "RESNET_PULSE"  # environment variable: descriptor of the memory, and the number of the record there
POLL_SECONDS = 0.02
DEVICE_SECONDS = 1.0


class Activity(IntEnum):
    """What a process is doing; `words` of it stand in messages."""

    STARTING = 0
    AT_DOOR = 1  # of an elastic run: waits to be given a rank
    JOINING = 2  # likewise: connects to the others
    LOADING = 3
    COMPUTING = 4
    TOGETHER = 5
    VALIDATING = 6
    SAVING = 7
    REPORTING = 8
    DONE = 9

    @property
    def words(self) -> str:
        return _WORDS[self]

    @property
    def takes_time(self) -> bool:
        """Whether it is done once or seldom, and takes as long as it takes: compiling, a checkpoint on a slow disk."""
        return self in (Activity.STARTING, Activity.VALIDATING, Activity.SAVING, Activity.REPORTING, Activity.DONE)


_WORDS = {
    Activity.STARTING: "starting",
    Activity.AT_DOOR: "waiting to join the others",
    Activity.JOINING: "connecting to the others",
    Activity.LOADING: "waiting for a batch of images",
    Activity.COMPUTING: "computing",
    Activity.TOGETHER: "in an operation among the processes",
    Activity.VALIDATING: "beginning or ending a validation",
    Activity.SAVING: "saving",
    Activity.REPORTING: "writing the report",
    Activity.DONE: "ending, with all done",
}


class Record(ctypes.Structure):
    """What a process shows. All zero: it has only just been started."""

    _fields_ = (
        ("beats", ctypes.c_uint64),  # signs of life so far
        ("collectives", ctypes.c_uint64),  # operations among the processes that it has begun, since it joined them
        ("step", ctypes.c_uint64),  # optimizer steps done
        ("epoch", ctypes.c_uint32),  # whole epochs done
        ("activity", ctypes.c_uint32),
        ("keeps_pace", ctypes.c_uint32),  # 1: it takes steps, each about as long as those before
        ("longest", ctypes.c_float),  # s; that a step has taken so far
        ("device_passes", ctypes.c_uint32),  # backward passes that its GPU has done, since it joined
        ("commits", ctypes.c_uint32),  # of an elastic run
        # Of an elastic run, written by the launcher:
        ("rank", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("generation", ctypes.c_uint32),  # counts changes of the two above, which it follows
        ("recalled", ctypes.c_uint32),  # 1: others wait to join at the next commit
        ("stops", ctypes.c_uint32),  # 1: somebody has asked to stop, perhaps in a session that a loss has ended
    )
    beats: int
    collectives: int
    step: int
    epoch: int
    activity: int
    keeps_pace: int
    longest: float
    device_passes: int
    commits: int
    rank: int
    size: int
    generation: int
    recalled: int
    stops: int


class Pulse:
    """The record of this process. Without a launcher that watches, it is one that nobody reads."""

    def __init__(self) -> None:
        place = os.environ.pop(PULSE_VARIABLE, "")  # not for the programs that this process starts
        self.is_watched = bool(place)
        self._record = Record()
        self._step_end: float | None = None  # seconds; of the step before, if nothing that takes time came in between
        self._device: np.ndarray
        self._follower: threading.Thread | None = None
        if place:
            descriptor, number = map(int, place.split(","))
            memory = mmap.mmap(descriptor, 0)
            os.close(descriptor)
            self._record = Record.from_buffer(memory, number * ctypes.sizeof(Record))

    def show(self, activity: Activity) -> None:
        """It does this from now on: a sign of life."""
        if activity.takes_time:
            self._step_end = None
        self._record.activity = activity
        self._record.beats += 1

    def begin_collective(self) -> None:
        """It begins an operation that all processes take part in, in the same order; part of what takes time, if it
        does such a thing."""
        self._record.collectives += 1
        takes_time = Activity(self._record.activity).takes_time
        self.show(Activity(self._record.activity) if takes_time else Activity.TOGETHER)

    def end_step(self, epoch: int, step: int) -> None:
        """An optimizer step is done; so many whole epochs and steps are now. The next one should take about as long."""
        now, record = time.monotonic(), self._record
        if self._step_end is not None:  # else it was the first, in which much is done once
            record.longest = max(record.longest, now - self._step_end)
            record.keeps_pace = 1
        self._step_end = now
        record.epoch, record.step = epoch, step
        self.show(Activity.TOGETHER)

    @property
    def has_stepped(self) -> bool:
        """Whether this process has done an optimizer step."""
        return self._record.step > 0

    def lose_pace(self) -> None:
        """The next step differs from those before: much may be done once in it, as compiling."""
        self._step_end, self._record.keeps_pace = None, 0
        self.show(Activity.STARTING)

    def follow_device(self, passes: np.ndarray) -> None:
        """Show from now on what a GPU writes here: how many backward passes it has done, one uint32. By a thread: the
        one that computes may wait for a GPU that hangs."""
        self._device = passes
        if self.is_watched and not self._follower:
            self._follower = threading.Thread(target=self._follow, name="pulse", daemon=True)
            self._follower.start()

    def _follow(self) -> None:
        while True:
            self._record.device_passes = int(self._device[0])
            time.sleep(DEVICE_SECONDS)

    def count_commit(self) -> None:
        """Of an elastic run: the others may go on from here without this process."""
        self._record.commits += 1

    @property
    def commits(self) -> int:
        """How many this process has counted."""
        return self._record.commits

    @property
    def is_recalled(self) -> bool:
        """Of an elastic run: whether others wait to join at this commit."""
        return bool(self._record.recalled)

    @property
    def is_to_stop(self) -> bool:
        """Of an elastic run: whether it is to save and stop, even if this process was not told by a signal."""
        return bool(self._record.stops)

    def wait_for_place(self) -> tuple[int, int]:
        """Of an elastic run: wait until the launcher gives out ranks; this process's, and how many there are."""
        record = self._record
        before = record.generation
        record.collectives = 0
        self.show(Activity.AT_DOOR)
        while record.generation == before:
            time.sleep(POLL_SECONDS)
        self.show(Activity.JOINING)
        return record.rank, record.size


pulse = Pulse()
