"""Keeps lines off standard error that libraries write there."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def without_lines(unwanted: re.Pattern[bytes]) -> Iterator[None]:
    """A context in which lines on standard error that match `unwanted` are dropped, including lines that libraries
    write by file descriptor. All other lines appear at the end of the block."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            caught.seek(0)
            os.write(2, b"".join(line for line in caught if not unwanted.search(line)))
