"""The share of a run that waits for checkpoints: percent of its seconds, with a checkpoint in every epoch, on the CPU.

    python benchmarks/checkpoints_cpu.py ../other             # another checkout, alternating with this one

A ResNet-50 trains on small random images, so that epochs are short and checkpoints have their full size (parameters
and momentum, 180 MiB). A plug-in asks for a checkpoint at the end of each epoch, by the signal SIGUSR1. Writes
results/checkpoints_cpu.json.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from PIL import Image
from record import ROOT, Peer, run, write_result
from trainings import command

from common.command_line import Positive, read_options
from common.errors import ProgramError
from train.recording.metrics import METRICS_FILE, RunRecord

PLUGIN = '''
import os, signal
from train.plugins import callback

@callback
def on_epoch_end(epoch, metrics):
    os.kill(os.getpid(), signal.SIGUSR1)
'''


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    other: Annotated[Path, "FOLDER"]
    """The other checkout, for example of an earlier commit."""
    turns: Positive = 3
    """Runs of each checkout."""
    epochs: Positive = 8
    """Epochs of a run, each with a checkpoint."""
    steps: Positive = 30
    """Steps of an epoch."""
    batch: Positive = 8
    """Images of a step, of 32 pixels."""


def write_images(folder: Path, count: int) -> None:
    """Write `count` random images of 40 pixels in ten class folders."""
    rng = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"class{number % 10}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8)).save(path)


def waiting(checkout: Path, arguments: Options, folder: Path) -> float:
    """Train in `folder` with the program of a checkout. Returns the percentage of the run's seconds in which it waited
    for checkpoints."""
    data, plugin, run_folder = folder / "data", folder / "save_each_epoch.py", folder / "run"
    write_images(data, arguments.batch * arguments.steps)
    plugin.write_text(PLUGIN)
    words = command("--data", data, "--model", "resnet50", "--image-size", 32, "--batch-size", arguments.batch,
                    "--epochs", arguments.epochs, "--optimizer", "sgd", "--validate-every", 0, "--device", "cpu",
                    "--no-tensorboard", "--plugin", plugin, "--output", run_folder)
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ProgramError(f"the run of {checkout} has ended with exit code {done.returncode}: {done.stderr[-1000:]}")
    record = RunRecord.read_jsonl(run_folder / METRICS_FILE)
    saved = [event for event in record.events if event["event"] == "checkpoint"]
    percent = 100 * record.phase_seconds["checkpoint"] / record.seconds
    print(f"{checkout.name}: {percent:.2f} % of {record.seconds:.1f} s, {len(saved)} checkpoints, "
          f"{record.speed().mean:.1f} images/sec", flush=True)
    return percent


def main() -> None:
    arguments = read_options(Options)
    shares: dict[Path, list[float]] = {ROOT: [], arguments.other.resolve(): []}
    for _ in range(arguments.turns):
        for checkout, found in shares.items():
            with tempfile.TemporaryDirectory() as folder:
                found.append(waiting(checkout, arguments, Path(folder)))
    ours, theirs = shares.values()
    write_result("checkpoints_cpu", ours, peer=Peer("written between steps", theirs), unit="% of the run")


if __name__ == "__main__":
    run(main)
