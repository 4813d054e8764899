"""Signals become requests that the training loop looks at between two steps."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType

STOPPING = (signal.SIGTERM, signal.SIGINT)

Handler = Callable[[int, "FrameType | None"], object]


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
    """The run has saved a checkpoint and ends; `exit_code` is the shell's for that signal, 128 + its number."""

    def __init__(self, signal_number: int, sentence: str) -> None:
        super().__init__(sentence)
        self.exit_code = 128 + signal_number


class Signals:
    """While in use: SIGTERM and SIGINT ask to save and stop, SIGUSR1 asks to save and go on.

    A second SIGINT (Ctrl-C) ends the process at once, as usual.
    """

    def __init__(self) -> None:
        self.stop: int = 0  # number of the signal that asked for it
        self.save = False
        self._handled = handled(dict.fromkeys((*STOPPING, signal.SIGUSR1), self._handle))

    def __enter__(self) -> Signals:
        self._handled.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handled.__exit__(kind, error, trace)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = True
            return
        self.stop = number
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
