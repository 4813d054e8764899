"""The launcher: GPUs as reported by NVML (simulated), cores for each process, and the consequences of a process that
dies."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from several_processes import LIMIT

from common.command_line import exit_code_of
from common.program import LAUNCH, own_process
from train.errors import TrainError
from train.processes import launch, topology
from train.processes.invocation import LAUNCHER_VARIABLE, is_of_several, script
from train.processes.pulse import Activity
from train.processes.signals import SAME_SECONDS, STOPPED_EARLY

GIB = 2**30


class FakeNvml:
    """The part of pynvml that is used: GPUs given as dicts."""

    NVML_NVLINK_MAX_LINKS = 18
    NVML_FEATURE_ENABLED = 1

    class NVMLError(Exception):
        pass

    def __init__(self, *gpus: dict) -> None:
        self.gpus = gpus

    def nvmlInit(self):
        if not self.gpus:
            raise self.NVMLError("driver not loaded")

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for gpu in self.gpus:
            if gpu["uuid"] == uuid:
                return gpu
        raise self.NVMLError("not found")

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(free=gpu.get("free", 140) * GIB, total=141 * GIB)

    def nvmlDeviceGetCpuAffinity(self, gpu, num_words):
        if "cores" not in gpu:
            raise self.NVMLError("not supported")
        words = [0] * num_words
        for core in gpu["cores"]:
            words[core // 64] |= 1 << core % 64
        return words

    def nvmlDeviceGetNvLinkState(self, gpu, link):
        if link >= gpu.get("links", 18):
            raise self.NVMLError("no such link")
        return 1

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return [SimpleNamespace(pid=pid) for pid in gpu.get("pids", ())]

    def nvmlDeviceGetName(self, gpu):
        return gpu.get("name", "NVIDIA H200")


@pytest.fixture
def machine(monkeypatch):
    """Sets what NVML reports, the cores that this process may use and CUDA_VISIBLE_DEVICES; returns the GPUs."""

    def build(*gpus: dict, allowed=range(192), visible=None):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
        monkeypatch.setattr(os, "cpu_count", lambda: 192)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return topology.read_gpus(FakeNvml(*({"uuid": f"GPU-{i}", **gpu} for i, gpu in enumerate(gpus))))

    return build


def test_gpus(machine):
    first, second = machine({"cores": range(96), "pids": [17]}, {"cores": range(96, 192), "links": 0, "free": 3})
    assert first == ("0", "NVIDIA H200", 140 * GIB, 141 * GIB, frozenset(range(96)), 18, (17,))
    assert second.cores == frozenset(range(96, 192))
    assert str(second) == "NVIDIA H200, 3.0 of 141.0 GiB free, no NVLink"


def test_no_driver(machine):
    assert machine() == []


def test_visible_devices(machine):
    gpus = machine({"name": "a"}, {"name": "b"}, {"name": "c"}, visible="2,GPU-0")
    assert [(gpu.visible, gpu.name) for gpu in gpus] == [("2", "c"), ("GPU-0", "a")]
    assert [gpu.visible for gpu in machine({}, {}, visible="1, -1,0")] == ["1"]
    assert machine({}, visible="") == machine({}, visible="-1") == []
    for wrong in ("3", "GPU-9"):
        with pytest.raises(TrainError, match=f"CUDA_VISIBLE_DEVICES names .*{wrong}.*; correct it"):
            machine({}, {}, {}, visible=wrong)


def test_cores_beside_the_gpu(machine):
    """GPUs on one NUMA node share its cores evenly; only allowed cores count."""
    node0, node1 = {"cores": range(96)}, {"cores": range(96, 192)}
    gpus = machine(node0, node0, node0, node1, allowed=[*range(7), *range(100, 104)])
    shares = topology.assign_cores(gpus, 4)
    assert [topology.format_cores(cores) for cores in shares] == ["0-1", "2-3", "4-6", "100-103"]


def test_cores_without_affinity(machine):
    """A container may forbid all cores beside a GPU: then its process gets a share of the available ones."""
    gpus = machine({"cores": range(96, 192)}, {}, allowed=range(4))
    assert topology.assign_cores(gpus, 2) == [{0, 1}, {2, 3}]
    assert topology.assign_cores([], 3) == [{0}, {1}, {2, 3}]
    shares = topology.assign_cores([], 9)
    assert len(shares) == 9
    assert all(len(cores) == 1 for cores in shares)


def test_format_cores():
    assert topology.format_cores(frozenset([9, 0, 1, 2, 8, 5])) == "0-2,5,8-9"


def test_checks(machine):
    gpus = machine({}, {"free": 100, "pids": [4, 5]}, {"links": 0}, {"free": 1, "pids": [9]}, {"name": "NVIDIA A100"})
    assert topology.check(gpus, 1) == []
    (in_use,) = topology.check(gpus, 2)
    assert in_use.startswith("GPU 1 is in use by another program (processes 4, 5)")
    assert "NVLink" in topology.check(gpus, 3)[1]
    with pytest.raises(TrainError, match=r"GPU 3 has only 1.0 of 141.0 GiB free \(processes 9\): end the programs"):
        topology.check(gpus, 4)
    with pytest.raises(TrainError, match="-n 6 needs 6 GPUs, but there are only 5"):
        topology.check(gpus, 6)
    assert "the GPUs differ" in topology.check([gpus[0], gpus[4]], 2)[0]


def test_plan(machine, monkeypatch):
    gpus = machine({"cores": range(0, 8)}, {"cores": range(8, 16)}, {"cores": range(0, 8)}, allowed=range(16))
    monkeypatch.setattr(topology, "read_gpus", lambda: gpus)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    slots, notes = launch.plan(None, on_cpu=False)
    assert notes == []
    assert [topology.format_cores(slot.cores) for slot in slots] == ["0-3", "8-15", "4-7"]
    assert slots[1].environment == {"OMP_NUM_THREADS": "8", "RESNET_CORES": "8", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                                    "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert slots[1].environment["OMP_NUM_THREADS"] == "3"
    assert str(slots[1]) == "process 1: GPU 1 (NVIDIA H200, 140.0 of 141.0 GiB free, 18 NVLinks), cores 8-15"
    on_cpu, _ = launch.plan(None, on_cpu=True)
    assert len(on_cpu) == launch.MAX_PROCESSES
    assert not any(slot.bound for slot in on_cpu)
    assert "CUDA_DEVICE_ORDER" not in on_cpu[0].environment
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(topology, "read_gpus", list)
    slots, (note,) = launch.plan(None, on_cpu=False)
    assert len(slots) == 3
    assert note.startswith("no NVIDIA GPU is visible here")


def test_parse():
    own, passed = launch.parse(["benchmark", "-n", "4", "-b", "96", "-e", "3", "--data", "a folder", "-b", "64"])
    assert own.processes == 4
    assert passed == ["benchmark", "--data", "a folder", "--batch-size", "64", "--epochs", "3"]
    _, passed = launch.parse(["predict", "-n", "2", "-b", "8", "--weights", "w", "--", "-x.jpg"])
    assert passed == ["predict", "--weights", "w", "--batch-size", "8", "--", "./-x.jpg"]


@pytest.mark.parametrize("processes", ["2", "1 --min-np 1"])
def test_machine_whose_name_has_no_address(monkeypatch, capsys, processes):
    """The launcher refuses to start, because Gloo would crash."""
    monkeypatch.setattr(socket, "gethostname", lambda: "nobody.invalid")
    monkeypatch.setenv(LAUNCHER_VARIABLE, "")  # restored afterwards
    arguments = ["-n", *processes.split(), "--device", "cpu"]
    assert exit_code_of(lambda: launch.main(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: this machine's name, nobody.invalid, has no address (")
    assert line.endswith("add the line '127.0.0.1 nobody.invalid' to /etc/hosts")


def test_one_process_needs_no_horovod(monkeypatch, capsys):
    called = {}

    def execve(*arguments):
        called.update(execve=arguments)
        raise SystemExit

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setenv(LAUNCHER_VARIABLE, "")  # restored afterwards
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(SystemExit):
        launch.main(["-n", "1", "-b", "32", "--device", "cpu"])
    _, command, environment = called["execve"]
    assert command == own_process("--device", "cpu", "--batch-size", "32")
    assert not [name for name in environment if name.startswith("HOROVOD_")]
    assert environment[LAUNCHER_VARIABLE] == f"{script(LAUNCH)} -n 1"
    assert "python -m resnet_mxnet --device cpu --batch-size 32" in capsys.readouterr().out


def place(monkeypatch, **variables):
    """Horovod's environment variables for the position of a process."""
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("left, what", [
    ({"HOROVOD_SIZE": "2"}, "HOROVOD_SIZE=2 is in the environment, without HOROVOD_RANK and "),
    ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"},
     "HOROVOD_RANK=1 HOROVOD_SIZE=2 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2 is in the environment, without "
     "HOROVOD_GLOO_RENDEZVOUS_ADDR: "),
    ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "x", "HOROVOD_LOCAL_SIZE": "2",
      "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"}, "which do not fit together: "),
])
def test_what_another_run_has_left_in_the_environment(monkeypatch, capsys, left, what):
    place(monkeypatch, **left)
    with pytest.raises(TrainError, match=re.escape(what)) as mistake:
        is_of_several()
    assert str(mistake.value).endswith("unset all of HOROVOD_*, or start the processes with scripts/dgx1_8gpu.sh")
    if "HOROVOD_LOCAL_RANK" in left:
        assert exit_code_of(lambda: launch.main(["-n", "2", "--device", "cpu"])) == 2
        assert what in capsys.readouterr().err


