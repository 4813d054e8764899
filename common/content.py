"""Reading a file's content by a library: whatever the library raises becomes one sentence of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from common.errors import ProgramError


@contextlib.contextmanager
def refused_as(refusal: Callable[[Exception], ProgramError]) -> Iterator[None]:
    """Inside, a library reads a file's content. Whatever it raises because of that content is raised as refusal(error).

    All exceptions are meant, for no list of them is complete: a changed byte in a zip of NumPy's arrays alone raises
    BadZipFile, zlib.error, ValueError, NotImplementedError (a compression), RuntimeError (an encryption flag),
    tokenize.TokenError (an array's header) and more; one in a pickle LookupError or ModuleNotFoundError. OSError, of a
    file that cannot be read, and sentences of ours pass.
    """
    try:
        yield
    except (OSError, ProgramError):
        raise
    except Exception as error:
        raise refusal(error) from None
