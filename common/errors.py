"""What ends a program with one sentence and an exit code, and never a stack trace."""

from __future__ import annotations

import signal

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_CTRL_C = 128 + signal.SIGINT  # as shells have it
EXIT_PIPE_CLOSED = 128 + signal.SIGPIPE


class ProgramError(Exception):
    """Ends a program with one sentence and no stack trace: something failed that was asked for rightly."""

    exit_code = EXIT_FAILURE


class UserError(ProgramError):
    """A mistake of the user, told in one sentence: what (the value), where, and what to do."""

    exit_code = EXIT_USER_ERROR


def error_of(code: int) -> type[ProgramError]:
    """What to raise where another program that was started has ended with this exit code."""
    return UserError if code == EXIT_USER_ERROR else ProgramError