@pytest.mark.long
def test_a_launcher_is_not_elastic_because_another_was(monkeypatch):
    pytest.importorskip("horovod")
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    script = "import sys; from train.processes.distributed import is_elastic; sys.exit(5 * is_elastic())"
    assert launch.launch(launch.plan(2, on_cpu=True)[0], [sys.executable, "-c", script]) == 0


@pytest.mark.parametrize("name, value", [("OMP_NUM_THREADS", "abc"), ("OMP_NUM_THREADS", "4,2"),
                                         ("OMP_NUM_THREADS", "99999"), ("OMP_NUM_THREADS", "0"),
                                         ("HOROVOD_GLOO_TIMEOUT_SECONDS", "abc")])
def test_numbers_in_the_environment(monkeypatch, capsys, name, value):
    """The launcher refuses invalid numbers, because MXNet, OpenMP or Gloo would abort."""
    pytest.importorskip("horovod")
    monkeypatch.setenv(LAUNCHER_VARIABLE, "")  # restored afterwards
    monkeypatch.setenv(name, value)
    assert exit_code_of(lambda: launch.main(["-n", "2", "--device", "cpu"])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {name} is {value!r}: give ") and line.endswith(", or unset it")


def test_an_empty_number_of_threads_is_none(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    slots, _ = launch.plan(1, on_cpu=True)
    assert slots[0].environment["OMP_NUM_THREADS"] == slots[0].environment["RESNET_CORES"]


def test_worker_of_horovodrun_binds_itself(machine, monkeypatch):
    """With a rank in its environment the launcher becomes `python -m train`, bound to the cores beside that rank's
    GPU."""
    gpus = machine({"cores": range(4)}, {"cores": range(4, 8)})
    monkeypatch.setattr(topology, "read_gpus", lambda: gpus)
    place(monkeypatch, HOROVOD_RANK="3", HOROVOD_SIZE="4", HOROVOD_LOCAL_RANK="1", HOROVOD_LOCAL_SIZE="2",
          HOROVOD_GLOO_RENDEZVOUS_ADDR="10.0.0.1")
    called = {}
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: called.update(pid=pid, cores=cores))

    def execve(*arguments):
        called.update(execve=arguments)
        raise SystemExit

    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(SystemExit):
        launch.main(["-b", "32", "--data", "synthetic"])
    assert (called["pid"], called["cores"]) == (0, frozenset(range(4, 8)))
    program, command, environment = called["execve"]
    assert [program, *command[1:]] == own_process("--data", "synthetic", "--batch-size", "32")
    assert environment["RESNET_CORES"] == "4"


@pytest.mark.long(but=["sys.exit(7)*"])
@pytest.mark.parametrize("ending, code, words", [
    ("os.kill(os.getpid(), 9)", 128 + signal.SIGKILL, "was killed by SIGKILL, as the kernel does when the machine's"),
    ("sys.exit(7)", 7, "failed with exit code 7"),
    ("sys.exit(2)", 2, None),  # the process itself has printed the user's mistake
])
def test_last_words(ending, code, words, capfd, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.2)
    script = f"""
import os, sys, time
if os.environ["HOROVOD_RANK"] == "1":
    {ending}
time.sleep(10_000)
"""
    pytest.importorskip("horovod")
    assert launch.launch(launch.plan(2, on_cpu=True)[0], [sys.executable, "-c", script]) == code
    told = capfd.readouterr().err
    if words is None:
        assert told == ""
    else:
        begun, line = told.splitlines()
        assert begun == ""
        assert line.startswith("error: process 1 (pid ")
        assert words in line


@pytest.mark.long
@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["terminal", "launcher"])
def test_ctrl_c_reaches_the_processes(tmp_path, send):
    """Ctrl-C also ends processes that have no handler yet because they are starting, and commands that need none. `kill
    -INT` sends the signal to the launcher only, which passes it on."""
    pytest.importorskip("horovod")
    script = ("import os, pathlib, time; "
              f"pathlib.Path({str(tmp_path)!r}, os.environ['HOROVOD_RANK']).touch(); time.sleep(10_000)")
    starter = ("import sys; from train.processes.launch import launch, plan; "
               "sys.exit(launch(plan(2, on_cpu=True)[0], [sys.executable, '-c', sys.argv[1]]))")
    command = [sys.executable, "-c", starter, script]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE) as launcher:
        wait_until(lambda: len(os.listdir(tmp_path)) == 2)
        send(launcher.pid, signal.SIGINT)
        try:
            assert launcher.wait(LIMIT) == 128 + signal.SIGINT
            assert launcher.stderr
            assert b"error" not in launcher.stderr.read()  # it was asked to stop
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("call", ["launch(slots, command)", "launch_elastic(slots, command, 1)"])
@pytest.mark.parametrize("activity, words", [(Activity.STARTING, f"{STOPPED_EARLY}\n"), (Activity.REPORTING, "")],
                         ids=["early", "late"])
