"""Checks option values against limits, which are kept by option name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from common.command_line import option_name
from common.limits import Limit
from train.errors import TrainError


def check_limits(values: Mapping[str, Any], limits: Mapping[str, Limit]) -> None:
    """Raise TrainError for a value outside the limits of its option."""
    for name, value in values.items():
        is_good, words = limits.get(name, (lambda _: True, ""))
        if not is_good(value):
            raise TrainError(f"{option_name(name)} {shown(value)} must be {words}")
        if value in (math.inf, -math.inf):
            raise TrainError(f"{option_name(name)} {value} must be a finite number")


def shown(value: Any) -> str:
    """A value in the form of the command line."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return str(float(f"{value:.12g}"))  # rounded so that 0.2 * 3 is shown as 0.6
    return " ".join(map(shown, value)) if isinstance(value, tuple) else str(value)
