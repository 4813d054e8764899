"""A newcomer's first run, on the built-in sample set: the length of the run suits the machine, and the program suggests
commands to try next.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from common.environment import ROOT
from common.mxnet_compat import mx
from common.program import LAUNCH, TRAIN, is_console, start_of
from graph_passes.executors import Executor
from pipelines.options import SAMPLES
from pipelines.samples import SAMPLES_FOLDER
from train.config import Config
from train.optimizer import make_optimizer
from train.options.run import DEFAULT_PRESET
from train.processes.distributed import Workers
from train.processes.invocation import script

SECONDS = 75.0  # seconds of training steps: how long a newcomer should wait
# 3 epochs reach 70 % top-1 (two seeds; 5 epochs: 87 %); a slow machine takes longer instead of training fewer epochs
FEWEST_EPOCHS = 3
MEASURED_STEPS = 3
PICTURE = SAMPLES_FOLDER / "val" / "rings" / "0000.jpg"


def is_one(config: Config, values: Mapping[str, Any]) -> bool:
    """Whether the run is the demonstration, and no length was given. `values`: the options that were given."""
    is_open = values.keys().isdisjoint(("epochs", "max_steps", "time_limit"))
    return config.config == DEFAULT_PRESET and config.data == SAMPLES and is_open


def fit(config: Config, executor: Executor, num_images: int, workers: Workers) -> Config:
    """Set the epochs to the number that this machine trains in `SECONDS`: at least `FEWEST_EPOCHS`, at most
    `config.epochs`; print the choice. A collective operation before training, which restores the executor's state."""
    params, aux = executor.get_params()
    optimizer = make_optimizer(executor, config)
    images = np.random.default_rng(0).standard_normal(executor.input_shapes["data"], np.float32)
    data, label = mx.nd.array(images), mx.nd.zeros(len(images))

    def step() -> float:
        start = time.perf_counter()
        executor.forward_backward(data, label)
        optimizer.step(0.0)
        executor.synchronize()
        return time.perf_counter() - start

    step()  # the first step includes all set-up
    seconds = min(step() for _ in range(MEASURED_STEPS))
    executor.set_params(params, aux)
    executor.read_metrics()
    # Together the processes run at the rate of the slowest, because the others wait for it.
    rates = [config.batch_size * config.accumulate / seconds * (rank == workers.rank) for rank in range(workers.size)]
    rate = workers.size * min(workers.sum(rates))
    epochs = min(max(round(SECONDS * rate / num_images), FEWEST_EPOCHS), config.epochs)
    if workers.rank == 0:
        expected = timedelta(seconds=round(epochs * num_images / rate))
        print(f"{rate:.0f} images/sec in a trial: {epochs} epochs of {num_images:,} images are about {expected} "
              "(--epochs takes another number)", flush=True)
    return replace(config, epochs=epochs)


def next_commands(run_folder: Path, num_processes: int = 1) -> str:
    """Commands to try after a run with this many processes. The commands work unchanged in the shell that started this
    process, and contain a placeholder for the user's own data.
    """
    train = start_of(TRAIN)
    commands = [
        ("a picture of your own, in place of this one", f"{train} predict --checkpoint "
         f"{shlex.quote(str(run_folder))} {PICTURE}"),
        ("images of your own: a folder that has a folder for each class, in place of this one",
         f"{train} --config {DEFAULT_PRESET} --data {SAMPLES_FOLDER}"),
    ]
    if num_processes == 1 and (is_console() or (ROOT / "scripts").is_dir()):
        commands.append(("two processes, which average their gradients", f"{script(LAUNCH)} -n 2"))
    return "\n".join(["try next:", *(line for what, command in commands for line in (f"  # {what}", f"  {command}"))])
