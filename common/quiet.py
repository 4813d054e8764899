"""Drops unwanted lines that libraries write to standard error."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator

# Functions called before file descriptor 2 changes. They flush text that libraries have written but that has not
# reached the descriptor.
on_their_way: list[Callable[[], None]] = []


@contextlib.contextmanager
def without_lines(unwanted: re.Pattern[bytes]) -> Iterator[None]:
    """Drop the lines on standard error that match `unwanted`, inside the block, including lines that libraries write to
    the file descriptor. All other lines appear at the end of the block.
    """
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
