"""Faults of the process: kills, signals, stops."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import faulty
import numpy as np
import pytest
from faulty import FaultyRun, assert_nothing_lost, assert_same_end, tries, wait_a_random_time

NewRun = Callable[..., FaultyRun]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAX_KILLS = 3
AFTER_SECOND = 25  # seconds; the program promises five on an idle machine


@tries(few=1)
def test_kill(new_run: NewRun, unbroken: FaultyRun, rng: np.random.Generator, number: int) -> None:
    """Killed (SIGKILL) up to three times, at random moments of start, steps, saves and validation."""
    run = new_run()
    for _ in range(rng.integers(1, MAX_KILLS + 1)):
        run.start()
        wait_a_random_time(run, rng)
        run.kill()
        assert_nothing_lost(run)
    assert run.finish() == 0, run.err
    assert_same_end(run, unbroken)


@tries(few=1)
def test_stop(new_run: NewRun, unbroken: FaultyRun, rng: np.random.Generator, number: int) -> None:
    """Asked to end (SIGTERM, SIGHUP, Ctrl-C) at a random moment."""
    run = new_run()
    run.start()
    wait_a_random_time(run, rng, least=1)
    asked = signal.Signals(rng.choice(SIGNALS))
    assert run.process
    run.process.send_signal(asked)
    code = run.end()
    # after training, a signal ends the program as it ends any other
    has_trained = len(run.events("steps")) == run.steps
    assert code == 128 + asked or (has_trained and code in (0, -asked)), run.err
    assert "Traceback" not in run.err, run.err
    assert_nothing_lost(run)
    assert run.finish() == 0, run.err
    assert_same_end(run, unbroken)


@tries()
def test_stop_while_it_starts(new_run: NewRun, unbroken: FaultyRun, rng: np.random.Generator, number: int) -> None:
    """Asked to end (SIGTERM, SIGHUP, Ctrl-C) while it imports, opens the data and builds the network."""
    run = new_run()
    run.start()
    time.sleep(rng.uniform(0, 5))  # hits any moment; it waits for nothing
    asked = signal.Signals(rng.choice(SIGNALS))
    assert run.process
    run.process.send_signal(asked)
    assert run.end() in (0, 128 + asked, -asked), run.err  # -asked: the signal came before Python had set its handlers
    assert_nothing_lost(run)
    assert run.finish() == 0, run.err
    assert_same_end(run, unbroken)


@tries()
def test_two_signals(new_run: NewRun, unbroken: FaultyRun, rng: np.random.Generator, number: int) -> None:
    """Ctrl-C twice, the second up to three seconds after the first."""
    run = new_run()
    run.start()
    wait_a_random_time(run, rng, least=1)
    assert run.process
    run.process.send_signal(signal.SIGINT)
    time.sleep(rng.uniform(0, 3))  # hits any moment; it waits for nothing
    run.process.send_signal(signal.SIGINT)
    assert run.end(AFTER_SECOND) in (0, 128 + signal.SIGINT, -signal.SIGINT, -signal.SIGKILL), run.err
    assert_nothing_lost(run)
    assert run.finish() == 0, run.err
    assert_same_end(run, unbroken)


@tries()
def test_freeze(new_run: NewRun, unbroken: FaultyRun, rng: np.random.Generator, number: int) -> None:
    """Stopped (SIGSTOP) at a random moment and continued up to two seconds later."""
    run = new_run()
    run.start()
    wait_a_random_time(run, rng)
    assert run.process
    if run.process.poll() is None:
        os.kill(run.process.pid, signal.SIGSTOP)
        time.sleep(rng.uniform(0, 2))  # how long it is stopped
        os.kill(run.process.pid, signal.SIGCONT)
    assert run.end() == 0, run.err
    assert_same_end(run, unbroken)


@tries()
def test_kill_in_the_report(new_run: NewRun, unbroken: FaultyRun, rng: np.random.Generator, number: int) -> None:
    """Killed (SIGKILL) while it writes the report."""
    run = new_run()
    run.start(REPORT="1")
    run.wait_for_step(faulty.EPOCHS * faulty.STEPS_PER_EPOCH)
    time.sleep(rng.uniform(0, 5))  # hits any moment; it waits for nothing
    run.kill()
    assert_nothing_lost(run)
    run.start(REPORT="1")
    assert run.end() == 0, run.err
    assert_same_end(run, unbroken)
    assert (run.folder / "report" / "report.md").exists()


def test_table() -> None:
    outcomes = [("Killed", "passed"), ("Stopped", "passed"), ("Killed", "failed"), ("Full", "skipped")]
    assert faulty.table(outcomes) == ("| fault | tries | survived |\n|---|---|---|\n| Killed | 2 | 1 |\n"
                                      "| Stopped | 1 | 1 |\n| all | 3 | 2 |")


def test_few_tries_are_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulty, "TRIES", 3)
    slow = [[mark.name for mark in param.marks] for param in tries(few=1).args[1]]
    assert slow == [["long"], ["slow"], ["slow"]]
    assert len(tries(few=5).args[1]) == 5