def test_sigterm_while_the_processes_start(tmp_path, call, activity, words):
    """Processes that are starting have no handler yet, so the launcher prints the message; later they print it
    themselves."""
    pytest.importorskip("horovod")
    script = ("import os, pathlib, time; from train.processes.pulse import Activity, pulse; "
              f"pulse.show(Activity({activity:d})); "
              f"pathlib.Path({str(tmp_path)!r}, os.environ['HOROVOD_RANK']).touch(); time.sleep(10_000)")
    starter = ("import sys; from train.processes.launch import *; slots, _ = plan(2, on_cpu=True); "
               f"command = [sys.executable, '-c', sys.argv[1]]; sys.exit({call})")
    with subprocess.Popen([sys.executable, "-c", starter, script], stderr=subprocess.PIPE, text=True) as launcher:
        try:
            wait_until(lambda: len(os.listdir(tmp_path)) == 2)
            launcher.terminate()
            _, err = launcher.communicate(timeout=LIMIT)
        finally:
            launcher.kill()
    assert (launcher.returncode, err) == (128 + signal.SIGTERM, words)


def wait_until(condition):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_processes_stop_with_the_launcher(tmp_path):
    """When a launcher is killed, its processes are asked to stop."""
    pytest.importorskip("horovod")
    script = f"""
import os, pathlib, signal, sys, time
place = pathlib.Path({str(tmp_path)!r}, os.environ['HOROVOD_RANK'])
signal.signal(signal.SIGTERM, lambda number, frame: (place.with_suffix('.stopped').touch(), sys.exit()))
place.touch()
time.sleep(10_000)
"""
    starter = ("import sys; from train.processes.launch import launch, plan; "
               "sys.exit(launch(plan(2, on_cpu=True)[0], [sys.executable, '-c', sys.argv[1]]))")
    with subprocess.Popen([sys.executable, "-c", starter, script]) as launcher:
        wait_until(lambda: len(os.listdir(tmp_path)) == 2)
        launcher.kill()
    wait_until(lambda: {"0.stopped", "1.stopped"} <= set(os.listdir(tmp_path)))


