"""Timings that are repeated until their median is known to 1 %."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

PRECISION = 0.01  # wanted standard error of a median, relative to it
MIN_SAMPLES = 10  # of fewer, the interval that the standard error is from is the range of nearly all of them


class Timing(NamedTuple):
    """The median of repeated timings, in the unit of the samples."""

    median: float
    error: float | None  # standard error of the median, relative to it; None: too few samples to tell
    limit: str  # what ended the repetition before the error was under 1 %; "" where nothing did


def standard_error_of_median(values: Sequence[float] | np.ndarray) -> float:
    """From the order statistics that bound the median's 95 % confidence interval, so for any distribution.

    Source: McKean and Schrader, 'A comparison of methods for studentizing the sample median', 1984.
    """
    ordered, z = np.sort(values), 1.96
    below = max(0, math.floor((len(values) + 1) / 2 - z * math.sqrt(len(values) / 4)) - 1)
    return float(ordered[len(values) - 1 - below] - ordered[below]) / (2 * z)


def relative_error(samples: Sequence[float] | np.ndarray) -> float:
    """Standard error of the median over the median; infinite where the samples are too few to tell."""
    if len(samples) < MIN_SAMPLES:
        return math.inf
    return standard_error_of_median(samples) / float(np.median(samples))


def repeat(sample: Callable[[], float], limit_seconds: float, least_seconds: float = 0.0,
           clock: Callable[[], float] = time.perf_counter) -> Timing:
    """Take samples until the standard error of their median is under 1 %, or for `limit_seconds`.

    Args:
        sample: times once, and returns it in any unit.
        limit_seconds: no sample is begun after these; one at least is taken.
        least_seconds: samples are taken for so long in any case.
        clock: seconds, for tests.
    """
    start, samples = clock(), [sample()]
    while (spent := clock() - start) < limit_seconds:
        if spent >= least_seconds and relative_error(samples) < PRECISION:
            break
        samples.append(sample())
    error = relative_error(samples)
    limit = "" if error < PRECISION else f"ended after {spent:.3g} s and {len(samples)} timings"
    return Timing(float(np.median(samples)), error if math.isfinite(error) else None, limit)
