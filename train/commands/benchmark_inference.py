"""The speed of inference, by batch size and precision: `python -m train benchmark --inference`.

A pass starts with a batch in the device's memory and ends with the class probabilities in the host's memory. Throughput
(images/sec) is measured with consecutive passes: the host fetches the results of one pass while the device computes the
next pass. Latency is the time of a pass that runs alone. Each point begins with a warm-up, and several batches
alternate. The images are noise. The time does not depend on the images, but the power does, so the images differ.

Two figures have MLPerf Inference's names (arXiv:1911.02549, table III): single stream is the 90th percentile of the
latency of batch 1, offline the largest throughput. An MLPerf submission needs more: the data set, its accuracy,
LoadGen's queries and longer runs.
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
from train.options.run import DeviceOptions, PluginOptions, RunOptions
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
NUM_BATCHES, POOL = 6, 64  # batches that alternate, and images from which they are made
WARM_UP_SECONDS, SECONDS = 3.0, 3.0  # minimum duration for each of a point's two figures
CPU_SECONDS = 1.0  # value of both on a CPU, whose clock rises at once and whose passes take long
LONGER = 4
LEAST_LATENCIES, LEAST_PASSES = 10, 5  # a 90th percentile needs 10 latencies
INT8 = "int8"
CALIBRATION_SIZE = 64  # pixels; the scales do not depend on the size
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
RESULT, PLOT = "inference.json", "inference.png"

# Options that may be given with --inference, which uses neither data nor training.
TAKEN = {"inference", "int8", "batch_sizes", "num_classes",
         *(field.name for part in (RunOptions, PluginOptions, NetworkOptions, SizeOptions, DeviceOptions)
           for field in fields(part))}


def measure_inference(values: Mapping[str, Any], workers: Workers) -> None:
    """Measure all points. Each point is written to inference.json as soon as it is measured, so no point is lost if the
    program is killed. The table and the plot show all points. Raises UserError and StoppedBySignal.
    """
    if workers.size > 1:
        raise TrainError("--inference measures one GPU: use python -m train benchmark --inference", on_all_ranks=True)
    for name in values.keys() - TAKEN:
        way_out = "give --batch-sizes" if name == "batch_size" else "leave it out"
        raise TrainError(f"{option_name(name)} has no effect with --inference, which measures the network alone: "
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
        raise TrainError("--int8 needs a GPU for the cuda executor, and there is none here: for INT8 on a CPU, export "
                         "the network for ONNX Runtime (python -m train export --int8 onnxruntime)")
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
    """The precisions of the executor, by their names in tables; only the given precision if --dtype is given."""
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
    """Yield the points of one precision, from the smallest batch up. Prints the results, and the sizes that do not fit
    into memory. One cuda executor serves all sizes, because it also accepts smaller batches. Other executors are built
    for each size. `seconds`: the time for each part of a point, instead of the default. The throughput gets LONGER
    times as much time if its median is not known to 1 % after `seconds`.
    """
    shared: Executor | None = None
    fitting = list(sizes)
    if placement.executor == "cuda":
        shared, fitting = _largest(precision, config, placement, num_classes, sizes)
    try:
        for batch in fitting:
            executor = shared or _build(precision, config, placement, num_classes, batch)
            if executor is None:  # a larger batch would not fit either
                return
            try:
                point = measure(executor, precision, images(config, placement, batch), seconds)
            except (CapacityError, TransientError):  # kernels need further memory; the points measured so far are kept
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
    """The executor for the largest size that fits into memory, and the sizes that this executor accepts."""
    for count in range(len(sizes), 0, -1):
        if executor := _build(precision, config, placement, num_classes, sizes[count - 1]):
            return executor, list(sizes[:count])
    return None, []


def _build(precision: str, config: Config, placement: Placement, num_classes: int, batch: int) -> Executor | None:
    """The executor of a network with initial values; None, with a printed note, if the batch does not fit."""
    # The backbone is frozen because executors also reserve memory for training. If only the classifier trains, training
    # needs a tenth of the memory.
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


_untrained = cache(partial(untrained, image_size=CALIBRATION_SIZE))  # the network is made once for all batch sizes


def _left_out(precision: str, batch: int) -> str:
    return f"{precision}, batch {batch:,}: left out, there is no room for it in memory"


def images(config: Config, placement: Placement, batch: int) -> list[Any]:
    """Batches of noise on the device, in the loader's format."""
    dtype, channels = batch_form(config, placement)
    size, rng = config.image_size, np.random.default_rng(config.seed)
    pool = np.zeros((min(POOL, NUM_BATCHES * batch), size, size, channels), dtype)
    pool[..., :3] = rng.standard_normal((*pool.shape[:3], 3), np.float32)
    context = mx.gpu(0) if placement.device.startswith("gpu") else mx.cpu()
    # A batch that is larger than the pool contains every image of the pool, so two alternating batches are enough.
    starts = range(NUM_BATCHES if batch <= POOL else 2)
    return [mx.nd.array(pool[(start * batch + np.arange(batch)) % len(pool)], context, dtype) for start in starts]


def measure(executor: Executor, precision: str, batches: Sequence[Any], seconds: float | None = None) -> Point:
    """Measure a point of the sweep. Raises ProgramError if the network did not return probabilities."""
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
    if not (len(answer) == batch and np.abs(sums - 1).max() < 0.01):  # 16-bit rounding causes a tenth of this
        raise ProgramError(f"inference in {precision} at batch {batch} gave no probabilities: an image's outputs add "
                           f"up to {np.min(sums):g} to {np.max(sums):g}; that point is not published")
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
    """GiB in use: on the GPU by all programs; without a GPU, by this process."""
    return readings.memory if math.isfinite(readings.memory) else psutil.Process().memory_info().rss / 2**30


def _about(config: Config, num_classes: int, placement: Placement) -> dict[str, Any]:
    """The metadata in inference.json."""
    return {"name": "inference", "model": config.model, "image_size": config.image_size, "num_classes": num_classes,
            "executor": placement.executor, "hardware": environment.hardware(), "versions": environment.versions(),
            "commit": environment.git_commit(), "command": command_line()}


def _write(folder: Path, points: Sequence[Point], about: Mapping[str, Any], complete: bool) -> None:
    """Write inference.json with these points; `complete`: `points` are all points. Raises UserError if the file cannot
    be written.
    """
    content = {**about, "scenarios": {name: asdict(scenario) for name, scenario in scenarios(points).items()},
               "points": [point.to_dict() for point in points], "complete": complete,
               "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    files.write(folder / RESULT, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


def _print(points: Sequence[Point], title: str) -> None:
    """Print the table of points, and below it the results for MLPerf's scenarios."""
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
