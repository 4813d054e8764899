"""Section training: steps of ResNet-18 to 152 by precision, on generated images.

A step does the work of `python -m train` for a batch: forward, loss, backward, SGD with momentum. All gammas start at
1, as in speed benchmarks, and several batches alternate. If a batch does not fit into memory, half the batch size is
tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from time import perf_counter

import numpy as np

from common.errors import ProgramError
from common.mxnet_compat import mx
from gpu_report.figures import Figure, Section
from gpu_report.section import Bench
from graph_passes.errors import CapacityError, TransientError
from graph_passes.executors import Executor
from train.build import build_executor, check_memory
from train.commands.benchmark_inference import CLASSES, images, memory_in_use, precisions
from train.config import Config
from train.optimizer import make_optimizer
from train.options.optimizer import REFERENCE_BATCH
from train.recording.gpu_monitor import UNKNOWN, GpuMonitor, GpuReadings
from train.timing import Timing, repeat

IMAGE_SIZE = 224  # pixels
GPU_MODELS, GPU_BATCH = (50, 18, 34, 101, 152), 256  # most important first, in case the time runs out
CPU_MODELS, CPU_BATCH = (18, 50), 4
WARM_UP_SECONDS, LEAST_SECONDS, LIMIT_SECONDS = 1.0, 1.5, 6.0  # seconds for one network and precision on a GPU
CPU_LIMIT_SECONDS = 15.0  # steps on a CPU take long


def named(depth: int) -> str:
    """A network's name in tables."""
    return f"ResNet-{depth}, {IMAGE_SIZE} pixels"


def measure(bench: Bench) -> Section:
    """Time all networks in all precisions. A note names each network that does not fit into memory, and each network
    for which no time was left.
    """
    models, batch = (GPU_MODELS, GPU_BATCH) if bench.on_gpu else (CPU_MODELS, CPU_BATCH)
    default = Config(batch_size=batch, image_size=IMAGE_SIZE, zero_init_residual=False)
    chosen = precisions(default, bench.placement, is_chosen=False)
    for depth, precision in measurement_order(models, list(chosen)):
        if bench.has(named(depth), "batch ", precision) or not bench.has_time(f"{named(depth)} in {precision}"):
            continue
        _measure(bench, depth, precision, replace(chosen[precision], model=f"resnet{depth}"))
    return bench.found()


def measurement_order(models: Sequence[int], names: Sequence[str]) -> list[tuple[int, str]]:
    """The order of the measurements: the first network in all precisions, then the others, precision by precision."""
    return [(models[0], name) for name in names] + [(model, name) for name in names for model in models[1:]]


def _measure(bench: Bench, depth: int, precision: str, config: Config) -> None:
    """Time a network with `config`'s batch size, or with half, a quarter and so on of it until the batch fits into
    memory.
    """
    what, batch = named(depth), config.batch_size
    while batch:
        bench.free_memory()
        fitting = replace(config, batch_size=batch)
        try:
            bench.add(_figure(bench, what, precision, fitting))
            return
        except (CapacityError, TransientError):
            bench.leave_out(f"{what} in {precision} with batch {batch}", "there is no room for it in memory")
        batch //= 2


def _figure(bench: Bench, what: str, precision: str, config: Config) -> Figure:
    """Time one network. Raises CapacityError or TransientError if the batch does not fit."""
    check_memory(config, CLASSES, config.image_size, bench.placement)
    executor = build_executor(config, CLASSES, config.image_size, bench.placement, None)
    try:
        timing, readings = _steps(bench, executor, config)
        per_second = config.batch_size / timing.median
        more = {"memory_gib": memory_in_use(readings), "largest_batch": executor.largest_batch() or math.nan,
                "joules_per_image": readings.power / per_second, "watts": readings.power, "sm_mhz": readings.clock}
    finally:
        executor.close()
    return Figure(what, f"batch {config.batch_size}", precision, per_second, "images/sec", timing.error, timing.limit,
                  {name: value for name, value in more.items() if math.isfinite(value)})


def _steps(bench: Bench, executor: Executor, config: Config) -> tuple[Timing, GpuReadings]:
    """The time of a step in s, and the GPU's readings during the steps. Raises ProgramError if a step did not train the
    network.
    """
    optimizer = make_optimizer(executor, config)
    gpu = mx.gpu(0) if bench.on_gpu else mx.cpu()
    labels = np.random.default_rng(config.seed).integers(0, CLASSES, config.batch_size)
    label = mx.nd.array(labels, gpu)
    batches = cycle(images(config, bench.placement, config.batch_size))
    rate = 0.1 * config.batch_size / REFERENCE_BATCH
    last_end = perf_counter()

    def step() -> float:
        """Seconds between the ends of two steps: `end_step` waits for the previous step."""
        nonlocal last_end
        executor.forward_backward(next(batches), label)
        optimizer.step(rate)
        executor.end_step()
        before, last_end = last_end, perf_counter()
        return last_end - before

    warm_until = last_end + (WARM_UP_SECONDS if bench.on_gpu else 0.0)
    step()
    while perf_counter() < warm_until:
        step()
    executor.read_metrics()  # discards the warm-up's metrics
    skipped, last_end = executor.skipped_steps, perf_counter()
    monitor = GpuMonitor(executor.gpu_bus_id) if executor.gpu_bus_id else None
    if monitor:
        monitor.start()
        monitor.take()
    timing = repeat(step, *((LIMIT_SECONDS, LEAST_SECONDS) if bench.on_gpu else (CPU_LIMIT_SECONDS, 0.0)))
    if monitor:
        monitor.sample()
        monitor.close()
    metrics = executor.read_metrics()
    if not math.isfinite(metrics.loss_sum) or executor.skipped_steps > skipped:
        raise ProgramError(f"not all timed steps of {config.model} trained: the sum of their losses is "
                           f"{metrics.loss_sum}, and {executor.skipped_steps - skipped} of them changed no weight")
    return timing, monitor.take() if monitor else UNKNOWN
