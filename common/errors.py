"""Exceptions that end a program with one sentence and an exit code, without a stack trace."""

from __future__ import annotations

import signal

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_CTRL_C = 128 + signal.SIGINT  # shells use 128 + the signal's number as the exit code
EXIT_PIPE_CLOSED = 128 + signal.SIGPIPE


class ProgramError(Exception):
    """A failure of a valid request. The program ends with one sentence and no stack trace."""

    exit_code = EXIT_FAILURE


class UserError(ProgramError):
    """A user's mistake. The message is one sentence that names the mistake with its value, the place, and the way out.
    """

    exit_code = EXIT_USER_ERROR


def error_of(code: int) -> type[ProgramError]:
    """The type of exception to raise after a child program has ended with the exit code `code`."""
    return UserError if code == EXIT_USER_ERROR else ProgramError
