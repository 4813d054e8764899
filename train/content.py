"""What is told of a file whose content its reader cannot take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from common.errors import ProgramError
from train.errors import TrainError


@contextlib.contextmanager
def content_of_file(sentence: Callable[[str], str]) -> Iterator[None]:
    """Inside, a library reads a file. Whatever it raises on the content becomes TrainError(sentence(reason)).

    All exceptions are meant, for no list of them is complete: a changed byte in a zip of NumPy's arrays alone raises
    BadZipFile, zlib.error, ValueError, NotImplementedError (a compression), RuntimeError (an encryption flag),
    tokenize.TokenError (an array's header) and more. OSError, of a file that cannot be read, and sentences of ours
    pass.
    """
    try:
        yield
    except (OSError, ProgramError):
        raise
    except Exception as error:
        raise TrainError(sentence(reason(error))) from None


def reason(error: Exception) -> str:
    """The first line of what an exception says, or its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
