"""Section inference: ResNet-50 by batch size and precision, as `python -m train benchmark --inference` measures it; on
the cuda executor also in INT8."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing

from gpu_report.figures import Figure, Section
from gpu_report.section import Bench
from gpu_report.training import IMAGE_SIZE, named
from graph_passes.errors import GraphError
from train.commands.benchmark_inference import CLASSES, INT8, precisions, sweep
from train.config import Config
from train.report.inference import Point, error_of_passes
from train.timing import PRECISION

DEPTH = 50
GPU_BATCHES, CPU_BATCHES = (1, 8, 32, 128, 256), (1, 8)
SECONDS, CPU_SECONDS = 1.0, 4.0  # minimum seconds for each part of a point: warm-up, latency, throughput


def measure(bench: Bench) -> Section:
    """Measure all precisions, first with the largest batch, then with the other batch sizes. This order measures the
    most important figures before the time may run out. A note names each point for which no time was left, and each
    batch that does not fit into memory.
    """
    config = Config(model=f"resnet{DEPTH}", image_size=IMAGE_SIZE)
    batches = GPU_BATCHES if bench.on_gpu else CPU_BATCHES
    measured = precisions(config, bench.placement, is_chosen=False)
    if bench.placement.executor == "cuda":
        measured |= {INT8: config}
    for group in (batches[-1:], batches[:-1]):
        for precision, chosen in measured.items():
            if missing := _missing(bench, precision, group):
                _measure(bench, precision, chosen, missing)
    return bench.found()


def _measure(bench: Bench, precision: str, config: Config, missing: Sequence[int]) -> None:
    """Measure the missing batch sizes of a precision, the smallest first, until the section's time is over."""
    if not _has_time(bench, precision, missing):
        return
    bench.free_memory()
    seconds = SECONDS if bench.on_gpu else CPU_SECONDS
    reason = "there is no room for it in memory"
    try:
        # `sweep` prints each point
        with closing(sweep(precision, config, bench.placement, CLASSES, missing, seconds)) as points:
            for point in points:
                bench.keep(_figure(point))
                left = _missing(bench, precision, missing)
                if left and not _has_time(bench, precision, left):
                    return
    except GraphError as error:  # this GPU has no kernels for the precision
        reason = str(error)
    for batch in _missing(bench, precision, missing):
        bench.leave_out(f"{precision} with batch {batch}", reason)


def _has_time(bench: Bench, precision: str, batches: Sequence[int]) -> bool:
    return bench.has_time(f"{precision} with batch {', '.join(map(str, batches))}")


def _missing(bench: Bench, precision: str, batches: Sequence[int]) -> list[int]:
    """The batch sizes of `batches` that are not measured yet."""
    found = {figure.size for figure in bench.figures if figure.precision == precision}
    return [batch for batch in batches if _size(batch) not in found]


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
