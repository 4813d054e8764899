"""Work beside the training, one piece at a time, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Does one piece of work at a time beside the calling thread.

    The thread is a daemon: a process that ends at a second Ctrl-C does not wait for it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work`. The piece before it must have been waited for."""
        assert self._thread is None, "wait() comes first"
        self._thread = threading.Thread(target=self._do, args=(work,), name="background", daemon=True)
        self._thread.start()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised again by `wait`, in the thread that cares
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the work has ended with an error, which `wait` will raise."""
        return self._error is not None and not self.is_running

    def wait(self) -> None:
        """Wait until the work, if any, is done. Raises the error that has ended it, once."""
        if self._thread:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error:
            raise error
