"""Which process of a run hangs: found by the launcher, from what the processes show of themselves (pulse.py).

A process that hangs holds up all others, who soon do not move either. So it is not the quiet process that hangs, but
the one that is behind: all begin the same operations in the same order, and whoever has begun fewest is waited for. It
hangs when it has shown no sign of life for longer than what it does may take; so does one that has been stopped
(SIGSTOP), wherever it is.
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

DEFAULT_SECONDS = 40  # with the seconds that it takes to end the others, the run has ended within a minute
# What is done once (compiling, opening the data, a checkpoint on a slow disk) may take so many times as long.
ONCE = 15
SLOWER = 10  # and a step so many times as long as the longest before, where that is more
LONGEST_LOOK = 1.0  # seconds that count between two looks: a launcher that was stopped itself has seen nothing


@dataclass
class _Seen:
    """When a process showed its last sign of life."""

    beats: int = 0
    at: float = 0.0  # seconds, of the watch's own clock


class Hang(NamedTuple):
    """Processes that make no progress."""

    processes: tuple[int, ...]  # by number of their record
    is_certain: bool  # False: all have come equally far, and any of them may be the one that the others wait for


class Watch:
    """The records of so many processes, and a clock.

    Args:
        count: how many processes there may be at a time.
        seconds: without a sign of life after which a process hangs; 0: it never does.
        descriptor: of the memory of another launcher's watch, which is gone on with.
        clock: seconds; tests replace it.
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
        self._running: dict[int, int] = {}  # at the latest look
        self._clock, self._last_look, self._now = clock, clock(), 0.0

    def begin(self, number: int) -> dict[str, str]:
        """A process is about to be started; returns what its environment needs. It must inherit `descriptor`."""
        self.records[number] = Record()
        self._seen[number] = _Seen(at=self._now)
        return {PULSE_VARIABLE: f"{self.descriptor},{number}"}

    def look(self, running: Mapping[int, int]) -> Hang | None:
        """Look at the processes that run, given by number and process id, several times a second. Returns those that
        hang, if any do."""
        now = self._clock()
        self._now += min(now - self._last_look, LONGEST_LOOK)
        self._last_look = now
        if running != self._running:  # who was waited for may be gone: the others have been quiet with good reason
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
            if len(behind) == len(together):  # their hosts have come equally far, the GPUs perhaps not
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
        """Seconds without a sign of life that are too many."""
        record = self.records[number]
        activity = Activity(record.activity)
        if activity.takes_time or not (record.keeps_pace or activity == Activity.JOINING):
            return ONCE * self.seconds
        return max(self.seconds, SLOWER * record.longest)

    def describe(self, number: int, pid: int) -> str:
        """What was last heard of a process."""
        record = self.records[number]
        place = f"epoch {record.epoch + 1}, step {record.step}, " if record.step else ""
        stopped = "; it was stopped (SIGSTOP)" * is_stopped(pid)
        return (f"no sign of life for {self._quiet(number):.0f} s, the last one on {socket.gethostname()}: {place}"
                f"{Activity(record.activity).words}{stopped}")


class Status(NamedTuple):
    """Of a process, from proc(5)."""

    state: str  # R: runs, S: sleeps, D: waits for a disk, T and t: stopped by a signal or a debugger, Z: has ended
    started: int  # ticks since the machine's start: with the process id it names a process, for an id is used again


def status(pid: int) -> Status | None:
    """None where there is no such process, or nothing is left of it than its exit code."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # before it stands the program's name, whatever that is
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else Status(fields[0], int(fields[19]))


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    found = status(pid)
    return found is not None and found.state in "Tt"
