"""Finds the process of a run that hangs, from the records that the processes write (pulse.py).

A process that hangs blocks all others, which then soon show no activity either. So a hanging process is not recognised
by inactivity, but by being behind. All processes begin the same operations in the same order, and wait for the process
that has begun the fewest. That process hangs if it has shown no sign of life for longer than its activity may take. A
process that was stopped (SIGSTOP) counts as hanging in any state.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from train.processes.pulse import PULSE_VARIABLE, Activity, Record

DEFAULT_SECONDS = 40  # together with the time for ending the other processes, a run ends within a minute
# Factor of the time limit for one-time work (compiling, opening the data, a checkpoint on a slow disk).
ONCE = 15
SLOWER = 10  # limit of a step, as a multiple of the longest step so far, if that is more
# most seconds that count between two calls of `look`, because the launcher itself may have been stopped
LONGEST_LOOK = 1.0


@dataclass
class _Seen:
    """The last sign of life of a process."""

    beats: int = 0
    at: float = 0.0  # seconds on the watch's clock


class Hang(NamedTuple):
    """Processes that hang."""

    processes: tuple[int, ...]  # indices of the records of these processes
    # False: all processes have begun equally many operations, and any of them may be the hanging process
    is_certain: bool


class Watch:
    """Watches processes through their records.

    Args:
        count: the maximum number of processes at a time.
        seconds: a process hangs after this time without a sign of life; 0: never.
        descriptor: the shared memory of another launcher's watch, to take over.
        clock: returns seconds; tests replace it.
    """

    def __init__(self, count: int, seconds: float, descriptor: int | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        if descriptor is None:
            descriptor = os.memfd_create("pulse")
            os.truncate(descriptor, count * ctypes.sizeof(Record))
        self.descriptor = descriptor
        self.records = (Record * count).from_buffer(mmap.mmap(descriptor, 0))
        self._seen = [_Seen() for _ in range(count)]
        self._running: dict[int, int] = {}  # the running processes at the latest call of `look`
        self._clock, self._last_look, self._now = clock, clock(), 0.0

    def begin(self, number: int) -> dict[str, str]:
        """Prepare a record for a process about to be started, and return its environment variables. The process must
        inherit `descriptor`."""
        self.records[number] = Record()
        self._seen[number] = _Seen(at=self._now)
        return {PULSE_VARIABLE: f"{self.descriptor},{number}"}

    def look(self, running: Mapping[int, int]) -> Hang | None:
        """Check the running processes (record number -> process id); to be called several times a second. Returns
        processes that hang, if any."""
        now = self._clock()
        self._now += min(now - self._last_look, LONGEST_LOOK)
        self._last_look = now
        # the process that the others were waiting for may be gone, so the quiet times start anew
        if running != self._running:
            self._running = dict(running)
            for seen in self._seen:
                seen.at = self._now
        quiet = {number: self._quiet(number) for number in running}
        if not self.seconds:
            return None
        stopped = [number for number, pid in running.items() if quiet[number] > self.seconds and is_stopped(pid)]
        if stopped:
            return Hang(tuple(stopped), is_certain=True)
        for generation in {self.records[number].generation for number in running}:
            together = [number for number in running if self.records[number].generation == generation
                        and self.records[number].activity != Activity.AT_DOOR]
            least = min((self.records[number].collectives for number in together), default=0)
            behind = [number for number in together if self.records[number].collectives == least]
            # the hosts have begun equally many operations, but the numbers of finished GPU passes may differ
            if len(behind) == len(together):
                slowest = min((self.records[number].device_passes for number in behind), default=0)
                behind = [number for number in behind if self.records[number].device_passes == slowest]
            if behind and all(quiet[number] > self._limit(number) for number in behind):
                return Hang(tuple(behind), is_certain=len(behind) == 1 or len(behind) < len(together))
        return None

    def _quiet(self, number: int) -> float:
        """Seconds since the last sign of life."""
        record, seen = self.records[number], self._seen[number]
        if record.beats != seen.beats:
            seen.beats, seen.at = record.beats, self._now
        return self._now - seen.at

    def _limit(self, number: int) -> float:
        """The time limit in seconds without a sign of life."""
        record = self.records[number]
        activity = Activity(record.activity)
        if activity.takes_time or not (record.keeps_pace or activity == Activity.JOINING):
            return ONCE * self.seconds
        return max(self.seconds, SLOWER * record.longest)

    def describe(self, number: int, pid: int) -> str:
        """The last sign of life of a process, in words."""
        record = self.records[number]
        place = f"epoch {record.epoch + 1}, step {record.step}, " if record.step else ""
        stopped = "; it was stopped (SIGSTOP)" * is_stopped(pid)
        return (f"no sign of life for {self._quiet(number):.0f} s, the last one on {socket.gethostname()}: {place}"
                f"{Activity(record.activity).words}{stopped}")


class Status(NamedTuple):
    """The status of a process, from proc(5)."""

    state: str  # R: runs, S: sleeps, D: waits for a disk, T and t: stopped by a signal or a debugger, Z: has ended
    started: int  # clock ticks since boot; identifies a process together with the process id, because ids are reused


def status(pid: int) -> Status | None:
    """The status of a process; None if it does not exist, or only its exit code is left."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # skips the program's name, which may contain any characters
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else Status(fields[0], int(fields[19]))


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    found = status(pid)
    return found is not None and found.state in "Tt"
