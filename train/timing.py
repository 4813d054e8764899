"""Timings that are repeated until their median is known to 1 %."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

PRECISION = 0.01  # tolerance of the relative standard error of a median
MIN_SAMPLES = 10  # with fewer, the interval behind the standard error covers nearly all samples


class Timing(NamedTuple):
    """The median of repeated timings, in the unit of the samples."""

    median: float
    error: float | None  # standard error of the median divided by the median; None: too few samples
    limit: str  # the limit that ended the timing before the error was below 1 %, in words; "" if no limit did


def standard_error_of_median(values: Sequence[float] | np.ndarray) -> float:
    """The standard error from the order statistics that bound the median's 95 % confidence interval; valid for any
    distribution.

    Source: McKean and Schrader, 'A comparison of methods for studentizing the sample median', 1984.
    """
    ordered, z = np.sort(values), 1.96
    below = max(0, math.floor((len(values) + 1) / 2 - z * math.sqrt(len(values) / 4)) - 1)
    return float(ordered[len(values) - 1 - below] - ordered[below]) / (2 * z)


def relative_error(samples: Sequence[float] | np.ndarray) -> float:
    """Standard error of the median divided by the median; infinite with too few samples."""
    if len(samples) < MIN_SAMPLES:
        return math.inf
    return standard_error_of_median(samples) / float(np.median(samples))


def repeat(sample: Callable[[], float], limit_seconds: float, least_seconds: float = 0.0,
           clock: Callable[[], float] = time.perf_counter) -> Timing:
    """Take samples until the standard error of their median is under 1 %, or for `limit_seconds`.

    Args:
        sample: takes one timing and returns it, in any unit.
        limit_seconds: no sample begins after this time, but at least one sample is taken.
        least_seconds: the minimum duration.
        clock: returns seconds; for tests.
    """
    start, samples = clock(), [sample()]
    while (spent := clock() - start) < limit_seconds:
        if spent >= least_seconds and relative_error(samples) < PRECISION:
            break
        samples.append(sample())
    error = relative_error(samples)
    limit = "" if error < PRECISION else f"ended after {spent:.3g} s and {len(samples)} timings"
    return Timing(float(np.median(samples)), error if math.isfinite(error) else None, limit)
