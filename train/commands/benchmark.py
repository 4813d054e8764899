"""The command `benchmark`: measures the speed of training steps, or of inference (`benchmark_inference`). Steps are
repeated until the speed is known well enough.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from common.command_line import part_of
from train import devices
from train.build import build_executor, check_memory, class_weights, join_bn_group, open_split
from train.commands.benchmark_inference import measure_inference
from train.commands.profile import write_profile
from train.commands.session import measure_loader, name_preset, open_recorder, prepare, report, run_folder_of
from train.config import Config, check_plugged, configure
from train.errors import TrainError
from train.loop import Trainer, frozen_heap
from train.options.commands import Measurement
from train.options.data import SYNTHETIC
from train.processes.distributed import Workers
from train.recording.recorder import Recorder
from train.timing import PRECISION, standard_error_of_median


class Result(NamedTuple):
    step_ms: float  # median
    sentence: str


def main(values: Mapping[str, Any]) -> None:
    """Measure the speed and report it. Raises UserError."""
    if values.get("inference"):
        measure_inference(values, Workers())
        return
    if "batch_sizes" in values:
        raise TrainError("--batch-sizes is for --inference: add --inference, or give --batch-size", on_all_ranks=True)
    if values.get("int8"):
        raise TrainError("--int8 is for --inference, as training computes in floats: add --inference, or leave out "
                         "--int8", on_all_ranks=True)
    workers, wanted = Workers(), part_of(Measurement, values)
    with workers.agreement():
        default = devices.default_config(values, workers.local_rank)
        # With progressive resizing, steps of several image sizes would be mixed.
        config = configure(values, replace(default, first_image_size=0, resize_epochs=(0.0, 0.0)))
        check_plugged(config)
        name_preset(config, values, workers)
        run_folder = run_folder_of(config)
        placement = prepare(config, workers)
        if wanted.profile:
            _check_profile(config, placement)
        bn_group = join_bn_group(config, placement, workers)
        loader = open_split(config, "train", placement, workers)
        check_memory(config, len(loader.class_names), loader.config.size_in(0), placement)
        executor = build_executor(config, len(loader.class_names), loader.config.size_in(0), placement, None,
                                  not workers.alone, bn_group, class_weights=class_weights(config, loader))
        trainer = Trainer(config, workers, executor, loader, None, run_folder, None)
    trainer.join()
    with workers.agreement():
        recorder = open_recorder(trainer, num_epochs=None, warmup_steps=wanted.warmup_steps)
    with recorder:
        with trainer.monitoring(recorder), frozen_heap():
            result = benchmark(trainer, recorder, wanted)
        recorder.say(result.sentence)
        if wanted.profile and workers.rank == 0:
            recorder.say(write_profile(run_folder / "profile.txt", executor, result.step_ms))
        if config.data != SYNTHETIC:
            with recorder.phase("loader alone"):
                recorder.loader_speed(measure_loader(loader, workers))
    report(recorder, run_folder)


def _check_profile(config: Config, placement: devices.Placement) -> None:
    """Raise TrainError if the single operators of a step cannot be measured."""
    if config.bn_group > 1:
        raise TrainError(f"--profile measures one GPU alone, but with --bn-group {config.bn_group} a GPU waits for "
                         "other GPUs; leave out --profile or --bn-group")
    if placement.executor != "cuda":
        raise TrainError(f"--profile measures the kernels of the cuda executor, but the executor of this run is "
                         f"{placement.executor}: leave out --profile")


def benchmark(trainer: Trainer, recorder: Recorder, wanted: Measurement) -> Result:
    """Repeat training steps until their median time is known well enough.

    The measurement ends when the standard error of the median is below 1 %, or at a limit in `wanted`. A step's time is
    measured between the ends of two steps, so it includes everything that the loop does (`Recorder.stop_clock`).
    """
    most = wanted.warmup_steps + wanted.limit_steps
    recorder.begin_epoch(0, most)
    batches = recorder.timed(itertools.chain.from_iterable(itertools.repeat(trainer.train_loader)))
    times: list[float] = []  # duration of each step in seconds
    error, done = math.inf, False
    start = last_end = time.perf_counter()
    while not done:
        trainer.step(batches)
        recorder.stop_clock(trainer.executor.idle_seconds)
        now = time.perf_counter()
        times.append(now - last_end)
        last_end = now
        counted = times[wanted.warmup_steps :]
        if len(counted) >= wanted.min_steps:
            error = standard_error_of_median(counted) / float(np.median(counted))
        over = now - start > 60 * wanted.limit_minutes
        (done,) = trainer.workers.vote([error < PRECISION or (over and len(counted) >= 2)])
        done |= trainer.state.progress.step == most
        trainer.end_step(recorder, read_now=done)
        if trainer.is_stuck:
            raise trainer.stuck()

    median = float(np.median(times[wanted.warmup_steps :]))
    speed = trainer.config.global_batch(trainer.workers.size) / median
    recorder.reason = "measured"
    recorder.event("benchmark", median_step_ms=1e3 * median, images_per_sec=speed, relative_error=error)
    result = f"median step {1e3 * median:.1f} ms = {speed:.1f} images/sec"
    if error < PRECISION:
        sentence = f"{result}, standard error of the median {error:.2%}"
    elif math.isinf(error):
        sentence = f"{result}; ended at its limit, before the {wanted.min_steps} steps that an error estimate needs"
    else:
        sentence = (
            f"{result}; ended at its limit with a standard error of the median of {error:.2%}, more than the 1 % wanted"
        )
    return Result(1e3 * median, sentence)
