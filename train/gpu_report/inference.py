"""Section inference: ResNet-50 over batch sizes and precisions, as `python -m train benchmark --inference` has it."""

from __future__ import annotations

import math
from contextlib import closing

from train.commands.benchmark_inference import CLASSES, precisions, sweep
from train.config import Config
from train.gpu_report.figures import Figure, Section
from train.gpu_report.section import Bench
from train.gpu_report.training import IMAGE_SIZE, named
from train.reporting.inference import Point, error_of_passes
from train.timing import PRECISION

DEPTH = 50
GPU_BATCHES, CPU_BATCHES = (1, 8, 32, 128, 256), (1, 8)
SECONDS, CPU_SECONDS = 1.0, 4.0  # of the warm-up, the latency and the throughput of one point, each at least


def measure(bench: Bench) -> Section:
    """All precisions; those for which no time is left, and batches that do not fit, are noted."""
    config = Config(model=f"resnet{DEPTH}", image_size=IMAGE_SIZE)
    for precision, chosen in precisions(config, bench.placement, is_chosen=False).items():
        if _missing(bench, precision) and bench.has_time(precision):
            _measure(bench, precision, chosen)
    return bench.found()


def _measure(bench: Bench, precision: str, config: Config) -> None:
    """The batches that a precision lacks, as far as there is time."""
    seconds = SECONDS if bench.on_gpu else CPU_SECONDS
    missing = _missing(bench, precision)
    with closing(sweep(precision, config, bench.placement, CLASSES, missing, seconds)) as points:  # which prints them
        for point in points:
            bench.keep(_figure(point))
            left = ", ".join(map(str, _missing(bench, precision)))
            if left and not bench.has_time(f"{precision} with batch {left}"):
                return
    for batch in _missing(bench, precision):
        bench.leave_out(f"{precision} with batch {batch}", "there is no room for it in memory")


def _missing(bench: Bench, precision: str) -> list[int]:
    """The batches that are not measured yet, the smallest first."""
    found = {figure.size for figure in bench.figures if figure.precision == precision}
    return [batch for batch in (GPU_BATCHES if bench.on_gpu else CPU_BATCHES) if _size(batch) not in found]


def _size(batch: int) -> str:
    return f"batch {batch}"


def _figure(point: Point) -> Figure:
    passes = point.pass_ms
    error = error_of_passes(passes)
    limit = "" if error < PRECISION else f"ended after {passes.sum() / 1e3:.3g} s and {len(passes)} timings"
    more = {"latency_p50_ms": point.p50, "latency_p90_ms": point.p90, "memory_gib": point.memory_gib,
            "joules_per_image": point.joules_per_image, "watts": point.watts, "sm_mhz": point.sm_mhz}
    return Figure(named(DEPTH), _size(point.batch), point.precision, point.images_per_sec, "images/sec",
                  error if math.isfinite(error) else None, limit,
                  {name: value for name, value in more.items() if value is not None and math.isfinite(value)})
