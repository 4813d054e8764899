"""Signals: they ask the training loop to save and stop, and end a process that no longer responds.

SIGTERM, Ctrl-C (SIGINT), SIGHUP (the terminal is closed) and SIGPIPE (nobody reads the output) become requests. The
loop checks for them between two steps and between two batches of validation. Python runs signal handlers only in the
main thread, between two bytecode instructions, so Python's handlers never run while a library blocks the process.
Python's C-level handler does run then. It writes the signal's number into a pipe (`signal.set_wakeup_fd`), and another
process, the guard, reads the pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType

INSISTENT = (signal.SIGTERM, signal.SIGINT)  # a second signal of these ends the process at once
# a closed terminal may send SIGHUP and SIGPIPE together, so these two do not count as insistent
STOPPING = (*INSISTENT, signal.SIGHUP, signal.SIGPIPE)
LEAVE = signal.SIGUSR2  # from the guard: a second signal has arrived

# a repetition within this time counts as the same signal: a launcher and the system may both send it
SAME_SECONDS = 1.0
GRACE_SECONDS = 5.0  # seconds for a process to end by itself
TRAINING, NOT_TRAINING = 100, 101  # messages to the guard; signal numbers go up to 64

WORDS = "stopping after this step, then saving"
ANSWERS: dict[int, str] = {
    signal.SIGTERM: f"{WORDS}; once more to end without saving",
    signal.SIGINT: f"{WORDS}; once more to end without saving",
    signal.SIGHUP: f"the terminal is closed: {WORDS}",
    signal.SIGPIPE: f"nobody reads the output any more: {WORDS}",
}

STOPPED_EARLY = "stopped while it started"  # message for a stop before the first step

PR_SET_PDEATHSIG = 1  # option of prctl(2)
_libc = ctypes.CDLL(None)

Handler = Callable[[int, "FrameType | None"], object]

_to_guard: int | None = None  # descriptor of the pipe


@contextlib.contextmanager
def handled(handlers: Mapping[int, Handler | signal.Handlers]) -> Iterator[None]:
    """Set these handlers, by signal number, inside the block. Python sets handlers only in the main thread. If a
    program trains in another thread, its own signal handlers stay.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StoppedBySignal(Exception):
    """Ends the program with a sentence; `exit_code` follows the shells' convention: 128 + the signal's number."""

    def __init__(self, signal_number: int, sentence: str) -> None:
        super().__init__(sentence)
        self.exit_code = 128 + signal_number


