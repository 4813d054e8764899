"""Training from JPEGs against the same training on synthetic data, alternating; and PyTorch for comparison.

    PEER_PYTHON=/path/to/python-with-torch python benchmarks/step_jpeg.py [--data FOLDER]

Writes results/<model>_fp16_b<batch>_jpeg_1gpu.json; its peer is our own step on synthetic data. The .jsonl file of that
name has lines for both steps, with the GPU's idle time, power and clock (a GPU at its power limit lowers its clock);
for our loader alone; and for PyTorch's training step fed by its DataLoader (peer_pytorch.py; eager, as even this step
is faster than the loader). With `--auto-augment` the name is <model>_fp16_b<batch>_jpeg_<policy>_1gpu, and PyTorch's
line is for its DataLoader alone, with equal transforms. Ours are the steps of `python -m train`: the loader, the
executor and the optimizer of the preset resnet50_90ep with all gammas 1, through `Trainer.step`. The images are those
of loader_gpu.py. Each measurement begins with three seconds of warm-up. Step times come from CUDA events, one after
each step. Nothing is written if the timed steps did not train.

`--sweep` instead measures how much the loader slows the step down with other settings, each alternating with synthetic
data, and writes the results to results/<model>_fp16_b<batch>_jpeg_settings.jsonl.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from loader_gpu import repeated_records, write_lines
from record import SAMPLE, Peer, check_trained, flags, rounded, run, write_result
from step_gpu import WARM_UP_SECONDS, loss_scale
from torch_peer import TorchPeer, take_turns

from common.command_line import Positive, read_options
from graph_passes.executors.cuda.executor import CudaExecutor
from pipelines import Batch, Loader, open_loader
from pipelines.bench import time_loader
from pipelines.dali_loader import DaliLoader
from pipelines.progress import num_cores
from pipelines.sources import open_source
from train import devices
from train.build import build_executor, open_split
from train.config import Config
from train.loop import Trainer, frozen_heap
from train.options.data import SYNTHETIC
from train.presets import load_preset
from train.processes.distributed import Workers
from train.recording.gpu_monitor import GpuReadings

GPU_READINGS = ("power", "clock", "power_capped")  # units: train/recording/gpu_monitor.py
NUM_CORES = num_cores()
LOADER_SECONDS = 3.0  # measuring time of the loader alone


def endless(loader: Loader) -> Iterator[Batch]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


class TimedSteps(NamedTuple):
    """Timed steps in a row, without warm-up."""

    step_ms: list[float]
    idle_share: float  # fraction of the time in which the GPU waited for batches
    gpu: GpuReadings  # mean values


def measure(trainer: Trainer, batches: Iterator[Batch], steps: int) -> TimedSteps:
    executor = trainer.executor
    assert isinstance(executor, CudaExecutor) and trainer.monitor
    gpu = executor.gpu
    events = [gpu.timing_event() for _ in range(steps + 1)]
    idle = 0.0
    with frozen_heap():
        begin = time.monotonic()
        while time.monotonic() - begin < WARM_UP_SECONDS:
            trainer.step(batches)
        executor.read_metrics()  # drop the warm-up's metrics
        scale_before = loss_scale(executor)
        trainer.monitor.take()  # start new readings for the timed steps
        trainer.step(batches)  # not timed, as the GPU waits for it; later steps are queued ahead
        gpu.record(events[0])
        for number, end in enumerate(events[1:]):
            trainer.step(batches)
            idle += executor.idle_seconds or 0.0 if number else 0.0  # `idle_seconds` belongs to the previous step
            gpu.record(end)
    executor.synchronize()
    metrics = executor.read_metrics()
    check_trained("ours", [metrics.loss_sum / metrics.count], [scale_before, loss_scale(executor)])
    times = [gpu.elapsed_ms(start, end) for start, end in itertools.pairwise(events)]
    return TimedSteps(times, 1e3 * idle / sum(times), trainer.monitor.take())


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    data: Path = SAMPLE
    """Class folders with JPEGs."""
    model: str = "resnet50"
    """A network that torchvision has, too."""
    batch: Positive = 256
    """Images per step."""
    steps: Positive = 80
    """Timed steps in each round."""
    rounds: Positive = 3
    """Rounds; both steps alternate."""
    threads: int = 0
    """Threads of our loader; 0: all cores."""
    workers: Positive = NUM_CORES
    """Worker processes of the peer's loader."""
    auto_augment: Literal["none", "trivialaugment", "randaugment"] = "none"
    """Policy of random operations on each image, as in torchvision's transforms."""
    random_erasing: float = 0.0
    """Probability of erasing a rectangle of an image."""
    sweep: bool = False
    """Only measure other settings of the loader."""


def main() -> None:
    arguments = read_options(Options)
    with tempfile.TemporaryDirectory() as folder:
        records = str(repeated_records(arguments.data, Path(folder)))
        config = replace(load_preset("resnet50_90ep"), data=records, model=arguments.model,
                         batch_size=arguments.batch, num_classes=1000, dtype="float16", executor="cuda",
                         num_threads=arguments.threads, zero_init_residual=False,
                         auto_augment=arguments.auto_augment, random_erasing=arguments.random_erasing)
        policy = "" if arguments.auto_augment == "none" else f"_{arguments.auto_augment}"
        training = f"{arguments.model}_fp16_b{arguments.batch}_jpeg{policy}"
        if arguments.sweep:
            sweep(config, Path(folder) / "run", arguments.rounds, arguments.steps, f"{training}_settings")
            return
        lines = run_ours(config, Path(folder) / "run", arguments.rounds, arguments.steps)
    name = f"{training}_1gpu"
    jpeg, synthetic, _ = lines
    write_result(name, jpeg["step_ms"], arguments.batch, Peer("our synthetic step", synthetic["step_ms"]),
                 jpeg["power"], jpeg["clock"])
    lines = [with_speed(line, arguments.batch) for line in lines]
    write_lines(name, lines)
    if "PEER_PYTHON" in os.environ:
        write_lines(name, [*lines, with_speed(run_peer(arguments), arguments.batch)])