@pytest.mark.long
@pytest.mark.parametrize("call", ["launch(slots, command)", "launch_elastic(slots, command, 1)"])
def test_a_launcher_whose_terminal_is_closed_waits_for_the_processes(tmp_path, call):
    """Programs that wait for the launcher, such as make and containers, would otherwise consider the run finished while
    it saves."""
    pytest.importorskip("horovod")
    script = f"""
import os, pathlib, signal, sys, time
place = pathlib.Path({str(tmp_path)!r}, os.environ['HOROVOD_RANK'])
def save(number, frame):
    time.sleep(1)
    place.with_suffix('.saved').touch()
    sys.exit(128 + number)
signal.signal(signal.SIGHUP, save)
place.touch()
time.sleep(10_000)
"""
    starter = ("import sys; from train.processes.launch import *; slots, _ = plan(2, on_cpu=True); "
               f"command = [sys.executable, '-c', sys.argv[1]]; sys.exit({call})")
    with subprocess.Popen([sys.executable, "-c", starter, script], stderr=subprocess.PIPE, text=True) as launcher:
        try:
            wait_until(lambda: {"0", "1"} <= set(os.listdir(tmp_path)))
            launcher.send_signal(signal.SIGHUP)
            _, err = launcher.communicate(timeout=LIMIT)
        finally:
            launcher.kill()
    assert {"0.saved", "1.saved"} <= set(os.listdir(tmp_path))
    assert (launcher.returncode, err) == (128 + signal.SIGHUP, "")


