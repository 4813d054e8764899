"""scripts/multi_host.sh: what it asks horovodrun for, in a SLURM job too, and what it refuses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "multi_host.sh"


@pytest.fixture
def run_script(tmp_path):
    """Runs it with a stand-in for Python that prints its arguments, and SLURM's scontrol for nodes a and b."""
    for name, body in (("python", 'shift 2; printf "%s|" "$@"'), ("scontrol", 'printf "a\\nb\\n"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHON": str(tmp_path / "python"), **variables,
                       "PATH": f"{tmp_path}:{os.environ['PATH']}"}  # fmt: skip
        return subprocess.run(["bash", SCRIPT, *map(str, arguments)], capture_output=True, text=True, env=environment)

    return run


def asked(done: subprocess.CompletedProcess[str]) -> tuple[list[str], list[str]]:
    """Arguments of horovodrun, and of `python -m train.launch` behind them."""
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()[-1].rstrip("|").split("|")
    place = words.index("train.launch")
    return words[: place - 2], words[place + 1 :]


def test_hosts(run_script):
    run, train = asked(run_script("-H", "node1:8,node2:4", "-b", 96, "--config", "resnet50_90ep", "--data", "a folder"))
    assert run == ["--gloo", "-np", "12", "-H", "node1:8,node2:4"]
    assert train == ["-b", "96", "--config", "resnet50_90ep", "--data", "a folder"]
    run, train = asked(run_script("-p", "dgx_h100", "-H", "node1:8", "-n", 2, "--ssh-port", 99))
    assert run == ["--gloo", "-np", "2", "--ssh-port", "99", "-H", "node1:8"]
    assert train == ["-b", "400"]


def test_slurm(run_script):
    run, _ = asked(run_script(SLURM_JOB_NODELIST="[a-b]", SLURM_GPUS_ON_NODE="4"))
    assert run == ["--gloo", "-np", "8", "-H", "a:4,b:4"]


def test_elastic(run_script, tmp_path):
    hosts = tmp_path / "hosts.sh"
    hosts.write_text("#!/bin/sh\nprintf 'a:2\\nb:3\\n'\n")
    hosts.chmod(0o755)
    run, _ = asked(run_script("--host-discovery-script", hosts, "--min-np", 2, "--blacklist-cooldown-range", 10, 60))
    assert run == ["--gloo", "-np", "5", "--host-discovery-script", str(hosts), "--min-np", "2",
                   "--blacklist-cooldown-range", "10", "60"]  # fmt: skip


@pytest.mark.parametrize("arguments, sentence", [
    ([], "error: which machines? give -H HOST:GPUS,HOST:GPUS or run inside a SLURM job"),
    (["-H", "a,b"], "error: -H needs HOST:GPUS,HOST:GPUS..., not 'a,b'"),
    (["-H"], "error: -H needs a value behind it"),
    (["-H", "a:2", "-n", "two"], "error: -n needs a whole number above 0, not 'two'"),
    (["--host-discovery-script", "/nowhere/x"], "error: the host discovery script /nowhere/x is not there"),
])  # fmt: skip
def test_mistakes(arguments, sentence, run_script):
    done = run_script(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(sentence)
    assert len(done.stderr.splitlines()) == 1
