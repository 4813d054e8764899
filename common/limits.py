"""Limits of option values: each is a test and the words that describe it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Limit = tuple[Callable[[Any], bool], str]


def between(low: float, high: float, what: str = "") -> Limit:
    """A limit: values from `low` to `high`, both included. `what` names the value in messages."""
    return lambda value: low <= value <= high, f"{what} from {low} to {high}".strip()


AT_LEAST_1: Limit = (lambda value: value >= 1, "at least 1")
ABOVE_0: Limit = (lambda value: value > 0, "above 0")
NOT_NEGATIVE: Limit = (lambda value: value >= 0, "0 or more")
BELOW_1: Limit = (lambda value: 0 <= value < 1, "at least 0 and below 1")
ABOVE_0_TO_1: Limit = (lambda value: 0 < value <= 1, "above 0 and at most 1")
FRACTION = between(0, 1, "a fraction")
PROBABILITY = between(0, 1, "a probability")
