"""Signals: requests to the training loop, and the guard that ends a process that does not respond."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from train.processes import signals
from train.processes.signals import ANSWERS, Signals

LIMIT = 120  # seconds, longer than anything here takes on a busy machine
# A process with a guard; `block` waits in C, where no signal wakes it and no other thread can run. Unless a test
# changes it, the second signal never counts as the first one again, and leaves little time.
PROGRAM = """
    import ctypes, signal, sys
    from train.processes import signals

    signals.SAME_SECONDS, signals.GRACE_SECONDS = {same_seconds}, {grace_seconds}
    signals.guard(speaks=True)
    signal.signal(signal.SIGINT, signals.interrupt)

    lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)

    def block():
        lock(mutex)
        print("ready", flush=True)
        lock(mutex)
"""


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen]]:
    """Starts PROGRAM followed by these lines, and waits until it is ready."""
    started: list[subprocess.Popen] = []

    def run(lines: str, same_seconds: float = 0, grace_seconds: float = 0.3) -> subprocess.Popen:
        times = {"same_seconds": same_seconds, "grace_seconds": grace_seconds}
        script = textwrap.dedent(PROGRAM).format(**times) + textwrap.dedent(lines)
        process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout and process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def wait_until_blocked(process: subprocess.Popen) -> None:
    """Between "ready" and the lock there is a moment in which the process would respond."""
    status = Path(f"/proc/{process.pid}/stat")
    deadline = time.monotonic() + LIMIT
    while status.read_text().rpartition(")")[2].split()[0] != "S":
        assert time.monotonic() < deadline, status.read_text()
        time.sleep(0.01)


def insist(process: subprocess.Popen, number: int) -> None:
    """Send a signal again until the process has ended: two at once may arrive as one."""
    deadline = time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.3)


@pytest.mark.parametrize("first, second", [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGINT"), ("SIGINT", "SIGTERM")])
def test_a_second_signal_ends_a_process_that_is_blocked(start, first, second):
    process = start("""
        with signals.Signals():
            block()
    """)
    wait_until_blocked(process)
    process.send_signal(signal.Signals[first])
    assert process.stderr.readline() == f"{ANSWERS[signal.Signals[first]]}\n", "at once"
    process.send_signal(signal.Signals[second])
    assert process.wait(LIMIT) == -signal.SIGKILL
    assert process.stderr.read() == ""


def test_a_second_ctrl_c_ends_a_process_that_is_blocked_before_it_trains(start):
    process = start("block()")
    wait_until_blocked(process)
    insist(process, signal.SIGINT)
    assert (process.returncode, process.stderr.read()) == (-signal.SIGKILL, "")


def test_a_second_ctrl_c_is_the_usual_one_for_a_process_that_listens(start):
    process = start("""
        try:
            with signals.Signals():
                print("ready", flush=True)
                while True:
                    pass
        except KeyboardInterrupt:
            sys.exit(130)
    """, grace_seconds=1000)
    process.send_signal(signal.SIGTERM)
    process.stderr.readline()
    process.send_signal(signal.SIGTERM)  # once: a third would find a program without handlers
    assert (process.wait(LIMIT), process.stderr.read()) == (130, "")


def test_ctrl_c_that_comes_by_two_ways_at_once_is_one(start):
    """If Ctrl-C comes from the terminal and from the launcher, it counts once: the work before the end is not cut
    short."""
    process = start("""
        try:
            print("ready", flush=True)
            sys.stdin.read()
        except KeyboardInterrupt:
            print("cleaning up", flush=True)
            sys.stdin.readline()
            print("clean", flush=True)
            sys.exit(130)
    """, same_seconds=1000)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "cleaning up\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate("go on\n", timeout=LIMIT) == ("clean\n", "")
    assert process.returncode == 130


def test_signals_that_come_by_two_ways_at_once_are_one(start):
    """If a launcher and the system send the same signal, it counts once. Two signals of a closed terminal do not end a
    process at once either, even if it is saving already."""
    process = start("""
        with signals.Signals() as requests:
            print("ready", flush=True)
            while not requests.stop:
                pass
            print(requests.stop, flush=True)
            sys.stdin.read()
    """, same_seconds=1000)
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline() == f"{signal.SIGHUP:d}\n"
    assert process.stderr.readline() == f"{ANSWERS[signal.SIGHUP]}\n"
    for _ in range(3):
        process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline() == f"{ANSWERS[signal.SIGTERM]}\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate("", timeout=LIMIT) == ("", "")
    assert process.returncode == 0


def test_nohup_and_other_processes_decide_what_is_a_request():
    """SIGHUP is no request if it is ignored, nor SIGPIPE if the process works with others."""
    with signals.handled({signal.SIGHUP: signal.SIG_IGN}), Signals(alone=False) as requests:
        for number in (signal.SIGHUP, signal.SIGPIPE):
            os.kill(os.getpid(), number)
        assert requests.stop == 0
        signal.raise_signal(signal.SIGUSR1)
        assert requests.save
    with Signals() as requests:
        signal.raise_signal(signal.SIGPIPE)
        signal.raise_signal(signal.SIGTERM)
        assert requests.stop == signal.SIGPIPE, "the first says why"


def test_the_guard_ends_with_its_process(start):
    """The guard ends even if its process is killed. It holds the process's standard error, whose end shows this
    here."""
    process = start("block()")
    process.kill()
    assert process.communicate(timeout=LIMIT) == ("", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_without_its_guard_a_process_listens_all_the_same(start, number):
    """If somebody has ended the guard, a signal is still a request, and there is no trace of a broken pipe."""
    process = start("""
        import os, time
        children = f"/proc/self/task/{os.getpid()}/children"
        guards = [int(number) for number in open(children).read().split()]
        for guard in guards:
            os.kill(guard, signal.SIGKILL)
            os.waitpid(guard, 0)
        with signals.Signals() as requests:
            print("ready", flush=True)
            while not (requests.stop or requests.save):
                time.sleep(0.01)
            time.sleep(0.1)
            print(len(guards), int(requests.stop), requests.save, flush=True)
    """)
    process.send_signal(number)
    is_save = number == signal.SIGUSR1
    assert process.communicate(timeout=LIMIT) == (f"1 {0 if is_save else number:d} {is_save}\n", "")
