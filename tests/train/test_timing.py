"""Timings are repeated until their median is known to 1 %, or to a limit, which is reported."""

from __future__ import annotations

import itertools
import math

import numpy as np

from train.timing import MIN_SAMPLES, relative_error, repeat


class Clock:
    """Each sample takes the time that it returns."""

    def __init__(self, samples: object) -> None:
        self.now, self.samples = 0.0, iter(samples)  # type: ignore[call-overload]

    def sample(self) -> float:
        value = next(self.samples)
        self.now += value
        return value

    def __call__(self) -> float:
        return self.now


def test_steady_samples_end_at_once():
    clock = Clock(itertools.repeat(0.5))
    timing = repeat(clock.sample, limit_seconds=100, clock=clock)
    assert timing == (0.5, 0.0, "") and clock.now == 0.5 * MIN_SAMPLES


def test_least_seconds():
    clock = Clock(itertools.repeat(0.5))
    assert repeat(clock.sample, 100, least_seconds=20, clock=clock).limit == ""
    assert clock.now == 20


def test_noise_is_repeated_until_the_median_is_known():
    """The samples cycle through five values. The 95 % interval of the median contains only the middle value once it is
    narrower than a fifth of all samples: 2 * 1.96 * sqrt(n) / 2 < n / 5 from n = 97 on."""
    clock = Clock(itertools.cycle([0.9, 1.1, 0.95, 1.05, 1.0]))
    timing = repeat(clock.sample, limit_seconds=1e6, clock=clock)
    assert timing.median == 1.0 and timing.error < 0.01 and timing.limit == ""
    assert 80 < clock.now < 120


def test_limit_is_said():
    clock = Clock(itertools.cycle([1.0, 3.0]))
    timing = repeat(clock.sample, limit_seconds=40, clock=clock)
    assert clock.now == 40 and timing.error > 0.01
    assert timing.limit == "ended after 40 s and 20 timings"


def test_a_single_sample_that_takes_too_long():
    clock = Clock([7.0])
    assert repeat(clock.sample, limit_seconds=5, clock=clock) == (7.0, None, "ended after 7 s and 1 timings")


def test_few_samples_tell_no_error():
    assert math.isinf(relative_error(np.ones(MIN_SAMPLES - 1))) and relative_error(np.ones(MIN_SAMPLES)) == 0
