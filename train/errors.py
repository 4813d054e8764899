"""The one exception for a user's mistake in `train`."""

from __future__ import annotations


class TrainError(Exception):
    """A mistake of the user, told in one sentence: what (the value), where, and what to do.

    `python -m train` prints it as `error: ...` on stderr and exits with code 2, without a stack trace.
    """