def run_peer(arguments: Options) -> dict[str, Any]:
    """Measure PyTorch's training from JPEGs; with a policy, its loader alone. Returns the peer's name and times."""
    options = flags(arguments, "data", "workers", "batch", "auto_augment", "random_erasing")
    alone = arguments.auto_augment != "none"
    training = ["--model", arguments.model, "--steps", str(5 * arguments.workers)]
    peer = TorchPeer(*options, *(["--loader-only"] if alone else training))
    turn = peer.measure("eager")
    peer.close()
    if alone:
        return {"name": turn["name"], "step_ms": rounded(turn["step_ms"])}
    check_trained(turn["name"], [turn["loss"]], turn["loss_scales"])
    # Batches come in bursts, one of each worker, so each time is the mean over one burst.
    stretches = np.reshape(turn["step_ms"], (-1, arguments.workers)).mean(axis=1)
    return {"name": turn["name"], "step_ms": rounded(list(map(float, stretches)))}


def with_speed(line: dict[str, Any], batch: int) -> dict[str, Any]:
    """Add images/sec to a result line, and print them."""
    images_per_sec = batch * 1e3 / statistics.median(line["step_ms"])
    text = f"{line['name']}: {images_per_sec:,.0f} images/sec"
    if "idle_share" in line:
        text += f", the GPU waited {line['idle_share']:.1%} of the time, "
        text += f"{line['power']:.0f} W at {line['clock']:,.0f} MHz"
    print(text)
    return {**line, "images_per_sec": images_per_sec}


def start_trainer(config: Config, run_folder: Path) -> tuple[Trainer, Loader]:
    """Build a trainer and its loader."""
    workers = Workers()
    placement = devices.choose(config, 0)
    loader = open_split(config, "train", placement, workers)
    executor = build_executor(config, config.num_classes, config.image_size, placement, None, False)
    trainer = Trainer(config, workers, executor, loader, None, run_folder, None)
    assert trainer.monitor
    trainer.monitor.start()
    return trainer, loader


def start(config: Config, run_folder: Path) -> tuple[Trainer, Loader, Loader]:
    """Build a trainer, its loader of JPEGs, and a loader of synthetic data."""
    trainer, loader = start_trainer(config, run_folder)
    synthetic = open_split(replace(config, data=SYNTHETIC), "train", devices.choose(config, 0), trainer.workers)
    return trainer, loader, synthetic


def run_ours(config: Config, run_folder: Path, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Measure ours: result lines for the steps from JPEGs, the steps on synthetic data, and the loader alone."""
    trainer, loader, synthetic = start(config, run_folder)
    turns = take_turns(rounds, {
        f"JPEG, hw_decoder_load {loader.config.hw_decoder_load}": partial(measure, trainer, endless(loader), steps),
        "synthetic": partial(measure, trainer, endless(synthetic), steps)})
    loader.close()
    trainer.executor.close()
    alone = time_loader(DaliLoader(loader.config, (0, 1), open_source(loader.config.data, "train")), LOADER_SECONDS)
    return [
        {"name": f"ours, {name}", "step_ms": rounded([ms for turn in found for ms in turn.step_ms]),
         "idle_share": statistics.fmean(turn.idle_share for turn in found),
         **{what: statistics.fmean(getattr(turn.gpu, what) for turn in found) for what in GPU_READINGS}}
        for name, found in turns.items()
    ] + [{"name": "our loader alone", "step_ms": rounded(alone.step_ms)}]


def sweep(config: Config, run_folder: Path, rounds: int, steps: int, name: str) -> None:
    """Time the step with other settings of the loader, alternating with synthetic data; print and write the results."""
    trainer, first, synthetic = start(config, run_folder)
    default, generated = first.config, endless(synthetic)
    first.close()
    settings: list[dict[str, Any]] = [
        *({"hw_decoder_load": load} for load in (0.5, 0.65, 0.8, 0.9, 0.95, 1.0)),
        *({"num_threads": threads, "hw_decoder_load": load} for threads in (4, 8) for load in (0.8, 1.0)),
        *({"prefetch": depth, "hw_decoder_load": 1.0} for depth in (2, 4)),
    ]
    lines: list[dict[str, Any]] = []
    for number in range(1, rounds + 1):
        for changes in settings:
            with open_loader(replace(default, **changes)) as loader:
                turn = measure(trainer, endless(loader), steps)
            alone = measure(trainer, generated, steps // 2)
            medians = statistics.median(turn.step_ms), statistics.median(alone.step_ms)
            print(f"turn {number} {changes}: {medians[0]:.2f} ms (mean {statistics.fmean(turn.step_ms):.2f}), "
                  f"{medians[1] / medians[0]:.1%} of synthetic ({medians[1]:.2f}), waited {turn.idle_share:.1%}, "
                  f"{turn.gpu.power:.0f} W at {turn.gpu.clock:,.0f} MHz ({alone.gpu.clock:,.0f})", flush=True)
            lines.append({"turn": number, "num_threads": default.num_threads, "prefetch": default.prefetch, **changes,
                          "step_ms": rounded(turn.step_ms),
                          "synthetic_ms": rounded(alone.step_ms), "idle_share": turn.idle_share,
                          **{what: getattr(turn.gpu, what) for what in GPU_READINGS}})
            write_lines(name, lines)


if __name__ == "__main__":
    run(main)
