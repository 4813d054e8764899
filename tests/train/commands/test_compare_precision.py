"""compare-precision on the CPU, which has only float32: the runs, resuming, the tables and the plot."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from several_processes import LIMIT, python_path

from common.command_line import given, to_arguments
from train import models
from train.command_line import read
from train.commands import compare_precision
from train.commands.trainings import check_same
from train.config import Config, configure
from train.errors import TrainError
from train.presets import load_preset
from train.processes.signals import StoppedBySignal
from train.recording.metrics import EpochRow, RunRecord
from train.report import plots

OPTIONS = ["--epochs", "1", "--log-every", "2", "--label-smoothing", "0", "--validate-every", "0"]


@pytest.mark.long
@pytest.mark.usefixtures("narrow_network")
def test_compare_goes_on_where_it_was_stopped(tiny_options, tmp_path, run_train, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", python_path(light=True))
    folder = tmp_path / "compared"
    run = folder / "resnet18_float32"
    code, _, err = run_train(*tiny_options, *OPTIONS, "--dtype", "float32", "--no-tf32", "--max-steps", "2",
                             "--output", run)
    assert code == 0, err
    metrics = run / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:-1]))  # as if it had been killed after its checkpoint: the end is not recorded

    arguments = ["compare-precision", *tiny_options, *OPTIONS, "--max-steps", "4", "--output", folder]
    code, out, err = run_train(*arguments)
    assert code == 0, err
    assert "only float32 is trained here" in out and "mxnet executor" in out
    (row,) = json.loads((folder / "comparison.json").read_text())
    assert (row["model"], row["precision"], row["largest_batch"]) == ("resnet18", "float32", None)
    record = RunRecord.read_jsonl(metrics)
    assert len(record.step_ms) == 4 and len(record.session_starts) == 2
    assert row["images_per_sec"] == pytest.approx(record.speed().mean)
    assert "| resnet18 | float32 | - |" in (folder / "comparison.md").read_text()
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")

    before = metrics.read_bytes()
    code, out, err = run_train(*arguments)
    assert code == 0 and "already complete, skipped" in out, err
    assert metrics.read_bytes() == before

    code, out, err = run_train(*arguments, "--seed", "3")
    assert code == 2 and err == (f"error: the run in {run} was made with --seed 0, but this comparison has 3: "
                                 "give another --output, or the same --seed\n")


@pytest.mark.long(but=["15"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_this_process_alone_stops_the_run(number, tmp_path, monkeypatch):
    """`kill` signals only this process, while a terminal signals both: this process passes the signal on to the run,
    which is a separate process."""
    run = tmp_path / "run.sh"
    run.write_text(f"#!/bin/sh\ntrap 'exit {128 + number}' {number:d}\nsleep 0.5\nkill -{number:d} $PPID\n"
                   "for i in $(seq 30); do sleep 0.1; done\n")
    run.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(run))
    before = signal.signal(number, signal.SIG_DFL)  # a shell's jobs in the background ignore SIGINT, as would the run
    try:
        with pytest.raises(StoppedBySignal, match="^stopped: repeat the command to resume$") as stop:
            compare_precision.run_training(load_preset("cpu_sample"), tmp_path)
    finally:
        signal.signal(number, before)
    assert stop.value.exit_code == 128 + number


@pytest.mark.long
def test_the_run_is_told_to_stop_when_this_process_is_killed(tmp_path):
    run, started, stopped = tmp_path / "run.sh", tmp_path / "started", tmp_path / "stopped"
    run.write_text(f"#!/bin/sh\ntrap 'touch {stopped}; exit' TERM\ntouch {started}\n"
                   "for i in $(seq 100); do sleep 0.1; done\n")
    run.chmod(0o755)
    script = ("import pathlib, sys; from train.commands.compare_precision import *; "
              "sys.executable, folder = sys.argv[1:]; run_training(load_preset('cpu_sample'), pathlib.Path(folder))")
    with subprocess.Popen([sys.executable, "-c", script, run, tmp_path / "run"],
                          env={**os.environ, "PYTHONPATH": python_path()}) as parent:
        _wait_for(started, LIMIT)
        parent.kill()
    _wait_for(stopped, 9)  # after ten seconds the script ends by itself


def _wait_for(file: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < until, f"there is no {file.name}"
        time.sleep(0.02)


def test_options_that_make_a_configuration():
    preset = load_preset("cpu_sample")
    config = Config.from_dict({**preset.to_dict(), "data": "/some where/x", "random_area": [0.25, 0.5],
                               "tensorboard": False, "learning_rate": 1 / 3, "nesterov": True})
    arguments = to_arguments(config, preset)
    assert dataclasses.replace(preset, **given(Config, arguments, prog="train", default=preset)) == config
    assert to_arguments(preset, preset) == []


@pytest.mark.parametrize("options", [[], ["--epochs", "9", "--warmup-epochs", "2"], ["--epochs", "2"]])
@pytest.mark.parametrize("preset", ["overfit_100", "cpu_sample", "resnet50_ffcv_16ep"])
def test_a_run_of_the_comparison_has_its_preset(preset, options):
    default = load_preset(preset)
    config = configure(read(Config, ["--config", preset, *options], command="train"), default)
    arguments = compare_precision.run_arguments(config)
    again = configure(read(Config, arguments, command="train"), default)
    assert again == dataclasses.replace(config, resume="auto")
    assert config.config == preset


@pytest.mark.long
@pytest.mark.usefixtures("narrow_network")
def test_several_networks_on_cifar100(run_train, tmp_path, rng, monkeypatch):
    """The table has a row for each complete run, even if the command ends before the last."""
    monkeypatch.setenv("PYTHONPATH", python_path(light=True))
    data, folder = tmp_path / "cifar-100-python", tmp_path / "compared"
    write_cifar100(data, rng)
    arguments = ["compare-precision", "--config", "cifar100_resnet18", "--models", "resnet18", "resnet34",
                 "--precisions", "float32", "float16", "float32", "--data", data, "--labels", "coarse", "--image-size",
                 "32", "--batch-size", "4", "--device", "cpu", "--num-threads", "1", "--no-tensorboard", "--epochs",
                 "1", "--output", folder]
    done = compare_precision.run_training

    def first_only(config, run):
        if run.name != "resnet18_float32":
            raise TrainError("the disk is full")
        return done(config, run)

    monkeypatch.setattr(compare_precision, "run_training", first_only)
    code, out, err = run_train(*arguments)
    assert code == 2 and err.endswith("error: the disk is full\n")
    assert "== resnet18 in float32 (1 of 2)" in out and "== resnet34 in float32 (2 of 2)" in out
    lines = (folder / "comparison.md").read_text().splitlines()
    assert lines[2] == "1 of 2 runs so far." and lines[-1].startswith("| resnet18 | float32 |")
    monkeypatch.setattr(compare_precision, "run_training", done)

    code, out, err = run_train(*arguments)
    assert code == 0, err
    assert out.count("already complete, skipped") == 1
    assert "so far" not in (folder / "comparison.md").read_text()
    rows = json.loads((folder / "comparison.json").read_text())
    assert [(row["model"], row["precision"], row["num_classes"]) for row in rows] == [
        ("resnet18", "float32", 20), ("resnet34", "float32", 20)]
    assert all(row["evaluated"] == "validation" and 0 <= row["top1"] <= 1 for row in rows)

    code, _, err = run_train(*(word for word in arguments if word not in ("--labels", "coarse")))
    assert code == 2 and "was made with --labels coarse, but this comparison has auto" in err, "which would be fine"


def write_cifar100(folder: Path, rng: np.random.Generator) -> None:
    """Four training images and four validation images, each of another superclass."""
    folder.mkdir()
    for name in ("train", "test"):
        batch = {b"data": rng.integers(0, 256, (4, 3072), np.uint8), b"fine_labels": [5, 6, 7, 8],
                 b"coarse_labels": [0, 1, 2, 3]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


def test_what_a_run_found_in_its_data_is_no_other_setting(tmp_path):
    """When the command is repeated, it has "auto" where the run's configuration has the resolved value."""
    config = load_preset("cpu_sample")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dataclasses.replace(config, first_label="1", labels="fine").to_dict()))
    check_same(config, tmp_path, "comparison")
    with pytest.raises(TrainError, match="was made with --first-label 1, but this comparison has 0"):
        check_same(dataclasses.replace(config, first_label="0"), tmp_path, "comparison")


