"""The loader alone: images/sec when the graph stops after each of its stages."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

from pipelines.dali_loader import DaliLoader
from pipelines.graph import STAGES
from pipelines.loader import LoaderConfig
from pipelines.sources import open_source

STAGE_TITLES = {"read": "read", "decode": "+ decode and crop", "resize": "+ resize", "full": "+ flip, normalise"}


class StageSpeed(NamedTuple):
    """Throughput up to one stage."""

    stage: str
    images_per_sec: float  # median over the batches
    spread: float  # half the interquartile range, images/sec
    step_ms: list[float]  # every timed stretch, per batch


def bench_loader(config: LoaderConfig, seconds: float = 4.0) -> list[StageSpeed]:
    """Time each stage for about `seconds`, after a warm-up that fills the queues; raises DataError."""
    source = open_source(config.data, config.split, config.num_classes)
    return [_time_stage(DaliLoader(config, (0, 1), source, stage), stage, seconds) for stage in STAGES]


def _time_stage(loader: DaliLoader, stage: str, seconds: float) -> StageSpeed:
    with loader:
        for _ in range(loader.config.prefetch + 2):
            loader.run()
        # A batch's own time jumps with the queue's filling; stretches as long as a tenth of the whole do not.
        step_ms: list[float] = []
        begin = time.perf_counter()
        while (start := time.perf_counter()) - begin < seconds or len(step_ms) < 5:
            count = 0
            while time.perf_counter() - start < seconds / 10:
                loader.run()
                count += 1
            step_ms.append((time.perf_counter() - start) * 1000 / count)
    speeds = [loader.config.batch_size * 1000 / ms for ms in step_ms]
    quarters = statistics.quantiles(speeds, n=4)
    return StageSpeed(stage, statistics.median(speeds), (quarters[2] - quarters[0]) / 2, step_ms)
