"""Turns exceptions of libraries and plug-ins into one-sentence errors of this project."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from common.errors import ProgramError


@contextlib.contextmanager
def refused_as(refusal: Callable[[Exception], ProgramError]) -> Iterator[None]:
    """A context in which a library reads a file's content. An exception that the content causes is replaced by
    refusal(error).

    All exception types are caught, because no list of them is complete. In a zip of NumPy arrays, one changed byte
    raises BadZipFile, zlib.error, ValueError, NotImplementedError (a compression), RuntimeError (an encryption flag),
    tokenize.TokenError (an array's header) and more; in a pickle, LookupError or ModuleNotFoundError. OSError (the file
    cannot be read) and our own ProgramError pass unchanged.
    """
    try:
        yield
    except (OSError, ProgramError):
        raise
    except Exception as error:
        raise refusal(error) from None


def first_line(error: BaseException) -> str:
    """The first line of an exception's message; "" if the exception has no message, or fails to produce one."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        return ""
    return lines[0] if lines else ""