@pytest.mark.long
@pytest.mark.parametrize("call, number", [
    ("launch(slots, command)", signal.SIGTERM),
    ("launch(slots, command)", signal.SIGINT),
    ("launch_elastic(slots, command, 1)", signal.SIGTERM),
])
def test_second_request_ends_what_ignores_the_first(tmp_path, call, number):
    pytest.importorskip("horovod")
    script = f"""
import os, pathlib, signal, time
place = pathlib.Path({str(tmp_path)!r}, os.environ['HOROVOD_RANK'])
signal.signal({number:d}, lambda number, frame: place.with_suffix('.asked').touch())
place.touch()
while True:
    time.sleep(10_000)
"""
    starter = ("import sys; from train.processes.launch import *; slots, _ = plan(2, on_cpu=True); "
               f"command = [sys.executable, '-c', sys.argv[1]]; sys.exit({call})")
    with subprocess.Popen([sys.executable, "-c", starter, script]) as launcher:
        wait_until(lambda: {"0", "1"} <= set(os.listdir(tmp_path)))
        launcher.send_signal(number)
        wait_until(lambda: {"0.asked", "1.asked"} <= set(os.listdir(tmp_path)))
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                launcher.wait(SAME_SECONDS + 0.2)  # otherwise another one might be first
            launcher.send_signal(number)
            assert launcher.wait(LIMIT) == 128 + number
        finally:
            launcher.kill()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_slowest_to_stop_is_waited_for(capfd, monkeypatch, number):
    """Process 0 writes the report after the others, which were also asked to stop, have ended."""
    pytest.importorskip("horovod")
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.1)
    script = f"""
import os, sys, time
if os.environ["HOROVOD_RANK"] == "0":
    time.sleep(1)
    print("report")
sys.exit({128 + number})
"""
    assert launch.launch(launch.plan(2, on_cpu=True)[0], [sys.executable, "-c", script]) == 128 + number
    assert capfd.readouterr() == ("report\n", "")


def test_too_few_left(capfd):
    """An elastic run with fewer than the minimum number of processes ends at once with a message."""
    pytest.importorskip("horovod")
    script = "import os, time; os.environ['HOROVOD_RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(10_000)"
    slots, _ = launch.plan(3, on_cpu=True)
    assert launch.launch_elastic(slots, [sys.executable, "-c", script], min_processes=3) == 128 + signal.SIGKILL
    begun, line = capfd.readouterr().err.splitlines()
    assert begun == ""
    assert line.startswith("error: process ")
    assert "; 2 are left, but --min-np is 3, so the run ends; " in line
    assert line.endswith("resume with --resume and the run's folder")