class Signals:
    """While active, the signals in STOPPING request to save and stop, and SIGUSR1 requests to save and continue.

    Exceptions: SIGHUP if the process was started to ignore it (nohup), and SIGPIPE unless the process is `alone`,
    because the signal may come from a connection to a process that has ended.
    """

    def __init__(self, alone: bool = True) -> None:
        self.stop: int = 0  # number of the first signal that requested it
        self.save = False
        heard = {*ending(), signal.SIGUSR1}
        if alone:
            heard.add(signal.SIGPIPE)
        self._handled = handled({**dict.fromkeys(heard, self._handle), LEAVE: interrupt})

    def __enter__(self) -> Signals:
        self._handled.__enter__()
        _tell_guard(TRAINING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _tell_guard(NOT_TRAINING)
        self._handled.__exit__(kind, error, trace)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = True
        else:
            self.stop = self.stop or number


def end_with_parent(number: int) -> None:
    """Let the system send this signal to this process when its parent dies, also after an exec. Children of this
    process do not inherit this.
    """
    _libc.prctl(PR_SET_PDEATHSIG, number)


def is_first() -> bool:
    """Whether this process prints for the whole run (rank 0)."""
    return os.environ.get("HOROVOD_RANK", "0") == "0"


def leave(number: int, frame: FrameType | None) -> None:
    """Handler during imports: exit at once. Imports take seconds and need no clean-up, and Python would print the stack
    trace of a KeyboardInterrupt, or lose it."""
    if is_first():
        _answer(STOPPED_EARLY)
    os._exit(128 + number)


def leave_at(*numbers: int) -> None:
    """From now on `leave` on these signals. Also handles a signal that arrived before: a launcher blocks SIGINT while
    it starts this process.
    """
    for number in numbers:
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handler: end as after Ctrl-C. Another Ctrl-C during the clean-up ends the process without a stack trace."""
    begun = time.monotonic()

    def end(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - begun > SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    signal.signal(signal.SIGINT, end)
    raise KeyboardInterrupt


@contextlib.contextmanager
def ending_with(sentence: str) -> Iterator[None]:
    """A context in which Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt, so that the code can clean up. The
    exception leaves the block as StoppedBySignal with this sentence.
    """
    number: int = signal.SIGINT

    def stop(received: int, frame: FrameType | None) -> None:
        nonlocal number
        number = received
        interrupt(received, frame)

    try:
        with handled(dict.fromkeys(ending(), stop)):
            yield
    except KeyboardInterrupt:
        raise StoppedBySignal(number, sentence) from None


def see_through(run: Callable[[], int]) -> int:
    """Run a launcher's `run` to its end and return the exit code; a StoppedBySignal is printed. From here on signals no
    longer `leave`, because the launcher must clean up.
    """
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        return run()
    except StoppedBySignal as stop:
        print(stop, file=sys.stderr, flush=True)
        return stop.exit_code


def ending() -> list[int]:
    """The signals that ask a process to end; without SIGHUP if it was started to ignore it (nohup)."""
    return [*INSISTENT, *[signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)]


# --- the guard ---


def guard(speaks: bool) -> None:
    """Start a guard process, which ends this process on a second Ctrl-C or SIGTERM, even while the process is blocked.
    If this process `speaks`, the guard also answers the first signal at once, on standard error.

    Must be called while this process has one thread and little memory, because it calls fork().
    """
    global _to_guard
    numbers, _to_guard = os.pipe()
    ward = os.getpid()
    if os.fork() == 0:
        try:
            _stand_guard(numbers, ward, speaks)
        finally:
            os._exit(0)
    # The read end stays open in this process too. Otherwise, after the guard was killed, writing a signal's number into
    # the pipe would fail. Python would then print an error, and try to write the resulting SIGPIPE to the pipe, too.
    os.set_blocking(_to_guard, False)
    signal.set_wakeup_fd(_to_guard, warn_on_full_buffer=False)


def _tell_guard(number: int) -> None:
    if _to_guard is not None:
        with contextlib.suppress(OSError):
            os.write(_to_guard, bytes([number]))


def _stand_guard(numbers: int, ward: int, speaks: bool) -> None:
    """The guard's main loop, until the process `ward` has ended and has thereby closed its end of the pipe
    `numbers`."""
    signal.set_wakeup_fd(-1)
    for not_for_it in (*STOPPING, signal.SIGUSR1, LEAVE):
        signal.signal(not_for_it, signal.SIG_IGN)
    os.setsid()  # so that Ctrl-C does not reach the guard
    os.dup2(numbers, 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that a reader of the ward's output sees the end of the output
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
                os.close(descriptor)
    is_training, asked_at, kill_at = False, 0.0, 0.0  # times in seconds; 0: never
    answered: set[int] = set()
    while True:
        wait = max(kill_at - time.monotonic(), 0.0) if kill_at else None
        if not select.select([0], [], [], wait)[0]:
            os.kill(ward, signal.SIGKILL)
            return
        received = os.read(0, 64)
        if not received:
            return
        now = time.monotonic()
        for number in received:
            if number in (TRAINING, NOT_TRAINING):
                is_training, asked_at = number == TRAINING, 0.0
            elif is_training and speaks and number in ANSWERS and not answered.intersection((number, *INSISTENT)):
                answered.add(number)
                _answer(ANSWERS[number])
            if number in INSISTENT and not asked_at:
                asked_at = now
            elif number in INSISTENT and now - asked_at > SAME_SECONDS and not kill_at:
                kill_at = now + GRACE_SECONDS
                if is_training:
                    os.kill(ward, LEAVE)


def _answer(sentence: str) -> None:
    """Write a line to standard error, over the progress bar if there is one, and never wait for a reader."""
    start = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""  # clear the bar's line and show the cursor again
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{start}{sentence}\n".encode())
