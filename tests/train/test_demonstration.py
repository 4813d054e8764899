"""The demonstration's length, which follows the machine's speed, and the commands that it ends with."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.environment import ROOT
from pipelines.samples import make_samples
from train import checkpoint, demonstration
from train.command_line import read
from train.commands import session
from train.config import Config, configure
from train.options.run import DEFAULT_PRESET
from train.presets import load_preset
from train.processes.distributed import Workers

NUM_IMAGES = 1800


class TimedExecutor:
    """Trains nothing, but takes a given time."""

    input_shapes = {"data": (32, 4, 4, 3), "softmax_label": (32,)}  # noqa: RUF012
    params: dict[str, Any] = {}  # noqa: RUF012
    grads: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
        self.now, self.seconds = 100.0, list(seconds)
        monkeypatch.setattr(demonstration, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(demonstration, "make_optimizer", lambda *_: SimpleNamespace(step=lambda rate: None))

    def forward_backward(self, data: Any, label: Any) -> None:
        assert (data.shape, label.shape) == ((32, 4, 4, 3), (32,))
        self.now += self.seconds.pop(0)

    def get_params(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def set_params(self, params: Any, aux: Any) -> None: ...
    def read_metrics(self) -> None: ...
    def synchronize(self) -> None: ...


@pytest.mark.parametrize(("seconds", "epochs", "expected"), [
    ((5.0, 0.4, 0.3, 0.16), 8, "200 images/sec in a trial: 8 epochs of 1,800 images are about 0:01:12"),
    ((0.1, 0.01, 0.01, 0.01), 10, "3200 images/sec in a trial: 10 epochs of 1,800 images are about 0:00:06"),
    ((9.0, 1.0, 1.0, 2.0), 3, "32 images/sec in a trial: 3 epochs of 1,800 images are about 0:02:49"),
])
def test_epochs_follow_the_speed(
    seconds: tuple[float, ...], epochs: int, expected: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The demonstration has as many epochs as take 75 s, from 3 to 10. The first step, which includes set-up, and slow
    outliers do not count."""
    executor: Any = TimedExecutor(monkeypatch, *seconds)
    found = demonstration.fit(Config(batch_size=32, epochs=10), executor, NUM_IMAGES, Workers())
    assert found == Config(batch_size=32, epochs=epochs)
    assert capsys.readouterr().out == f"{expected} (--epochs takes another number)\n"


def test_the_slowest_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes: this one computes 200 images/sec, the other 100, and this one waits for it."""
    executor: Any = TimedExecutor(monkeypatch, 1.0, 0.16, 0.16, 0.16)
    workers: Any = SimpleNamespace(size=2, rank=1, sum=lambda rates: [rates[0] + 100.0, rates[1]])
    found = demonstration.fit(Config(batch_size=32, epochs=10), executor, NUM_IMAGES, workers)
    assert found.epochs == round(75 * 2 * 100 / NUM_IMAGES)


@pytest.mark.parametrize(("options", "expected"), [
    ({}, True), ({"seed": 3}, True), ({"epochs": 10}, False), ({"max_steps": 4}, False), ({"time_limit": 1.0}, False),
    ({"data": "/images"}, False), ({"config": "overfit_100"}, False),
])
def test_what_leaves_the_length_open(options: dict[str, Any], expected: bool) -> None:
    preset = load_preset(options.get("config", DEFAULT_PRESET))
    assert demonstration.is_one(configure(options, preset), options) == expected


@pytest.mark.long
def test_the_choice_is_recorded_and_changes_nothing_else(
    run_train: Callable[..., tuple[int, str, str]], narrow_network: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run has the bits of a run with that number of epochs given; when resumed, it keeps the number."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "make_samples", lambda folder: make_samples(folder, num_train=2, num_val=1))
    monkeypatch.setattr(demonstration, "SECONDS", 1e-6)
    options = ["--model", "resnet18", "--batch-size", "8", "--device", "cpu", "--num-threads", "1", "--no-tensorboard"]
    code, out, err = run_train("--output", "chosen", *options)
    assert code == 0, err
    assert out.startswith("preset cpu_sample: up to 10 epochs at 32 pixels ")
    assert re.search(r"^\d+ images/sec in a trial: 3 epochs of 24 images are about ", out, re.MULTILINE)
    assert "try next:\n" in out
    assert json.loads(Path("chosen/config.json").read_text())["epochs"] == 3
    assert run_train("--output", "given", *options, "--epochs", "3")[0] == 0
    chosen, given = (checkpoint.load(checkpoint.find(folder)) for folder in ("chosen", "given"))
    assert chosen.progress == given.progress
    for name, array in {**given.params, **given.aux}.items():
        np.testing.assert_array_equal({**chosen.params, **chosen.aux}[name], array, err_msg=name)
    code, out, err = run_train("--resume", "chosen")
    assert code == 0, err
    assert "nothing left to train: epoch 3 of 3 is done" in out and "in a trial" not in out


def test_commands_to_try_next_are_real() -> None:
    """The programs, files and options in them exist."""
    text = demonstration.next_commands(Path("runs/with a blank"))
    commands = [shlex.split(line) for line in text.splitlines()[1:] if not line.startswith("  #")]
    assert len(commands) == 3 and len(text.splitlines()) == 7
    predict, own_data, processes = commands
    assert predict[1:6] == ["-m", "train", "predict", "--checkpoint", "runs/with a blank"]
    assert re.fullmatch(r"data/samples/val/\w+/0000\.jpg", predict[6])
    taken = read(Config, own_data[3:], command="train")
    assert taken == {"config": DEFAULT_PRESET, "data": "data/samples"}
    assert (ROOT / "scripts/dgx1_8gpu.sh").samefile(processes[-3]) and processes[-2:] == ["-n", "2"]


def test_two_processes_are_no_advice_after_two() -> None:
    text = demonstration.next_commands(Path("runs/x"), num_processes=2)
    assert "two processes" not in text and "predict" in text
