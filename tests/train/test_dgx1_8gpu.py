"""scripts/dgx1_8gpu.sh: what it passes on, what it refuses, and a run of two processes on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from train import checkpoint

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "dgx1_8gpu.sh"
needs_horovod = pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed (no g++ at set-up)")


@pytest.fixture
def fake_python(tmp_path):
    """A program in place of Python that prints its arguments."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    fake.chmod(0o755)
    return fake


def run_script(*arguments: object, python: object = sys.executable, **environment: str):
    return subprocess.run(
        ["bash", SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=180,
        env={**os.environ, "PYTHON": str(python), **environment},
    )  # fmt: skip


def test_options_are_passed_on(fake_python):
    done = run_script("-n", 4, "-b", 96, "-e", 3, "--config", "cpu_sample", "--data", "a folder", python=fake_python)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        "-m|train.launch|4|--batch-size|96|--epochs|3|--config|cpu_sample|--data|a folder|"
    )


def test_environment_is_printed_and_may_be_given(fake_python):
    assert "OMP_NUM_THREADS=3\n" in run_script(python=fake_python, OMP_NUM_THREADS="3").stdout
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(["bash", SCRIPT, "-n", "1"], capture_output=True, text=True,
                          env={**environment, "PYTHON": str(fake_python)})  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    assert f"OMP_NUM_THREADS={cores}\n" in done.stdout


@pytest.mark.parametrize("arguments, sentence", [
    (["-n"], "error: -n needs a number behind it"),
    (["-n", "0"], "error: -n needs a whole number above 0, not '0'"),
    (["-b", "many"], "error: -b needs a whole number above 0, not 'many'"),
    (["-e", "1.5"], "error: -e needs a whole number above 0, not '1.5'"),
])  # fmt: skip
def test_mistakes(arguments, sentence, fake_python):
    done = run_script(*arguments, python=fake_python)
    assert done.returncode == 2
    assert done.stderr.startswith(sentence)
    assert len(done.stderr.splitlines()) == 1


def test_missing_python():
    done = run_script("-n", 2, python="/nowhere/python")
    assert done.returncode == 2
    assert done.stderr == "error: there is no Python at /nowhere/python: run make setup, or set PYTHON\n"


def test_help():
    done = run_script("-h", python="/nowhere/python")
    assert done.returncode == 0
    assert "-b  images per process" in done.stdout
    assert "set -euo" not in done.stdout


@needs_horovod
def test_mistake_in_two_processes_is_told_once(tiny_options):
    done = run_script("-n", 2, *tiny_options, "--data", "/nowhere", MXNET_MKLDNN_ENABLED="1")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "/nowhere" in errors[0]
    assert "Traceback" not in done.stderr


@needs_horovod
def test_sigterm_and_resume_in_two_processes(tiny_options, tmp_path):
    """SIGTERM to the launcher: both processes stop at the same step with a checkpoint; the resumed run ends well."""
    folder = tmp_path / "run"
    environment = {**os.environ, "PYTHON": sys.executable, "MXNET_MKLDNN_ENABLED": "1"}
    process = subprocess.Popen(
        ["bash", SCRIPT, "-n", "2", *tiny_options, "--epochs", "200", "--log-every", "1", "--output", folder],
        stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert process.stdout
    for line in process.stdout:
        if line.startswith("epoch 1/200, step 2"):
            break
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM, rest
    assert f"go on with: python -m train --resume {folder}" in rest
    stopped = checkpoint.load(checkpoint.find(str(folder)))
    assert stopped.progress.step >= 2
    assert len(stopped.loader_states) == 2

    last = stopped.progress.step + 2
    done = run_script("-n", 2, "--resume", folder, "--max-steps", last, MXNET_MKLDNN_ENABLED="1")
    assert done.returncode == 0, done.stderr
    assert checkpoint.load(checkpoint.find(str(folder))).progress.step == last
    config = json.loads((folder / "config.json").read_text())
    assert config["batch_size"] == 4
    first = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in first if line["event"] == "steps"]
    assert rates[0] == pytest.approx(0.5 * 4 * 2 / 256)  # scaled with the global batch
