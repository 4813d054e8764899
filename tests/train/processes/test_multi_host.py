"""scripts/multi_host.sh: its call of horovodrun, also in a SLURM job, and the input it refuses."""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ProgramError, UserError
from common.program import words_of
from train.processes import multi_host
from train.processes.invocation import LAUNCHER_VARIABLE

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "multi_host.sh"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Calls the program with fake versions of horovodrun and of SLURM's scontrol, which names nodes a and b. Returns
    the arguments of horovodrun, and of `python -m train.processes.launch` after them."""
    (tmp_path / "scontrol").write_text('#!/bin/sh\nprintf "a\\nb\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(LAUNCHER_VARIABLE, "")  # restored afterwards
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    words: list[str] = []
    monkeypatch.setattr(multi_host, "horovodrun", lambda arguments: words.extend(arguments) or 0)

    def ask(*arguments: object) -> tuple[list[str], list[str]]:
        words.clear()
        assert multi_host.main([*map(str, arguments)]) == 0
        place = words.index(sys.executable)
        word, *passed = words_of(words[place:])
        assert word == "launch"
        return words[:place], passed

    return ask


@pytest.fixture
def discovery(tmp_path):
    """A host discovery script that prints these lines."""

    def build(lines: str) -> Path:
        script = tmp_path / "hosts.sh"
        script.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
        script.chmod(0o755)
        return script

    return build


def test_script_and_platform(tmp_path):
    """The platform's options come first, so that the user's options override them."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    fake.chmod(0o755)
    command = ["bash", SCRIPT, "-p", "dgx_h100", "-H", "node1:8", "-b", "32", "--data", "a folder"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHON": str(fake)})
    assert done.stdout == "-m|train.processes.multi_host|-b|400|-H|node1:8|-b|32|--data|a folder|"


def test_hosts(asked):
    run, train = asked("-H", "node1:8,node2:4", "-b", 96, "--config", "resnet50_90ep", "--data", "a folder")
    assert run == ["--gloo", "-np", "12", "-H", "node1:8,node2:4"]
    assert train == ["-b", "96", "--config", "resnet50_90ep", "--data", "a folder"]
    assert asked("-H", "node1:1,node2:4,node1:1")[0][2:] == ["6", "-H", "node1:2,node2:4"]
    run, _ = asked("-H", "node1:8", "-n", 2, "--ssh-port", 99)
    assert run == ["--gloo", "-np", "2", "--ssh-port", "99", "-H", "node1:8"]
    assert os.environ[LAUNCHER_VARIABLE] == "scripts/multi_host.sh -n 2 --ssh-port 99 -H node1:8"


def test_slurm(asked, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "[a-b]")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    run, _ = asked()
    assert run == ["--gloo", "-np", "8", "-H", "a:4,b:4"]


def test_elastic(asked, discovery, capsys):
    hosts = discovery("a:2\\nb:3\\n")
    run, _ = asked("--host-discovery-script", hosts, "--min-np", 2, "--blacklist-cooldown-range", 10, 60)
    assert run == ["--gloo", "-np", "5", "--host-discovery-script", str(hosts), "--min-np", "2",
                   "--blacklist-cooldown-range", "10", "60"]
    assert "waiting" not in capsys.readouterr().out
    asked("--host-discovery-script", hosts, "--min-np", 2, "-n", 6)
    assert f"waiting for 6 processes; {hosts} names 5 so far" in capsys.readouterr().out
    run, _ = asked("--host-discovery-script", discovery("a:2\\n"), "--network-interface", "eth0")
    assert run[:3] == ["--gloo", "-np", "2"]


@pytest.mark.parametrize("arguments, sentence", [
    ([], "which machines? give -H HOST:GPUS,HOST:GPUS or run inside a SLURM job"),
    (["-H", "a:2,b"], "-H must name machines as HOST:GPUS, not 'b'"),
    (["-H"], "-H/--hosts needs a value"),
    (["-H", "a:2", "--epochs", "-1"], "needs a whole number above 0, not '-1'"),
    (["-H", "a:2", "--batchsize", "8"], "batchsize"),
    (["-H", "a:2", "-n", "two"], "-n/--processes needs a whole number above 0, not 'two'"),
    (["-H", "a:2,b:2", "-n", "5"], "-n 5 is more than the 4 processes of the machines; lower it"),
    (["-H", "a:2", "--min-np", "1"], "an elastic run over machines needs two of them to begin"),
    (["--host-discovery-script", "/nowhere/x"], "the host discovery script /nowhere/x is not there"),
    (["--host-discovery-script", "/usr"], "the host discovery script /usr is not there or not executable"),
    (["-H", "a:2", "--max-np", "1"], "--max-np and --blacklist-cooldown-range are for elastic runs"),
    (["-H", "a:2,b:2", "--min-np", "3", "--max-np", "2"], "--min-np 3 is more than --max-np 2; lower it"),
    (["-H", "a:2,b:2", "--min-np", "1", "--blacklist-cooldown-range", "5", "2"], "goes from 5 to 2 seconds"),
])
def test_mistakes(arguments, sentence, asked):
    with pytest.raises(UserError) as error:
        asked(*arguments)
    assert sentence in str(error.value)


def test_output_that_nobody_reads(tmp_path):
    """Output that nobody reads does not end a run; it goes to standard error."""
    (tmp_path / "horovod").mkdir()  # a horovodrun that starts nothing
    for name, content in (("__init__", ""), ("runner/__init__", ""), ("runner/gloo_run", ""),
                          ("runner/common/__init__", ""), ("runner/common/util/__init__", ""),
                          ("runner/common/util/timeout", "TimeoutException = TimeoutError"),
                          ("runner/launch", "run_commandline = lambda: print('started')")):
        path = tmp_path / "horovod" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
                   "PYTHON": sys.executable}  # so that no Horovod is compiled
    command = [sys.executable, "-m", "train.processes.multi_host", "-H", "localhost:2", "--data", "synthetic"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    first, *lines = done.stderr.splitlines()
    assert done.returncode == 0 and first.startswith("standard output cannot be written any more (No space left"), lines
    assert lines[0].startswith("horovodrun --gloo -np 2 -H localhost:2 ") and lines[1:] == ["started"]


def test_no_machine_yet(asked, discovery):
    with pytest.raises(UserError, match=r"needs two of them to begin, or --network-interface, but there are 0"):
        asked("--host-discovery-script", discovery(""), "--min-np", 1)


def test_a_script_that_fails_or_names_nobody(asked, discovery):
    script = discovery("")
    with pytest.raises(UserError, match="names no machine yet; give -n, the number of processes to"):
        asked("--host-discovery-script", script, "--network-interface", "lo")
    script.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(UserError, match="hosts.sh failed with exit code 3"):
        asked("--host-discovery-script", script, "--min-np", 1)


def test_a_script_is_found_wherever_it_lies(asked, discovery, tmp_path, monkeypatch, capsys):
    """A discovery script is found by a bare name in the current folder, and in a folder with a space in its name. The
    printed command can be pasted into a shell."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    discovery("a:2\\nb:3\\n").rename(folder / "hosts.sh")
    monkeypatch.chdir(folder)
    run, _ = asked("--host-discovery-script", "hosts.sh", "--min-np", 2)
    assert run[:4] == ["--gloo", "-np", "5", "--host-discovery-script"] and run[4] == f"'{folder}/hosts.sh'"
    printed = shlex.split(capsys.readouterr().out)
    assert printed[: 1 + len(run)] == ["horovodrun", *run]
    again = shlex.split(os.environ[LAUNCHER_VARIABLE])[1:]
    assert asked(*again)[0] == run


def test_slurm_that_does_not_answer(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "[a-b]")
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(UserError, match=r"SLURM does not tell the machines of this job \(.*exit status 1"):
        asked()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"SLURM does not tell .*No such file.*; give -H HOST:GPUS"):
        asked()


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_time_to_save(monkeypatch):
    """Horovod's processes give the run's processes more than 5 s to end."""
    safe_shell_exec = pytest.importorskip("horovod.runner.common.util.safe_shell_exec")
    monkeypatch.setattr(safe_shell_exec, "GRACEFUL_TERMINATION_TIME_S", 5)
    runpy.run_module("train.processes.multi_host", run_name="__mp_main__")
    assert safe_shell_exec.GRACEFUL_TERMINATION_TIME_S == multi_host.SECONDS_TO_SAVE == 60


@pytest.mark.parametrize("error, code, words", [
    # the process itself has printed the user's mistake
    (RuntimeError("one of them:\nProcess name: 1\nExit code: 2\n"), 2, ""),
    (RuntimeError("one of them:\nProcess name: 1\nExit code: 7\n"), 7, "error: process 1 failed with exit code 7"),
    (RuntimeError("one of them:\nProcess name: 3\nExit code: 137\n"), 137,
     "error: process 3 was killed by SIGKILL, as the kernel does when the machine's memory runs out, so the run ends"),
])
def test_last_words(error, code, words, monkeypatch, capsys):
    runner = pytest.importorskip("horovod.runner.launch")

    def fail():
        raise error

    monkeypatch.setattr(runner, "run_commandline", fail)
    monkeypatch.setattr(sys, "argv", ["horovodrun"])
    assert multi_host.horovodrun(["-np", "4"]) == code
    told = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(told) == bool(words)
    assert all(line.startswith(words) for line in told)


def test_unreachable_machine(monkeypatch):
    runner = pytest.importorskip("horovod.runner.launch")

    def fail():
        raise RuntimeError("could not connect to some hosts via ssh")

    monkeypatch.setattr(runner, "run_commandline", fail)
    monkeypatch.setattr(sys, "argv", ["horovodrun"])
    with pytest.raises(ProgramError, match="could not connect to some hosts via ssh; see that ssh to each"):
        multi_host.horovodrun([])
