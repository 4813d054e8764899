"""Plug-ins in a run of two processes: both load them, process 0 calls its callbacks, and their requests end both."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from several_processes import LIMIT, SCRIPT, Run, needs_horovod, python_path

from train import checkpoint

pytestmark = [needs_horovod, pytest.mark.long]

SOURCE = '''
    import os
    import numpy as np
    import nvidia.dali.fn as fn
    from mxnet.gluon import nn
    from train.plugins import augmentation, callback, metric, model

    RANK = os.environ.get("HOROVOD_RANK")

    @model
    def small(num_classes):
        net = nn.HybridSequential()
        net.add(nn.Conv2D(8, 3, strides=2, activation="relu"), nn.GlobalAvgPool2D(), nn.Dense(num_classes))
        return net

    @augmentation
    def dark(images, random):
        return fn.brightness_contrast(images, brightness=random[0])

    @metric
    def truth(probabilities, labels):
        return probabilities[np.arange(len(labels)), labels]

    @callback
    class Told:
        def on_run_start(self, run):
            self.run = run
            print("rank", RANK, "of", run.num_processes, flush=True)

        def on_epoch_end(self, epoch, metrics):
            print("epoch", epoch, "truth" in metrics, flush=True)
            EPOCH

        def on_checkpoint(self, path):
            SAVED
'''


def run(folder: Path, data: Path, *options: object) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), "-n", "2", "--device", "cpu", *map(str, options)]
    if "--resume" not in options:
        command += ["--data", str(data), "--image-size", "32", "-b", "2", "--epochs", "3", "--num-threads", "1",
                    "--no-tensorboard", "--warmup-epochs", "0", "--learning-rate", "0.1", "--validate-every", "1",
                    "--output", str(folder)]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": python_path(light=True)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT)


def source(epoch: str = "pass", saved: str = "pass") -> str:
    return SOURCE.replace("EPOCH", epoch).replace("SAVED", saved)


def test_stopped_and_resumed(plugin: Callable[..., Path], tiny_data: Path, tmp_path: Path) -> None:
    file, folder = plugin(source("return f'epoch {epoch} is enough'")), tmp_path / "run"
    done = run(folder, tiny_data, "--plugin", file, "--model", "small", "--augment", "dark")
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2" in done.stdout and "rank 1" not in done.stdout
    assert "epoch 1 True" in done.stdout and "epoch 2 True" not in done.stdout
    assert "stopped by a callback: epoch 1 is enough" in done.stdout
    first = checkpoint.load(checkpoint.find(str(folder)))
    assert first.progress.epoch == 1 and len(first.loader_states) == 2
    again = run(folder, tiny_data, "--resume", folder)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count(f"plug-in {file}, as ") == 1  # printed by one of them
    assert "stopped by a callback: epoch 2 is enough" in again.stdout
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if '"epoch"' in line]
    values = [row["plugin_metrics"]["truth"] for row in rows if row["event"] == "epoch"]
    assert len(values) == 2 and all(0 < value < 1 for value in values)


def test_stopped_between_two_steps(plugin: Callable[..., Path], tiny_data: Path, tmp_path: Path) -> None:
    file = plugin(source(saved="self.run.stop('full')"))
    done = run(tmp_path / "run", tiny_data, "--plugin", file, "--model", "small", "--checkpoint-minutes", "1e-9")
    assert done.returncode == 0 and "stopped by a callback: full" in done.stdout, done.stderr
    assert checkpoint.load(checkpoint.find(str(tmp_path / "run"))).progress.step < 6


def test_a_callback_that_fails_ends_both(plugin: Callable[..., Path], tiny_data: Path, tmp_path: Path) -> None:
    file = plugin(source("self.no_such"))
    done = run(tmp_path / "run", tiny_data, "--plugin", file, "--model", "small")
    line = 1 + file.read_text().splitlines().index("        self.no_such")
    assert done.returncode == 2 and "is saved; fix that, then resume with" in done.stdout
    assert done.stderr.count(f"error: the callback Told failed at {file}:{line}: AttributeError: ") == 1, done.stderr


@pytest.mark.parametrize("text", ["1 / 0", "if RANK == '1': 1 / 0"])
def test_a_file_that_fails_ends_both(text: str, plugin: Callable[..., Path], tiny_data: Path, tmp_path: Path) -> None:
    file = plugin(f"import os\nRANK = os.environ['HOROVOD_RANK']\n{text}\n")
    done = run(tmp_path / "run", tiny_data, "--plugin", file)
    assert done.returncode == 2, done.stdout + done.stderr
    if "RANK" not in text:
        assert done.stderr.count(f"the plug-in failed at {file}:3: ZeroDivisionError: division by zero") == 1


def test_an_elastic_run_that_loses_a_process(plugin: Callable[..., Path], start: Callable[..., Run]) -> None:
    """In each session the first process calls on_run_start, and the loss of a process is not the end of the run."""
    file = plugin(source().replace("SAVED", "pass") + "\n        def on_run_end(self, reason):\n"
                                                      "            print('end', reason, flush=True)\n")
    run = start(2, "--min-np", "1", "--plugin", str(file))
    run.wait_for(lambda: run.last_step() >= 3)
    os.kill(run.workers()[1], signal.SIGKILL)
    run.wait_for(lambda: len(run.events("session")) == 2)
    done = len(run.events("steps"))
    run.wait_for(lambda: len(run.events("steps")) >= done + 2)
    run.process.terminate()
    code, out, err = run.end()
    assert code == 128 + signal.SIGTERM, err
    assert re.findall(r"rank \d of \d|^end .*", out, re.MULTILINE) == ["rank 0 of 2", "rank 0 of 1", "end signal"]
