"""What is told of a file whose content its reader cannot take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from common.content import refused_as
from train.errors import TrainError


def content_of_file(sentence: Callable[[str], str]) -> AbstractContextManager[None]:
    """Inside, a library reads a file; whatever it raises on the content becomes TrainError(sentence(reason))."""
    return refused_as(lambda error: TrainError(sentence(reason(error))))


def reason(error: Exception) -> str:
    """The first line of what an exception says, or its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
