"""Measures the loader alone: images/sec up to each stage of the graph, and with other settings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from pipelines.dali_loader import DaliLoader
from pipelines.decoded import decode_once
from pipelines.graph import STAGES
from pipelines.loader import LoaderConfig
from pipelines.progress import num_cores
from pipelines.sources import open_source

STAGE_TITLES = {"read": "read", "decode": "+ decode and crop", "resize": "+ resize", "full": "+ flip, normalise"}


class LoaderSpeed(NamedTuple):
    """Throughput of a loader."""

    images_per_sec: float  # median over the batches
    spread: float  # half the interquartile range, images/sec
    step_ms: list[float]  # ms per batch in each timed interval


def bench_stages(config: LoaderConfig, seconds: float = 4.0) -> dict[str, LoaderSpeed]:
    """Time the loader up to each stage for about `seconds`; raises DataError."""
    source = decode_once(config, open_source(config.data, config.split, config.num_classes))
    return {stage: time_loader(DaliLoader(config, (0, 1), source, stage), seconds) for stage in STAGES}


def bench_settings(config: LoaderConfig, seconds: float = 4.0) -> Iterator[tuple[dict[str, Any], LoaderSpeed]]:
    """Time the whole loader with other settings, for about `seconds` each. Raises DataError.

    Yields the fields that differ from `config`, and the speed. For device "gpu" the last setting is device "cpu".
    """
    source = decode_once(config, open_source(config.data, config.split, config.num_classes))
    for changes in _changes(config):
        yield changes, time_loader(DaliLoader(replace(config, **changes), (0, 1), source), seconds)


def _changes(config: LoaderConfig) -> list[dict[str, Any]]:
    threads = config.num_threads or num_cores()
    on_gpu = config.device == "gpu"
    return [
        {},
        *({"hw_decoder_load": load} for load in (0.0, 0.5, 0.65, 0.8, 0.9, 1.0) if on_gpu),
        *({"num_threads": count} for count in (threads // 2, threads * 3 // 4) if 0 < count < threads),
        *({"prefetch": depth} for depth in (1, 2) if depth != config.prefetch),
        *({"batch_size": size} for size in (config.batch_size // 2, 2 * config.batch_size) if size),
        *({"device": "cpu"} for _ in range(on_gpu)),
    ]


def time_loader(loader: DaliLoader, seconds: float) -> LoaderSpeed:
    """Time a new loader for about `seconds` after a warm-up that fills its queues, and close it. Raises DataError."""
    # The time of a single batch depends on how full the queue is; an interval of a tenth of `seconds` averages over
    # this.
    step_ms: list[float] = []
    with loader:
        for _ in range(loader.config.prefetch + 2):
            loader.run()
        begin = time.perf_counter()
        while (start := time.perf_counter()) - begin < seconds or len(step_ms) < 5:
            count = 0
            while time.perf_counter() - start < seconds / 10:
                loader.run()
                count += 1
            step_ms.append((time.perf_counter() - start) * 1000 / count)
    speeds = [loader.config.batch_size * 1000 / ms for ms in step_ms]
    quarters = statistics.quantiles(speeds, n=4)
    return LoaderSpeed(statistics.median(speeds), (quarters[2] - quarters[0]) / 2, step_ms)
