"""scripts/dgx1_8gpu.sh: the arguments it passes on, the input it refuses, and runs of two processes on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from several_processes import LIMIT, needs_horovod, python_path

from common.program import LAUNCH
from train import checkpoint
from train.processes.invocation import script

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "dgx1_8gpu.sh"
# Options of training processes: the trained networks are narrow.
TRAINING = {"PYTHONPATH": python_path(light=True), "MXNET_MKLDNN_ENABLED": "1"}


@pytest.fixture
def fake_python(tmp_path):
    """A program in place of Python that prints its arguments."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    fake.chmod(0o755)
    return fake


def run_script(*arguments: object, python: object = sys.executable, **environment: str):
    return subprocess.run(
        ["bash", SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT,
        env={**os.environ, "PYTHON": str(python), **environment},
    )


def test_arguments_reach_the_launcher(fake_python):
    done = run_script("-n", 4, "--config", "cpu_sample", "--data", "a folder", python=fake_python)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "-m|train.processes.launch|-n|4|--config|cpu_sample|--data|a folder|"


@pytest.mark.parametrize("platform, batch", [("dgx1_v100", 192), ("dgx_a100", 256), ("dgx_h100", 400)])
def test_platform(platform, batch, fake_python):
    """A platform's options come first, so that the user's options override them."""
    done = run_script("-b", 32, "-p", platform, python=fake_python)
    assert done.stdout == f"-m|train.processes.launch|-b|{batch}|-b|32|"


@pytest.mark.parametrize("arguments, sentence", [
    (["-n"], "error: -n/--processes needs a value (see scripts/dgx1_8gpu.sh --help)"),
    (["-n", "0"], "error: -n/--processes needs a whole number above 0, not '0'"),
    (["-b", "many"], "error: -b/--batch-size needs a whole number above 0, not 'many'"),
    (["-e", "1.5"], "error: -e/--epochs needs a whole number above 0, not '1.5'"),
    (["-n", "2", "--min-np", "3"], "error: --min-np 3 is more than the 2 processes"),
    (["--cooldown", "5"], "error: --cooldown is for elastic runs"),
    (["-p", "dgx_9"], "error: there is no platform 'dgx_9'; there are: dgx1_v100 dgx_a100 dgx_h100"),
    (["-p", "../setup"], "error: there is no platform '../setup'; there are: dgx1_v100 dgx_a100 dgx_h100"),
])
def test_mistakes(arguments, sentence):
    done = run_script(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(sentence)
    assert len(done.stderr.splitlines()) == 1


def test_missing_python():
    done = run_script("-n", 2, python="/nowhere/python")
    assert done.returncode == 2
    assert done.stderr == ("error: there is no Python at /nowhere/python: correct PYTHON, or unset it for our own "
                           "environment\n")


def test_help():
    done = run_script("-h")
    assert done.returncode == 0
    assert "--min-np N" in done.stdout


@pytest.mark.long
@needs_horovod
def test_mistake_in_two_processes_is_told_once(tiny_options):
    done = run_script("-n", 2, *tiny_options, "--data", "/nowhere", **TRAINING)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "/nowhere" in errors[0]
    assert "Traceback" not in done.stderr


@pytest.mark.long
@needs_horovod
def test_sigterm_and_resume_in_two_processes(tiny_options, tmp_path):
    """SIGTERM to the launcher: both processes stop at the same step with a checkpoint; the resumed run ends well."""
    folder = tmp_path / "run"
    environment = {**os.environ, "PYTHON": sys.executable, **TRAINING}
    process = subprocess.Popen(
        ["bash", SCRIPT, "-n", "2", *tiny_options, "--epochs", "200", "--log-every", "1", "--output", folder],
        stdout=subprocess.PIPE, text=True, env=environment,
    )
    assert process.stdout
    for line in process.stdout:
        if line.startswith("epoch 1/200, step 2"):
            break
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    assert process.wait(timeout=LIMIT) == 128 + signal.SIGTERM, rest
    assert f"resume with: {script(LAUNCH)} -n 2 --resume {folder}" in rest
    stopped = checkpoint.load(checkpoint.find(str(folder)))
    assert stopped.progress.step >= 2
    assert len(stopped.loader_states) == 2
    assert stopped.params["stem_conv_weight"].shape[0] == 8  # otherwise tests/light has no effect

    last = stopped.progress.step + 2
    done = run_script("-n", 2, "--resume", folder, "--max-steps", last, REPORT="yes", **TRAINING)
    assert done.returncode == 0, done.stderr
    assert checkpoint.load(checkpoint.find(str(folder))).progress.step == last
    config = json.loads((folder / "config.json").read_text())
    assert config["batch_size"] == 4
    report = json.loads((folder / "report" / "report.json").read_text())
    assert report["command"].startswith(f"{script(LAUNCH)} -n 2 --data ")
    first = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in first if line["event"] == "steps"]
    assert rates[0] == pytest.approx(0.5 * 4 * 2 / 256)  # scaled with the global batch
