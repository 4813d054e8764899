"""Messages about a file whose content its reader refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from common.content import first_line, refused_as
from train.errors import TrainError


def content_of_file(sentence: Callable[[str], str]) -> AbstractContextManager[None]:
    """Inside, a library reads a file; any exception that the content causes becomes TrainError(sentence(reason))."""
    return refused_as(lambda error: TrainError(sentence(reason(error))))


def reason(error: Exception) -> str:
    """The first line of an exception's message, or its type if it has none."""
    return first_line(error) or type(error).__name__
