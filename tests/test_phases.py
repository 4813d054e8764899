"""Where the seconds of a program go (common/phases.py), with a clock that the tests move."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from common.phases import Phases, described

REPOSITORY = Path(__file__).resolve().parents[1]


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_each_moment_belongs_to_the_innermost_phase() -> None:
    clock = Clock()
    phases = Phases(clock)
    phases.begin(seconds_ago=2.5, spent_on="imports")
    clock.seconds += 1  # of no phase
    for _ in range(2):
        with phases.phase("network"):
            clock.seconds += 2
            with phases.phase("kernels"):
                clock.seconds += 4
            clock.seconds += 8
    assert (phases.total, phases.take()) == (2.5 + 1 + 28, {"imports": 2.5, "network": 20, "kernels": 8})
    assert phases.take() == {}


def test_a_phase_that_fails_has_ended() -> None:
    clock = Clock()
    phases = Phases(clock)
    with pytest.raises(ZeroDivisionError), phases.phase("data"):
        clock.seconds += 1
        raise ZeroDivisionError
    clock.seconds += 1
    assert phases.take() == {"data": 1}


def test_what_is_taken_within_a_phase_counts_once() -> None:
    clock = Clock()
    phases = Phases(clock)
    with phases.phase("data"):
        clock.seconds += 1
        assert phases.take() == {"data": 1}
        clock.seconds += 2
    assert phases.take() == {"data": 2}


def test_other_threads_do_not_count() -> None:
    clock = Clock()
    phases = Phases(clock)

    def beside() -> None:
        with phases.phase("checkpoint"):
            clock.seconds += 1

    with phases.phase("network"):
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
    assert phases.take() == {"network": 1}


def test_the_line() -> None:
    assert described({"imports": 1.25, "data": 0.02, "network": 3.0}, 5.0) == (
        "seconds: imports 1.2, network 3.0, other 0.7; 5.0 in all")


def test_seconds_since_the_system_started_the_process() -> None:
    program = "import time; time.sleep(0.5); from common.phases import process_seconds; print(process_seconds())"
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    tick = 0.02  # of the system's clock for processes, which is rounded down
    assert 0.5 - tick <= float(done.stdout) <= time.monotonic() - before + tick
