"""Exceptions that end a program with one sentence and an exit code, without a stack trace."""

from __future__ import annotations

import signal

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_CTRL_C = 128 + signal.SIGINT  # the shells' convention
EXIT_PIPE_CLOSED = 128 + signal.SIGPIPE


class ProgramError(Exception):
    """Ends a program with one sentence and no stack trace. The request was valid, but something failed."""

    exit_code = EXIT_FAILURE


class UserError(ProgramError):
    """A user's mistake, as one sentence: what was wrong (with the value), where, and what to do."""

    exit_code = EXIT_USER_ERROR


def error_of(code: int) -> type[ProgramError]:
    """The exception to raise when a child program has ended with this exit code."""
    return UserError if code == EXIT_USER_ERROR else ProgramError
