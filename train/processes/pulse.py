"""The pulse of a process: a few bytes of shared memory in which it shows its launcher what it is doing.

A process writes its `Record` between steps, batches and operations among the processes. The launcher (watch.py) reads
all records and distinguishes a process that hangs from processes that wait for it. Writing costs one store to memory.
Reading does not disturb the process, and works even while the process is blocked.
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

# Where an elastic run resumes if it has a single commit, which is its starting point.
BEGINNING = "where the run began: nothing it trained was committed yet (--commit-every)"
PULSE_VARIABLE = "RESNET_PULSE"  # environment variable: descriptor of the shared memory, and the index of the record
POLL_SECONDS = 0.02
DEVICE_SECONDS = 1.0


class Activity(IntEnum):
    """The activity of a process; `words` describes it in messages."""

    STARTING = 0
    AT_DOOR = 1  # elastic runs: the process waits for a rank
    JOINING = 2  # elastic runs: the process connects to the others
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
        """Whether the activity is rare and of unknown duration, such as compiling or a checkpoint on a slow disk."""
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
    """The record of a process. All zero: the process has only just been started."""

    _fields_ = (
        ("beats", ctypes.c_uint64),  # number of signs of life
        ("collectives", ctypes.c_uint64),  # collective operations that the process has begun since it joined
        ("step", ctypes.c_uint64),  # optimizer steps done
        ("epoch", ctypes.c_uint32),  # whole epochs done
        ("activity", ctypes.c_uint32),
        ("keeps_pace", ctypes.c_uint32),  # 1: the process takes steps of about constant duration
        ("longest", ctypes.c_float),  # duration of the longest step, s
        ("device_passes", ctypes.c_uint32),  # backward passes that the GPU has finished since the process joined
        ("commits", ctypes.c_uint32),  # elastic runs: number of commits
        # Elastic runs; written by the launcher:
        ("rank", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("generation", ctypes.c_uint32),  # counts changes of the two fields above; written after them
        ("recalled", ctypes.c_uint32),  # 1: others wait to join at the next commit
        ("stops", ctypes.c_uint32),  # 1: a stop was requested, perhaps in a session that ended by a loss
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
    """The record of this process. Without a launcher that watches the process, nobody reads the record."""

    def __init__(self) -> None:
        place = os.environ.pop(PULSE_VARIABLE, "")  # removed, so that child programs do not inherit the variable
        self.is_watched = bool(place)
        self._record = Record()
        self._step_end: float | None = None  # end of the previous step, s; None if a slow activity came after that step
        self._device: np.ndarray
        self._follower: threading.Thread | None = None
        if place:
            descriptor, number = map(int, place.split(","))
            memory = mmap.mmap(descriptor, 0)
            os.close(descriptor)
            self._record = Record.from_buffer(memory, number * ctypes.sizeof(Record))

    def show(self, activity: Activity) -> None:
        """Set the current activity, as a sign of life."""
        if activity.takes_time:
            self._step_end = None
        self._record.activity = activity
        self._record.beats += 1

    def begin_collective(self) -> None:
        """Record the beginning of an operation that all processes do in the same order. If a slow activity
        (`takes_time`) is being shown, the operation is part of this activity, which stays.
        """
        self._record.collectives += 1
        takes_time = Activity(self._record.activity).takes_time
        self.show(Activity(self._record.activity) if takes_time else Activity.TOGETHER)

    def end_step(self, epoch: int, step: int) -> None:
        """Record the end of an optimizer step, with the epochs and steps done so far. The next step should take about
        as long."""
        now, record = time.monotonic(), self._record
        if self._step_end is not None:  # the first step includes one-time work
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
        """Announce that the next step may take longer, because of one-time work such as compiling."""
        self._step_end, self._record.keeps_pace = None, 0
        self.show(Activity.STARTING)

    def follow_device(self, passes: np.ndarray) -> None:
        """From now on show the number of finished backward passes, which a GPU writes into the uint32 `passes`. A
        thread copies the number, because the computing thread may be waiting for a GPU that hangs.
        """
        self._device = passes
        if self.is_watched and not self._follower:
            self._follower = threading.Thread(target=self._follow, name="pulse", daemon=True)
            self._follower.start()

    def _follow(self) -> None:
        while True:
            self._record.device_passes = int(self._device[0])
            time.sleep(DEVICE_SECONDS)

    def count_commit(self) -> None:
        """Elastic runs: count a commit. The other processes can resume from the commit without this process."""
        self._record.commits += 1

    @property
    def commits(self) -> int:
        """The number of commits that this process has counted."""
        return self._record.commits

    @property
    def is_recalled(self) -> bool:
        """Elastic runs: whether other processes wait to join at this commit."""
        return bool(self._record.recalled)

    @property
    def is_to_stop(self) -> bool:
        """Elastic runs: whether to save and stop, even if this process did not receive a signal."""
        return bool(self._record.stops)

    def wait_for_place(self) -> tuple[int, int]:
        """Elastic runs: wait until the launcher assigns ranks. Returns this process's rank and the number of
        processes."""
        record = self._record
        before = record.generation
        record.collectives = 0
        self.show(Activity.AT_DOOR)
        while record.generation == before:
            time.sleep(POLL_SECONDS)
        self.show(Activity.JOINING)
        return record.rank, record.size


pulse = Pulse()
