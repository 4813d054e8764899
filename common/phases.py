"""Times the phases of a program from its start: imports, data, network, ...

    with phase("network"):
        ...                          # compiling, inside, is the phase "kernels" alone
    phases.take()                    # {"imports": 1.9, "kernels": 3.2, "network": 0.4}

Each moment counts for the innermost open phase only, so the seconds of all phases add up to at most the program's
total. Once training has begun, `Recorder.phase` times everything outside the steps.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping

IMPORTS, DATA, WEIGHTS, DEVICE, NETWORK = "imports", "data", "weights", "device", "network"
KERNELS, TIMING = "kernels", "timing kernels and plans"  # phases of the cuda executor
FIRST_BATCH, VALIDATION, IMAGES, CALIBRATION, ONNX = "first batch", "validation", "images", "calibration", "ONNX"


def process_seconds() -> float:
    """Seconds since the system started this process, with the resolution of the system's clock ticks (10 ms)."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        # the process name before the last ")" may contain any characters
        fields = file.read().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


class Phases:
    """Measures the phases of this process. Only phases in the thread that made this object count, because other threads
    work at the same time.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._thread = threading.get_ident()
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = self._began = now()

    def begin(self, seconds_ago: float = 0.0, spent_on: str = "") -> None:
        """Begin to count, now or `seconds_ago` in the past. The past seconds count for the phase `spent_on`."""
        self._since = self._now()
        self._began = self._since - seconds_ago
        self._seconds = {spent_on: seconds_ago} if spent_on else {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            yield
            return
        self._settle()
        self._open.append(name)
        self._seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def _settle(self) -> None:
        """Add the time since the last change of phases to the phase that was open."""
        now = self._now()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """Seconds by phase since `begin`, or since the previous call."""
        self._settle()
        taken, self._seconds = self._seconds, dict.fromkeys(self._open, 0.0)
        return taken

    @property
    def total(self) -> float:
        """Seconds since `begin`."""
        return self._now() - self._began


def described(seconds: Mapping[str, float], total: float) -> str:
    """One line of text: the seconds of each phase, the seconds outside all phases as "other", and the total."""
    shown = {**seconds, "other": max(total - sum(seconds.values()), 0.0)}
    parts = ", ".join(f"{name} {value:.1f}" for name, value in shown.items() if value >= 0.05)
    return f"seconds: {parts}; {total:.1f} in all"


phases = Phases()
phase = phases.phase
