"""Speeds on their own: of training steps, repeated until it is known well enough, and of the loader."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipelines import Loader
from train.config import BenchmarkConfig
from train.distributed import Workers
from train.loop import Trainer
from train.recorder import Recorder

PRECISION = 0.01  # wanted standard error of the median step time, relative to it
LOADER_SECONDS = 2.0  # how long the loader alone is measured


class Result(NamedTuple):
    step_ms: float  # median
    sentence: str


def benchmark(trainer: Trainer, recorder: Recorder, config: BenchmarkConfig) -> Result:
    """Repeat training steps until their median time is known well enough.

    Well enough: standard error of the median below 1 %, or a limit of the configuration is reached. The time of a step
    is that between the ends of two steps, so it holds all that the loop does in between (`Recorder.stop_clock`).
    """
    most = config.warmup_steps + config.limit_steps
    recorder.begin_epoch(0, most)
    batches = recorder.timed(itertools.chain.from_iterable(itertools.repeat(trainer.train_loader)))
    times: list[float] = []  # s; of one step each
    error, done = math.inf, False
    start = last_end = time.perf_counter()
    while not done:
        trainer.step(batches)
        recorder.stop_clock(trainer.executor.idle_seconds)
        now = time.perf_counter()
        times.append(now - last_end)
        last_end = now
        counted = times[config.warmup_steps :]
        if len(counted) >= config.min_steps:
            error = standard_error_of_median(counted) / float(np.median(counted))
        over = now - start > 60 * config.limit_minutes
        (done,) = trainer.workers.vote([error < PRECISION or (over and len(counted) >= 2)])
        done |= trainer.progress.step == most
        trainer.end_step(recorder, read_now=done)

    median = float(np.median(times[config.warmup_steps :]))
    speed = config.global_batch(trainer.workers.size) / median
    recorder.event("benchmark", median_step_ms=1e3 * median, images_per_sec=speed, relative_error=error)
    result = f"median step {1e3 * median:.1f} ms = {speed:.1f} images/sec"
    if error < PRECISION:
        sentence = f"{result}, standard error of the median {error:.2%}"
    elif math.isinf(error):
        sentence = f"{result}; ended at its limit before the {config.min_steps} steps that tell how exact that is"
    else:
        sentence = (
            f"{result}; ended at its limit with a standard error of the median of {error:.2%}, more than the 1 % wanted"
        )
    return Result(1e3 * median, sentence)


def standard_error_of_median(values: Sequence[float]) -> float:
    """From the order statistics that bound the median's 95 % confidence interval, so for any distribution.

    Source: McKean and Schrader, 'A comparison of methods for studentizing the sample median', 1984.
    """
    ordered, z = np.sort(values), 1.96
    below = max(0, math.floor((len(values) + 1) / 2 - z * math.sqrt(len(values) / 4)) - 1)
    return float(ordered[len(values) - 1 - below] - ordered[below]) / (2 * z)


def measure_loader(loader: Loader, workers: Workers) -> float:
    """Images/sec of the loader alone, over all processes."""
    batches = iter(itertools.chain.from_iterable(itertools.repeat(loader)))
    for _ in range(loader.config.prefetch + 1):  # made ahead while the network still computed
        next(batches)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < LOADER_SECONDS:
        next(batches).data.wait_to_read()
        count += loader.config.batch_size
    return workers.sum([count / (time.perf_counter() - start)])[0]
