"""The time that training waits for checkpoints, in this checkout and in another one, alternating, on the CPU.

    git worktree add ../other COMMIT
    python benchmarks/checkpoints_cpu.py ../other

A ResNet-50 trains on small random images, so that epochs are short and checkpoints have their full size (parameters
and momentum, 180 MiB). A plug-in asks for a checkpoint at the end of each epoch, by the signal SIGUSR1; another one
follows the last epoch. Writes results/checkpoints_cpu.jsonl, with a line for each run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image
from record import RESULTS, ROOT, run
from trainings import command

from common.command_line import Positive, read_options
from common.environment import hardware, versions
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


def measure(checkout: Path, arguments: Options, folder: Path) -> dict[str, Any]:
    """Train in `folder` with the program of a checkout. Returns the run's seconds, those in which training waited for
    checkpoints, one by one, and its images/sec."""
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
    lines = map(json.loads, (run_folder / METRICS_FILE).read_text().splitlines())
    waits = [line["seconds"] for line in lines if line["event"] == "phase" and line["name"] == "checkpoint"]
    return {"commit": record.git_commit, "run_seconds": record.seconds, "percent": 100 * sum(waits) / record.seconds,
            "checkpoints": sum(event["event"] == "checkpoint" for event in record.events), "wait_seconds": waits,
            "images_per_sec": record.speed().mean}


def main() -> None:
    arguments = read_options(Options)
    checkouts = {"this": ROOT, "other": arguments.other.resolve()}
    about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "epochs": arguments.epochs,
             "steps": arguments.steps, "batch": arguments.batch, "hardware": hardware(), "versions": versions()}
    rows: list[dict[str, Any]] = []
    for _ in range(arguments.turns):
        for name, checkout in checkouts.items():
            with tempfile.TemporaryDirectory() as folder:
                rows.append({"checkout": name, **measure(checkout, arguments, Path(folder))})
            print(json.dumps(rows[-1]), flush=True)
    for name in checkouts:
        found = [row for row in rows if row["checkout"] == name]
        print(f"{name}: training waits {statistics.median(row['percent'] for row in found):.2f} % of a run, "
              f"{statistics.median(row['run_seconds'] for row in found):.1f} s (medians of {len(found)} runs)")
    (RESULTS / "checkpoints_cpu.jsonl").write_text("".join(json.dumps(about | row) + "\n" for row in rows))


if __name__ == "__main__":
    run(main)
