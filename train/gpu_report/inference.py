"""Section inference: ResNet-50 over batch sizes and precisions, as `python -m train benchmark --inference` has it."""

from __future__ import annotations

import math

from train.commands.benchmark_inference import CLASSES, precisions, sweep
from train.config import Config
from train.gpu_report.figures import Figure, Section
from train.gpu_report.section import Bench
from train.gpu_report.training import IMAGE_SIZE, named
from train.reporting.inference import Point
from train.timing import PRECISION, relative_error

DEPTH = 50
GPU_BATCHES, CPU_BATCHES = (1, 8, 32, 128, 256), (1, 8)
SECONDS = 1.0  # of the warm-up, the latency and the throughput of one point, each at least


def measure(bench: Bench) -> Section:
    """All precisions; those for which no time is left, and batches that do not fit, are noted."""
    config = Config(model=f"resnet{DEPTH}", image_size=IMAGE_SIZE)
    for precision, chosen in precisions(config, bench.placement, is_chosen=False).items():
        if bench.has(named(DEPTH), "batch ", precision) or not bench.has_time(precision):
            continue
        sizes = GPU_BATCHES if bench.on_gpu else CPU_BATCHES
        points = list(sweep(precision, chosen, bench.placement, CLASSES, sizes, SECONDS))  # which it prints
        bench.figures += map(_figure, points)
        for batch in set(sizes) - {point.batch for point in points}:
            bench.leave_out(f"{precision} with batch {batch}", "there is no room for it in memory")
    return bench.found()


def _figure(point: Point) -> Figure:
    error = relative_error(point.pass_ms)
    passes = point.pass_ms
    limit = "" if error < PRECISION else f"ended after {passes.sum() / 1e3:.3g} s and {len(passes)} timings"
    more = {"latency_p50_ms": point.p50, "latency_p90_ms": point.p90, "memory_gib": point.memory_gib,
            "joules_per_image": point.joules_per_image, "watts": point.watts, "sm_mhz": point.sm_mhz}
    return Figure(named(DEPTH), f"batch {point.batch}", point.precision, point.images_per_sec, "images/sec",
                  error if math.isfinite(error) else None, limit,
                  {name: value for name, value in more.items() if value is not None and math.isfinite(value)})
