"""The speed of inference, over batch sizes and precisions: `python -m train benchmark --inference`.

A pass is from a batch in the device's memory to the class probabilities in the host's. Images/sec is that of passes one
behind the other, of which the host takes the answer of one while the device computes the next. A latency is the time of
one pass that nothing runs beside. Each point is warmed up first, and its batches are several, in turn. The images are
noise: what they show does not matter to the time, but that they differ does to the power.

MLPerf Inference's names for two of the figures (arXiv:1911.02549, table III) are used for what they are about: single
stream is the 90th percentile of the latency of batch 1, offline the largest throughput. A submission asks for more: the
data set, its accuracy, LoadGen's queries and longer runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime, timezone
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from common import environment, files
from common.command_line import option_name
from common.errors import ProgramError
from common.mxnet_compat import mx
from graph_passes.errors import CapacityError, TransientError
from graph_passes.executors import Executor
from graph_passes.passes import BACKBONE
from train import devices
from train.build import batch_form, build_executor, check_memory, network_dtype
from train.commands.quantize import untrained
from train.commands.session import run_folder_of
from train.config import Config, configure
from train.devices import IMAGENET_PRESET, Placement
from train.errors import TrainError
from train.options.data import SizeOptions
from train.options.network import NetworkOptions
from train.options.run import DeviceOptions, RunOptions
from train.presets import load_preset
from train.processes.distributed import Workers
from train.processes.invocation import command_line
from train.processes.signals import StoppedBySignal, ending_with
from train.recording.gpu_monitor import UNKNOWN, GpuMonitor, GpuReadings
from train.report.inference import LATENCY_BATCH, Point, error_of_passes, plot, scenarios
from train.timing import PRECISION
from train.weights.int8_file import executor_of

GPU_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
CPU_BATCHES = (1, 2, 4, 8, 16)
CLASSES = 1000
NUM_BATCHES, POOL = 6, 64  # batches in turn, and the images that they are made of
WARM_UP_SECONDS, SECONDS = 3.0, 3.0  # of each of the two figures of a point, at least
CPU_SECONDS = 1.0  # in place of both: a CPU's clock rises at once, and its passes take long
LONGER = 4
LEAST_LATENCIES, LEAST_PASSES = 10, 5  # the former tell a 90th percentile
INT8 = "int8"
CALIBRATION_SIZE = 64  # pixels: no scale depends on it
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
RESULT, PLOT = "inference.json", "inference.png"

# What may be given beside --inference, in which there are neither data nor training.
TAKEN = {"inference", "int8", "batch_sizes", "num_classes",
         *(field.name for part in (RunOptions, NetworkOptions, SizeOptions, DeviceOptions) for field in fields(part))}


def measure_inference(values: Mapping[str, Any], workers: Workers) -> None:
    """Measure, by the options given: each point is in inference.json once it is known, whatever ends the program; the
    table and the plot are of all. Raises UserError and StoppedBySignal."""
    if workers.size > 1:
        raise TrainError("--inference measures one GPU: use python -m train benchmark --inference", on_all_ranks=True)
    for name in values.keys() - TAKEN:
        way_out = "give --batch-sizes" if name == "batch_size" else "leave it out"
        raise TrainError(f"{option_name(name)} has no effect on --inference, which measures the network alone: "
                         f"{way_out}")
    default = load_preset(values.get("config", IMAGENET_PRESET))
    config = configure(values, replace(default, val_image_size=0))
    folder = run_folder_of(replace(config, config=f"{config.config}-inference"))
    if (folder / RESULT).exists():
        raise TrainError(f"the output folder {folder} already holds a measurement: give another --output")
    if int8 := values.get("int8", False):
        devices.check_int8(values)
    placement = devices.choose(config, workers.local_rank)
    if placement.note:
        print(placement.note, flush=True)
    if int8 and placement.executor != "cuda":
        raise TrainError("--int8 measures the cuda executor, and there is no GPU for it here: on a CPU ONNX Runtime "
                         "computes in INT8 (python -m train export --int8 onnxruntime)")
    num_classes = config.num_classes or CLASSES
    usual = GPU_BATCHES if placement.device.startswith("gpu") else CPU_BATCHES
    sizes = sorted(set(values.get("batch_sizes", usual)))
    chosen_ones = {INT8: config} if int8 else precisions(config, placement, "dtype" in values)
    about = _about(config, num_classes, placement)
    points: list[Point] = []
    try:
        with ending_with(f"stopped: the points measured so far are in {folder / RESULT}"):
            for name, chosen in chosen_ones.items():
                for point in sweep(name, chosen, placement, num_classes, sizes):
                    points.append(point)
                    _write(folder, points, about, complete=False)
    except StoppedBySignal as stop:
        if not (folder / RESULT).exists():
            stop.args = ("stopped before the first point was measured",)
        raise
    if not points:
        raise TrainError(f"no batch of {' or '.join(map(str, sizes))} images fits into memory: give smaller "
                         "--batch-sizes")
    _write(folder, points, about, complete=True)
    device = about["hardware"]["gpus"][0] if placement.device.startswith("gpu") else about["hardware"]["cpu"]
    title = f"{config.model}, {config.image_size} pixels, {device}"
    files.write(folder / PLOT, plot(points, title))
    _print(points, title)
    print(f"all figures: {folder / RESULT}, {folder / PLOT}")


def precisions(config: Config, placement: Placement, is_chosen: bool) -> dict[str, Config]:
    """Those of the executor, by the name in tables, or the one that --dtype has chosen."""
    if placement.executor != "cuda" or is_chosen:
        dtype = network_dtype(config, placement)
        name = "tf32" if placement.executor == "cuda" and dtype == "float32" and config.tf32 else SHORT[dtype]
        return {name: config}
    return {
        "fp16": replace(config, dtype="float16"),
        "bf16": replace(config, dtype="bfloat16"),
        "tf32": replace(config, dtype="float32", tf32=True),
        "fp32": replace(config, dtype="float32", tf32=False),
    }


def sweep(precision: str, config: Config, placement: Placement, num_classes: int, sizes: Sequence[int],
          seconds: float | None = None) -> Generator[Point, None, None]:
    """The points of one precision, from the smallest batch; says what it measures, and which sizes memory has not room
    for. A cuda executor takes smaller batches than its own; another one is made for each size. `seconds`: of each part
    of a point, in place of the usual ones; of the throughput LONGER times as many, where its median is not known to 1 %
    by then."""
    shared: Executor | None = None
    fitting = list(sizes)
    if placement.executor == "cuda":
        shared, fitting = _largest(precision, config, placement, num_classes, sizes)
    try:
        for batch in fitting:
            executor = shared or _build(precision, config, placement, num_classes, batch)
            if executor is None:  # nor would a larger one fit
                return
            try:
                point = measure(executor, precision, images(config, placement, batch), seconds)
            except (CapacityError, TransientError):  # memory that kernels need besides; what is measured stays
                print(_left_out(precision, batch), flush=True)
                return
            finally:
                if executor is not shared:
                    executor.close()
            latency = f", latency p50 {point.p50:.2f} ms" if point.p50 else ""
            print(f"{precision}, batch {batch:,}: {point.images_per_sec:,.1f} images/sec{latency}", flush=True)
            yield point
    finally:
        if shared:
            shared.close()


def _largest(precision: str, config: Config, placement: Placement, num_classes: int,
             sizes: Sequence[int]) -> tuple[Executor | None, list[int]]:
    """The executor for the largest of the sizes that fits, and the sizes that it takes."""
    for count in range(len(sizes), 0, -1):
        if executor := _build(precision, config, placement, num_classes, sizes[count - 1]):
            return executor, list(sizes[:count])
    return None, []


def _build(precision: str, config: Config, placement: Placement, num_classes: int, batch: int) -> Executor | None:
    """The executor of a network with initial values; None, and a word on it, where the batch does not fit."""
    # Frozen: executors are made for training too, and it takes a tenth of the memory where only the classifier trains.
    config = replace(config, batch_size=batch, freeze=BACKBONE)
    try:
        if precision == INT8:
            trained, network = _untrained(config.model, num_classes)
            return executor_of(network, trained, config, placement)
        check_memory(config, num_classes, config.image_size, placement)
        return build_executor(config, num_classes, config.image_size, placement, None)
    except (CapacityError, TransientError):
        print(_left_out(precision, batch), flush=True)
        return None


_untrained = cache(partial(untrained, image_size=CALIBRATION_SIZE))  # once for all sizes of batches


def _left_out(precision: str, batch: int) -> str:
    return f"{precision}, batch {batch:,}: left out, there is no room for it in memory"


def images(config: Config, placement: Placement, batch: int) -> list[Any]:
    """Batches of noise on the device, in the form in which the loader gives them."""
    dtype, channels = batch_form(config, placement)
    size, rng = config.image_size, np.random.default_rng(config.seed)
    pool = np.zeros((min(POOL, NUM_BATCHES * batch), size, size, channels), dtype)
    pool[..., :3] = rng.standard_normal((*pool.shape[:3], 3), np.float32)
    context = mx.gpu(0) if placement.device.startswith("gpu") else mx.cpu()
    # A large batch has every image of the pool, and so many of them that two in turn are enough.
    starts = range(NUM_BATCHES if batch <= POOL else 2)
    return [mx.nd.array(pool[(start * batch + np.arange(batch)) % len(pool)], context, dtype) for start in starts]


def measure(executor: Executor, precision: str, batches: Sequence[Any], seconds: float | None = None) -> Point:
    """A point of the sweep. Raises ProgramError where the network gave no probabilities."""
    in_turn, batch = cycle(batches), len(batches[0])
    answer = np.empty(0)

    def start() -> Callable[[], np.ndarray]:
        executor.infer(next(in_turn))
        return executor.request_probabilities()

    def alone() -> float:
        nonlocal answer
        begin = perf_counter()
        answer = start()()
        return perf_counter() - begin

    monitor = GpuMonitor(executor.gpu_bus_id) if executor.gpu_bus_id else None
    warm_up_seconds, least_seconds = (WARM_UP_SECONDS, SECONDS) if monitor else (CPU_SECONDS, CPU_SECONDS)
    if seconds:
        warm_up_seconds = least_seconds = seconds
    _repeat(alone, warm_up_seconds, 2)
    latencies = _repeat(alone, least_seconds, LEAST_LATENCIES) if batch <= LATENCY_BATCH else []
    if monitor:
        monitor.start()
        monitor.take()
    under_way, ends = start(), [perf_counter()]
    while (ends[-1] - ends[0] < least_seconds or len(ends) <= LEAST_PASSES
           or (seconds and ends[-1] - ends[0] < LONGER * seconds and error_of_passes(np.diff(ends)) >= PRECISION)):
        under_way, before = start(), under_way
        before()
        ends.append(perf_counter())
    if monitor:
        monitor.sample()
        monitor.close()
    readings = monitor.take() if monitor else UNKNOWN
    under_way()
    sums = answer.sum(axis=1)
    if not (len(answer) == batch and np.abs(sums - 1).max() < 0.01):  # a tenth of it is what 16 bits round away
        raise ProgramError(f"inference in {precision} at batch {batch} gave no probabilities: those of an image add up "
                           f"to {np.min(sums):g} to {np.max(sums):g}; that point is not published")
    passes = np.diff(ends)
    per_second = batch * len(passes) / (ends[-1] - ends[0])
    return Point(precision, batch, per_second, 1e3 * passes, 1e3 * np.array(latencies), memory_in_use(readings),
                 readings.power / per_second, readings.power, readings.clock)


def _repeat(step: Callable[[], float], seconds: float, at_least: int) -> list[float]:
    times: list[float] = []
    end = perf_counter() + seconds
    while perf_counter() < end or len(times) < at_least:
        times.append(step())
    return times


def memory_in_use(readings: GpuReadings) -> float:
    """GiB: of the GPU, all that is in use there; without one, of this process."""
    return readings.memory if math.isfinite(readings.memory) else psutil.Process().memory_info().rss / 2**30


def _about(config: Config, num_classes: int, placement: Placement) -> dict[str, Any]:
    """What inference.json says beside the figures."""
    return {"name": "inference", "model": config.model, "image_size": config.image_size, "num_classes": num_classes,
            "executor": placement.executor, "hardware": environment.hardware(), "versions": environment.versions(),
            "commit": environment.git_commit(), "command": command_line()}


def _write(folder: Path, points: Sequence[Point], about: Mapping[str, Any], complete: bool) -> None:
    """inference.json with these points; `complete`: with all of them. Raises UserError where it cannot be written."""
    content = {**about, "scenarios": {name: asdict(scenario) for name, scenario in scenarios(points).items()},
               "points": [point.to_dict() for point in points], "complete": complete,
               "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    files.write(folder / RESULT, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


def _print(points: Sequence[Point], title: str) -> None:
    """The table, and MLPerf's scenarios below it."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    power = any(math.isfinite(point.watts) for point in points)
    for column in ("precision", "batch", "images/sec", "p50 ms", "p90", "p99", "GiB", *["J/image", "W"] * power):
        table.add_column(column, justify="left" if column == "precision" else "right")
    for point in points:
        latency = (f"{value:.2f}" if value else "" for value in (point.p50, point.p90, point.p99))
        energy = (f"{point.joules_per_image:.4f}", f"{point.watts:.0f}") if power else ()
        table.add_row(point.precision, f"{point.batch:,}", f"{point.images_per_sec:,.1f}", *latency,
                      f"{point.memory_gib:.1f}", *energy)
    console = Console(highlight=False)
    console.print(table)
    for name, scenario in scenarios(points).items():
        console.print(f"{name}: {scenario}")
