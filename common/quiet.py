"""Keeps lines off standard error that libraries write there."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator

# Called before file descriptor 2 changes, to pass on what libraries have written and what is still on its way there.
on_their_way: list[Callable[[], None]] = []


@contextlib.contextmanager
def without_lines(unwanted: re.Pattern[bytes]) -> Iterator[None]:
    """Inside, lines on standard error that match `unwanted` are dropped, also those that libraries write by file
    descriptor. All other lines appear at the end of the block."""
    _flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            _flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            caught.seek(0)
            os.write(2, b"".join(line for line in caught if not unwanted.search(line)))


def _flush() -> None:
    sys.stderr.flush()
    for each in on_their_way:
        each()
