"""scripts/multi_host.sh: its call of horovodrun, also in a SLURM job, and the input it refuses."""

from __future__ import annotations

import errno
import os
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import ProgramError, UserError
from common.program import words_of
from train.errors import TrainError
from train.processes import multi_host
from train.processes.invocation import DIGEST_VARIABLE, LAUNCHER_VARIABLE, check_code, code_digest, naming_machine

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "multi_host.sh"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Calls the program with fake versions of horovodrun and of SLURM's scontrol, which names nodes a and b. Returns
    the arguments of horovodrun, and of `python -m train.processes.launch` after them."""
    (tmp_path / "scontrol").write_text('#!/bin/sh\nprintf "a\\nb\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for variable in (LAUNCHER_VARIABLE, DIGEST_VARIABLE):
        monkeypatch.setenv(variable, "")  # restored afterwards
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    words: list[str] = []
    monkeypatch.setattr(multi_host, "horovodrun", lambda arguments, hosts, port: words.extend(arguments) or 0)

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
    (["-H", "a:2,b:2", "-n", "5"], "-n 5 is more than the 4 processes of the machines; lower -n"),
    (["-H", "a:2", "--min-np", "1"], "an elastic run over machines needs two machines to begin"),
    (["--host-discovery-script", "/nowhere/x"], "the host discovery script /nowhere/x is not there"),
    (["--host-discovery-script", "/usr"], "the host discovery script /usr is not there or not executable"),
    (["-H", "a:2", "--max-np", "1"], "--max-np and --blacklist-cooldown-range are for elastic runs"),
    (["-H", "a:2,b:2", "--min-np", "3", "--max-np", "2"], "--min-np 3 is more than --max-np 2; lower --min-np"),
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
                          ("runner/common/util/safe_shell_exec", "execute = None"),
                          ("runner/util/__init__", ""), ("runner/util/remote", ""), ("runner/driver/__init__", ""),
                          ("runner/driver/driver_service", "get_local_interfaces = None"),
                          ("runner/util/network", "filter_local_addresses = lambda names: []"),
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
    with pytest.raises(UserError, match=r"needs two machines to begin, or --network-interface, but there are 0"):
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
    (RuntimeError("one of them:\nProcess name: 1\nExit code: 7\n"), 7, "error: process 1 on a failed with exit code 7"),
    (RuntimeError("one of them:\nProcess name: 3\nExit code: 137\n"), 137,
     "error: process 3 on b was killed by SIGKILL, as the kernel does when the machine's memory runs out, so the run"),
    (RuntimeError("one of them:\nProcess name: 2\nExit code: 255\n"), 255,
     "error: process 2 on b was killed, or its connection to this machine was lost, so the run ends"),
    (RuntimeError("one of them:\nProcess name: b[1]\nExit code: 7\n"), 7,
     "error: process 1 on b failed with exit code 7, so the run ends"),
    # another process has already told that it lost the connection to one
    (RuntimeError("one of them:\nProcess name: 1\nExit code: 3\n"), 3, ""),
])
def test_last_words(error, code, words, monkeypatch, capsys):
    runner = pytest.importorskip("horovod.runner.launch")

    def fail():
        raise error

    monkeypatch.setattr(runner, "run_commandline", fail)
    monkeypatch.setattr(multi_host, "unusable", lambda hosts, port: [])
    monkeypatch.setattr(sys, "argv", ["horovodrun"])
    assert multi_host.horovodrun(["-np", "4"], {"a": 2, "b": 2}, None) == code
    told = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(told) == bool(words)
    assert all(line.startswith(words) for line in told)


def test_machine_lost_in_mid_run(monkeypatch, capsys):
    """A process that has lost the connection to another one cannot know that a machine is lost; the launcher can."""
    runner = pytest.importorskip("horovod.runner.launch")
    found: list[list[str]] = [[], ["machine b cannot be reached (No route to host)"]]

    def fail():
        raise RuntimeError("one of them:\nProcess name: 0\nExit code: 3\n")

    monkeypatch.setattr(runner, "run_commandline", fail)
    monkeypatch.setattr(multi_host, "unusable", lambda hosts, port: found.pop(0))
    monkeypatch.setattr(sys, "argv", ["horovodrun"])
    assert multi_host.horovodrun([], {"a": 2, "b": 2}, None) == 3
    assert "error: machine b cannot be reached (No route to host), so the run ends; its" in capsys.readouterr().err


@pytest.mark.parametrize("answer, words", [
    ("exec sh -c \"$last\"", ""),
    ("echo 0123abcd", "machine node.invalid has other code in "),
    ("echo 'Permission denied (publickey).' >&2; exit 255", "machine node.invalid cannot be reached (Permission"),
    ("echo 'sh: python: not found' >&2; exit 127", "machine node.invalid cannot start the project (sh: python: not"),
    ("exit 1", "machine node.invalid cannot start the project (exit code 1)"),
])
def test_machines_are_checked(answer, words, tmp_path, monkeypatch):
    """A machine that cannot take part is refused with its name, before anything is started."""
    pytest.importorskip("horovod.runner.launch")
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nfor last; do :; done\n{answer}\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    faults = multi_host.unusable(["localhost", "node.invalid"], 22)
    assert len(faults) == bool(words)
    if words:
        assert faults[0].startswith(words)
        with pytest.raises(ProgramError, match="each machine needs ssh without a password from here, and "):
            multi_host.horovodrun([], {"node.invalid": 1}, None)


def test_network_interface_of_a_single_machine(monkeypatch):
    """Other machines may join later, so 127.0.0.1 is not chosen where the user names an interface."""
    driver_service = pytest.importorskip("horovod.runner.driver.driver_service")
    remote = pytest.importorskip("horovod.runner.util.remote")
    monkeypatch.setattr(driver_service, "get_local_interfaces", lambda settings: {"lo"})
    monkeypatch.setattr(remote, "SSH_COMMAND_PREFIX", "ssh")
    monkeypatch.setattr(driver_service, "os", os)
    multi_host._adapt_horovod({"localhost": 1}, None)
    assert driver_service.get_common_interfaces(SimpleNamespace(nics={"eth7"}), ["localhost"], []) == {"eth7"}
    assert driver_service.get_common_interfaces(SimpleNamespace(nics=None), ["localhost"], []) == {"lo"}
    assert "ServerAliveInterval=5" in remote.get_ssh_command("true", "b")


def test_machine_lost_while_interfaces_are_sought():
    """Horovod's own exit at this point is a thread's, and says nothing."""
    pytest.importorskip("horovod.runner.driver.driver_service")
    program = ("from train.processes import multi_host; from horovod.runner.driver import driver_service\n"
               "multi_host.unusable = lambda hosts, port: ['machine b cannot be reached (x)']\n"
               "multi_host._adapt_horovod({'b': 2}, None); driver_service.os._exit(255)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == ("error: machine b cannot be reached (x), while the run was starting: start it again "
                                   "with the same command")


def test_errors_name_their_machine(monkeypatch):
    """In a run over several machines the error of one process names its machine, and other code is refused."""
    monkeypatch.setenv("HOROVOD_HOSTNAME", "b")
    monkeypatch.delenv(DIGEST_VARIABLE, raising=False)
    check_code()
    with pytest.raises(ProgramError, match="^no room$"), naming_machine():
        raise ProgramError("no room")
    monkeypatch.setenv(DIGEST_VARIABLE, code_digest())
    check_code()
    with pytest.raises(OSError, match="No space .*'/data on b'"), naming_machine():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data")
    with pytest.raises(TrainError, match="^of all$"), naming_machine():
        raise TrainError("of all", on_all_ranks=True)
    monkeypatch.setenv(DIGEST_VARIABLE, "0123abcd")
    with pytest.raises(UserError, match="^on b: the code in "), naming_machine():
        check_code()


@pytest.mark.parametrize("is_deaf", [False, True])
def test_end_with_output(is_deaf):
    """A process without a launcher on its machine ends when nobody reads its output any more, whatever it does."""
    program = (f"import signal, time; from train.processes import guard; guard.SECONDS_TO_SAVE = 1\n"
               f"signal.signal(signal.SIGTERM, signal.{'SIG_IGN' if is_deaf else 'SIG_DFL'})\n"
               "guard.end_with_output(); print('here', flush=True); time.sleep(60)")
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "here\n"
    process.stdout.close()
    assert process.wait(30) == -(signal.SIGKILL if is_deaf else signal.SIGTERM)


def test_output_that_ends_first():
    """The small process that watches the output ends with its process, so that the reader sees the end of it."""
    program = "from train.processes import guard; guard.end_with_output(); print('here')"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "here\n")
