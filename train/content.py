"""Words the error messages for files whose content cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from common.content import first_line, refused_as
from train.errors import TrainError


def content_of_file(sentence: Callable[[str], str]) -> AbstractContextManager[None]:
    """A context in which a library reads a file. An exception that the content causes becomes
    TrainError(sentence(reason)).
    """
    return refused_as(lambda error: TrainError(sentence(reason(error))))


def reason(error: Exception) -> str:
    """The first line of an exception's message, or the exception's type if it has no message."""
    return first_line(error) or type(error).__name__