def test_networks_by_family():
    family = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
    assert models.named(["resnet"]) == family
    assert models.named(["resnet50", "resnet", "resnext50_32x4d"]) == ["resnet50", *(name for name in family if name !=
                                                                       "resnet50"), "resnext50_32x4d"]
    assert models.named(["all"]) == models.names() and models.named([]) == []
    with pytest.raises(TrainError, match="there is no model 'resnet51'; did you mean resnet50"):
        models.named(["resnet", "resnet51"])


def test_a_comparison_of_nothing(run_train, tiny_options):
    code, _, err = run_train("compare-precision", *tiny_options, "--precisions")
    assert code == 2 and err.startswith("error: --precisions needs a value")


def test_table_and_plot_of_two_networks():
    runs = {}
    for model in ("resnet18", "resnet50"):
        for number, precision in enumerate(("float32", "float16"), start=1):
            record = RunRecord(config={}, command="", images_per_step=100, seconds=9.0, step_ms=[1000 / number] * 3)
            record.epochs = [EpochRow(1, 0.1, 100.0, 1.5, 0.5, 1.25, 0.625, 0.875)]
            record.events = [{"event": "memory", "largest_batch": 1000 * number}]
            runs[model, precision] = record
    rows = [compare_precision._row(model, precision, record) for (model, precision), record in runs.items()]
    assert compare_precision._markdown(rows).splitlines()[-1] == (
        "| resnet50 | float16 | 2,000 | 200.0 | 2.00 | 9.0 s | 1.5000 | 62.50% | 87.50% |")
    by_model = {model: {p: runs[model, p] for p in ("float32", "float16")} for model in ("resnet18", "resnet50")}
    assert plots.precisions(by_model, "title").startswith(b"\x89PNG")
    rows = [dataclasses.replace(row, num_classes=5) for row in rows]
    assert compare_precision._markdown(rows).splitlines()[-1].endswith("| 62.50% |"), "top-5 of five is 100 %"
