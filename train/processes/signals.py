"""Signals: what asks the training loop to save and stop, and what ends a process that does not listen any more.

SIGTERM, Ctrl-C (SIGINT), SIGHUP (the terminal is closed) and SIGPIPE (nobody reads the output any more) become
requests, which the loop looks at between two steps and two batches of validation. Python runs their handlers in the
main thread, between two of its own instructions, so a process that is blocked in a library never gets there. Its
handlers in C do run there, and write each signal's number into a pipe (`signal.set_wakeup_fd`): at the other end
another process stands guard.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType

INSISTENT = (signal.SIGTERM, signal.SIGINT)  # the second of these ends a process
STOPPING = (*INSISTENT, signal.SIGHUP, signal.SIGPIPE)  # a closed terminal may well send two of them
LEAVE = signal.SIGUSR2  # from the guard: the second one has come

SAME_SECONDS = 1.0  # within them a signal is the first one again: a launcher and the system may both send it
GRACE_SECONDS = 5.0  # that a process has to leave by itself
TRAINING, NOT_TRAINING = 100, 101  # to the guard; signals have numbers up to 64

WORDS = "stopping after this step, then saving"
ANSWERS: dict[int, str] = {
    signal.SIGTERM: f"{WORDS}; once more to leave without",
    signal.SIGINT: f"{WORDS}; once more to leave without",
    signal.SIGHUP: f"the terminal is closed: {WORDS}",
    signal.SIGPIPE: f"nobody reads the output any more: {WORDS}",
}

STOPPED_EARLY = "stopped while it started"  # before the first step

Handler = Callable[[int, "FrameType | None"], object]

_to_guard: int | None = None  # descriptor


@contextlib.contextmanager
def handled(handlers: Mapping[int, Handler | signal.Handlers]) -> Iterator[None]:
    """What signals do for a while, by their numbers."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StoppedBySignal(Exception):
    """The program ends with a sentence; `exit_code` is the shell's for that signal, 128 + its number."""

    def __init__(self, signal_number: int, sentence: str) -> None:
        super().__init__(sentence)
        self.exit_code = 128 + signal_number


class Signals:
    """While in use: those of STOPPING ask to save and stop, SIGUSR1 asks to save and go on.

    SIGHUP does not where the process was started to ignore it (nohup), and SIGPIPE only in a process that is `alone`:
    another one loses connections to processes that have ended, which is no request.
    """

    def __init__(self, alone: bool = True) -> None:
        self.stop: int = 0  # number of the signal that asked for it first
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


def is_first() -> bool:
    """Whether this process speaks for all of its run."""
    return os.environ.get("HOROVOD_RANK", "0") == "0"


def leave(number: int, frame: FrameType | None) -> None:
    """Handler during imports, which take seconds and leave nothing to clean up: Python would print the stack trace of a
    KeyboardInterrupt, or miss it."""
    if is_first():
        _answer(STOPPED_EARLY)
    os._exit(128 + number)


def leave_at(*numbers: int) -> None:
    """From now on `leave` at these signals; one that has come since a launcher started this process, which holds back
    SIGINT, is answered here."""
    for number in numbers:
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handler: end like after Ctrl-C. The next Ctrl-C, in the middle of that, ends the process without a trace."""
    begun = time.monotonic()

    def end(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - begun > SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    signal.signal(signal.SIGINT, end)
    raise KeyboardInterrupt


@contextlib.contextmanager
def ending_with(sentence: str) -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP end the program with this sentence, after what is inside has cleaned up: a
    KeyboardInterrupt there, StoppedBySignal from here."""
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
    """Start a launcher's run and see it to its end; the exit code. A StoppedBySignal is told. From here on no signal
    makes this process `leave`: there is something to clean up."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        return run()
    except StoppedBySignal as stop:
        print(stop, file=sys.stderr, flush=True)
        return stop.exit_code


def ending() -> list[int]:
    """Signals that ask a process to end; SIGHUP does not where it was started to ignore it (nohup)."""
    return [*INSISTENT, *[signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)]


# --- the guard ---


def guard(speaks: bool) -> None:
    """Have a process of its own see to it that a second Ctrl-C or SIGTERM ends this process, whatever it is blocked in;
    if it `speaks`, it also answers the first one at once, on standard error.

    To be called while this process has one thread and few pages, which fork() copies.
    """
    global _to_guard
    numbers, _to_guard = os.pipe()
    ward = os.getpid()
    if os.fork() == 0:
        try:
            _stand_guard(numbers, ward, speaks)
        finally:
            os._exit(0)
    # This end stays open here too: where somebody has ended the guard, each signal would be written into a pipe that
    # nobody reads, an error that Python prints, and a SIGPIPE, which is written there too.
    os.set_blocking(_to_guard, False)
    signal.set_wakeup_fd(_to_guard, warn_on_full_buffer=False)


def _tell_guard(number: int) -> None:
    if _to_guard is not None:
        with contextlib.suppress(OSError):
            os.write(_to_guard, bytes([number]))


def _stand_guard(numbers: int, ward: int, speaks: bool) -> None:
    """In the guard, until process `ward` has ended, and with it its end of the pipe `numbers`."""
    signal.set_wakeup_fd(-1)
    for not_for_it in (*STOPPING, signal.SIGUSR1, LEAVE):
        signal.signal(not_for_it, signal.SIG_IGN)
    os.setsid()  # Ctrl-C is not for it
    os.dup2(numbers, 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever reads the ward's output is to see its end
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2:
            with contextlib.suppress(OSError):  # that of the listing is closed by now
                os.close(descriptor)
    is_training, asked_at, kill_at = False, 0.0, 0.0  # seconds; 0: not
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
    """Write a line to standard error, over the progress bar where there is one; never wait for its reader."""
    start = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""  # an empty line, and a cursor, which the bar has hidden
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{start}{sentence}\n".encode())
