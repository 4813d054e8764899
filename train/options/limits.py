"""What the values of options must be: a test and its words, by the name of the option."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from common.command_line import option_name
from train.errors import TrainError

Limit = tuple[Callable[[Any], bool], str]


def between(low: float, high: float) -> Limit:
    """From the one to the other."""
    return lambda value: low <= value <= high, f"from {low} to {high}"


AT_LEAST_1: Limit = (lambda value: value >= 1, "at least 1")
ABOVE_0: Limit = (lambda value: value > 0, "above 0")
NOT_NEGATIVE: Limit = (lambda value: value >= 0, "0 or more")
BELOW_1: Limit = (lambda value: 0 <= value < 1, "at least 0 and below 1")
ABOVE_0_TO_1: Limit = (lambda value: 0 < value <= 1, "above 0 and at most 1")
FRACTION: Limit = (lambda value: 0 <= value <= 1, "a fraction from 0 to 1")


def check_limits(values: Mapping[str, Any], limits: Mapping[str, Limit]) -> None:
    """Raise TrainError for a value that is not what its option must be."""
    for name, value in values.items():
        is_good, words = limits.get(name, (lambda _: True, ""))
        if not is_good(value):
            raise TrainError(f"{option_name(name)} {shown(value)} must be {words}")
        if value in (math.inf, -math.inf):
            raise TrainError(f"{option_name(name)} {value} must be a finite number")


def shown(value: Any) -> str:
    """A value as a command line has it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return str(float(f"{value:.12g}"))  # 0.2 * 3 is 0.6
    return " ".join(map(shown, value)) if isinstance(value, tuple) else str(value)
