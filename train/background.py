"""Runs work in a thread while the training continues, one piece at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs one piece of work at a time in its own thread, while the calling thread continues.

    The thread is a daemon, so that a process that ends at a second Ctrl-C does not wait for the work.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work`. The caller must have called `wait` for the previous work."""
        assert self._thread is None, "wait() comes first"
        self._thread = threading.Thread(target=self._do, args=(work,), name="background", daemon=True)
        self._thread.start()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # `wait` raises the error again, in the thread that started the work
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the work has ended with an error, which `wait` will raise."""
        return self._error is not None and not self.is_running

    def wait(self) -> None:
        """Wait until the work, if any, is done. If an error has ended the work, raise the error, once."""
        if self._thread:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error:
            raise error
