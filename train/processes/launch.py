"""Starts the processes of a run on this machine, one for each GPU: `scripts/dgx1_8gpu.sh`, or
`python -m train.processes.launch`.

As horovodrun does with Gloo, but it checks the GPUs first and binds each process to the cores beside its GPU, the
terminal stays rank 0's (progress bar, no prefixes), signals reach all processes, and the exit code is that of the
process that failed first. Over several machines horovodrun starts `python -m train.processes.launch` in its place
(scripts/multi_host.sh): each process then only binds itself to its cores and becomes `python -m train`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

from common.command_line import Positive, exit_code_of, given_and_rest, given_value
from common.errors import EXIT_USER_ERROR
from train.__main__ import understood
from train.errors import EXIT_LOST_PROCESS, NoHorovodError, TrainError
from train.processes import topology
from train.processes.invocation import LAUNCHER_VARIABLE
from train.processes.signals import handled

_libc = ctypes.CDLL(None)

LOOPBACK = {"HOROVOD_GLOO_IFACE": "lo", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo",
            "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
SCRIPT = "scripts/dgx1_8gpu.sh"  # what users call this program by
MAX_PROCESSES = 8  # without -n: a DGX-1 has 8 GPUs
GRACE_SECONDS = 3.0  # for the others to end by themselves when one process has failed
POLL_SECONDS = 0.05
PR_SET_PDEATHSIG = 1  # of prctl(2)
# Exit codes of processes that have said why they end.
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # as it was asked to
TOLD = (EXIT_USER_ERROR, EXIT_LOST_PROCESS, *STOPPED)


def _seconds(text: str) -> int:
    if not text.isdecimal() or int(text) > 3600:
        raise argparse.ArgumentTypeError(f"needs whole seconds from 0 to 3600, not {text!r}")
    return int(text)


@dataclass(frozen=True)
class LaunchOptions:
    """Train on several GPUs of this machine, or in several processes on a machine without one (Horovod: NCCL or Gloo).

    The learning rate is given for a global batch of 256 images; the program scales it with PROCESSES x BATCH_SIZE.
    python -m train train --help lists its options. The script takes -p NAME too, which stands for the settings of
    scripts/platforms/NAME.sh, and PYTHON=/path/to/python uses that environment instead of .venv. Example, two processes
    on a CPU:

      scripts/dgx1_8gpu.sh -n 2 -b 16 -e 8 --config cpu_sample
    """

    processes: Annotated[Positive | None, "-n"] = None
    """Processes, one per GPU; default: all GPUs, else all cores; 8 at most."""
    batch_size: Annotated[Positive | None, "-b"] = None
    """Images per process in one forward pass; default: the preset's."""
    epochs: Annotated[Positive | None, "-e"] = None
    """Passes over the training images; default: the preset's."""
    min_np: Positive | None = None
    """Elastic: when a process is lost, go on from the last committed state while this many are left."""
    cooldown: Annotated[int, _seconds, "SECONDS"] = 0
    """Elastic: restart a lost process after about this long, longer each time; 0: never."""


class Slot(NamedTuple):
    """What a process gets."""

    number: int
    gpu: topology.GpuPlace | None
    cores: frozenset[int]
    bound: bool  # to these cores; else it only has as many threads

    @property
    def environment(self) -> dict[str, str]:
        count = str(len(self.cores))
        variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", count), topology.CORES_VARIABLE: count}
        if self.gpu:
            variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's; CUDA's own: fastest first
            # Of the GPU's queues, which CUDA's streams share: a stream that waits for another GPU holds up its queue.
            variables["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        return variables

    def __str__(self) -> str:
        where = f"GPU {self.gpu.visible} ({self.gpu})" if self.gpu else "CPU"
        return f"process {self.number}: {where}" + (f", cores {topology.format_cores(self.cores)}" * self.bound)


class Worker(NamedTuple):
    slot: Slot
    process: subprocess.Popen[bytes]

    def last_words(self) -> str:
        """Why it ended."""
        code = self.process.returncode
        gpu = f"GPU {self.slot.gpu.visible}, " if self.slot.gpu else ""
        place = f"process {self.slot.number} ({gpu}pid {self.process.pid})"
        if code >= 0:
            return f"{place} failed with exit code {code}"
        name = signal.Signals(-code).name
        memory = ", as the kernel does when the machine's memory runs out" if -code == signal.SIGKILL else ""
        return f"{place} was killed by {name}{memory}"


def plan(num_processes: int | None, on_cpu: bool) -> tuple[list[Slot], list[str]]:
    """What each process gets, and what the user should know about it. Raises TrainError where it cannot be had."""
    gpus = [] if on_cpu else topology.read_gpus()
    count = num_processes or min(len(gpus) or len(os.sched_getaffinity(0)), MAX_PROCESSES)
    if gpus:
        notes = topology.check(gpus, count)
    else:
        notes = [] if on_cpu else ["no NVIDIA GPU is visible here, so the processes train on the CPU"]
    shares = topology.assign_cores(gpus, count)
    slots = [Slot(i, gpus[i] if gpus else None, cores, bound=bool(gpus)) for i, cores in enumerate(shares)]
    return slots, notes


def launch(slots: Sequence[Slot], command: Sequence[str]) -> int:
    """Run `command` in a process for each slot, with its rank in the environment.

    Returns the exit code: 0, or that of the first process that failed, whereupon the others are ended.

    Raises TrainError where Horovod is missing.
    """
    require_horovod(len(slots))
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    ranks = get_host_assignments(parse_hosts(f"localhost:{len(slots)}"), len(slots))
    server = RendezvousServer()
    common = {**LOOPBACK, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.start())}
    server.init(ranks)
    workers: list[Worker] = []
    with _signals_forwarded(workers) as received:
        try:
            for rank, slot in zip(ranks, slots, strict=True):
                workers.append(_start(command, slot, {**common, **create_slot_env_vars(rank)}))
            return _wait(workers, received)
        finally:
            for worker in workers:
                worker.process.kill()
            server.stop()


def launch_elastic(slots: Sequence[Slot], command: Sequence[str], min_processes: int, cooldown: int = 0) -> int:
    """Run a command once for each slot in Horovod's elastic mode; the exit code. When a process is lost, the
    others go on as long as `min_processes` are left.

    To Horovod every slot is a host of its own, because it is whole hosts that Horovod gives up. A slot given up comes
    back after `cooldown` seconds, twice as long each time, if that is not 0; a process that is started there joins.
    """
    require_horovod(len(slots))
    from horovod.runner.elastic.discovery import HostDiscovery
    from horovod.runner.elastic.driver import ElasticDriver
    from horovod.runner.elastic.rendezvous import create_rendezvous_handler
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousHTTPServer, RendezvousServer

    RendezvousHTTPServer.daemon_threads = True  # one that waits for a dead process must not keep this one
    by_host = {f"slot{slot.number}": slot for slot in slots}

    class Slots(HostDiscovery):  # type: ignore[misc]  # Horovod is untyped
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            return dict.fromkeys(by_host, 1)

    server = RendezvousServer()
    cooldown_range = (cooldown, 3600) if cooldown else None  # Horovod allows an hour at most
    driver = ElasticDriver(server, Slots(), min_processes, len(slots), cooldown_range=cooldown_range)
    common = {**LOOPBACK, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.start(create_rendezvous_handler(driver))),
              "HOROVOD_ELASTIC": "1"}
    workers: list[Worker] = []
    lost: list[Worker] = []
    given_up = threading.Event()

    def run_worker(rank: Any, events: Sequence[threading.Event]) -> tuple[int, float]:
        """Start a process where Horovod wants one and wait for its end; in a thread of Horovod's."""
        slot = by_host[rank.hostname]
        visible = {"CUDA_VISIBLE_DEVICES": slot.gpu.visible} if slot.gpu else {}  # each is the only one on its host
        worker = _start(command, slot, {**common, **visible, **create_slot_env_vars(rank)})
        workers.append(worker)
        while worker.process.poll() is None and not any(event.is_set() for event in events):
            time.sleep(POLL_SECONDS)
        try:
            code = worker.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            code = worker.process.wait()
        if code not in (0, *TOLD) and -code not in received and not given_up.is_set():
            lost.append(worker)
            left = sum(other.process.poll() is None for other in workers)
            if left == 0 or (left < min_processes and not cooldown):
                given_up.set()
                print(f"error: {worker.last_words()}; {left} {'is' if left == 1 else 'are'} left, but --min-np is "
                      f"{min_processes}, so the run ends: go on with --resume and its folder",
                      file=sys.stderr, flush=True)
                for other in workers:
                    other.process.kill()
            else:
                go, wait = ("go", "wait") if left > 1 else ("goes", "waits")
                they = f"{go} on from" if left >= min_processes else f"{wait} for more, to be {min_processes}, at"
                print(f"{worker.last_words()}; {left} {they} the last commit", file=sys.stderr, flush=True)
        return _exit_code(code), time.time()

    logging.disable(logging.ERROR)  # Horovod's, of what is told here
    with _signals_forwarded(workers) as received:
        try:
            driver.start(len(slots), run_worker)
            codes = _results(driver, workers)
            return max(codes) if codes else _exit_code(lost[-1].process.returncode) if lost else 1
        finally:
            for worker in workers:
                worker.process.kill()
            logging.disable(logging.NOTSET)


def _results(driver: Any, workers: Sequence[Worker]) -> list[int]:
    """Exit codes of the processes that an elastic run ended with; none where Horovod has lost count.

    It does when a process dies while it counts those that are ready: then it would wait for dead processes forever.
    """
    codes: list[int] = []

    def wait() -> None:
        codes.extend(code for code, _ in driver.get_results().worker_results.values())

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    deadline = float("inf")
    while waiting.is_alive() and time.monotonic() < deadline:
        waiting.join(POLL_SECONDS)
        if any(worker.process.poll() is None for worker in workers):
            deadline = float("inf")
        elif deadline == float("inf"):
            deadline = time.monotonic() + GRACE_SECONDS
    return codes


@contextlib.contextmanager
def _signals_forwarded(workers: Sequence[Worker]) -> Iterator[set[int]]:
    """Signals to this process reach all workers that there are by then; yields the numbers of those that came."""
    received: set[int] = set()

    def forward(number: int, frame: object) -> None:
        received.add(number)
        for worker in workers:
            worker.process.send_signal(number)

    def leave(number: int, frame: object) -> None:
        """Ctrl-C reaches the whole process group by itself. Not SIG_IGN, which the workers would inherit."""
        received.add(number)

    with handled({signal.SIGTERM: forward, signal.SIGUSR1: forward, signal.SIGINT: leave}):
        yield received


def _start(command: Sequence[str], slot: Slot, environment: Mapping[str, str]) -> Worker:
    process = subprocess.Popen(command, env={**os.environ, **slot.environment, **environment}, preexec_fn=_stop_with_us)
    if slot.bound:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.sched_setaffinity(process.pid, slot.cores)
    return Worker(slot, process)


def _stop_with_us() -> None:
    """In a new process: SIGTERM for it when this one is killed, so that no orphans stay on the GPUs."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(workers: Sequence[Worker], received: set[int]) -> int:
    """Until all have ended, or until GRACE_SECONDS after the first one that failed.

    One that stopped because it was asked to has not failed: process 0 still writes the report then.
    Prints the last words of the one whose fault it was: the others fail because of it, perhaps even before it is gone.
    Not where it ended by one of the signals `received`, as it does while it starts.
    """
    failed: list[Worker] = []  # in the order in which they were seen
    deadline = float("inf")
    while time.monotonic() < deadline:
        codes = [worker.process.poll() for worker in workers]
        failed += [worker for worker, code in zip(workers, codes, strict=True)
                   if code and code not in STOPPED and worker not in failed]
        if failed and deadline == float("inf"):
            deadline = time.monotonic() + GRACE_SECONDS
        if None not in codes:
            break
        time.sleep(POLL_SECONDS)
    if not failed:
        return max(worker.process.returncode for worker in workers)
    culprit = next((worker for worker in failed if worker.process.returncode != EXIT_LOST_PROCESS), failed[0])
    code = culprit.process.returncode
    if code not in TOLD and -code not in received:
        print(f"error: {culprit.last_words()}, so the run ends; its last checkpoint, if there is one, is whole: go on "
              "with --resume and the run's folder", file=sys.stderr, flush=True)
    return _exit_code(code)


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code  # a shell's code for a process that a signal ended


def require_horovod(num_processes: int | str) -> None:
    """Raises NoHorovodError where Horovod is missing; but this project's own environment gets it first."""
    root = Path(__file__).resolve().parents[2]
    ours = "PYTHON" not in os.environ and Path(sys.prefix).resolve() == (root / ".venv").resolve()
    if ours and not (root / ".venv" / ".ready-horovod").exists():
        if subprocess.run(["bash", str(root / "scripts" / "setup.sh"), "horovod"]).returncode:
            sys.exit(EXIT_USER_ERROR)  # it has said why
        importlib.invalidate_caches()
    try:
        import horovod.runner.gloo_run  # noqa: F401  # heavy
    except ImportError as error:
        raise NoHorovodError(num_processes, error) from None


# --- the command line ---


def parse(arguments: Sequence[str]) -> tuple[LaunchOptions, list[str]]:
    """The launcher's own options, and the arguments of `python -m train`. Raises UserError for a wrong value."""
    values, passed = given_and_rest(LaunchOptions, arguments, prog=SCRIPT, rest="any option of python -m train")
    own = LaunchOptions(**values)
    for option, value in (("--batch-size", own.batch_size), ("--epochs", own.epochs)):
        if value is not None:
            passed += [option, str(value)]
    if own.min_np and own.processes and own.min_np > own.processes:
        raise TrainError(f"--min-np {own.min_np} is more than the {own.processes} processes of -n; lower it")
    if own.cooldown and not own.min_np:
        raise TrainError("--cooldown is for elastic runs; give --min-np too, or leave it out")
    return own, passed


def main(arguments: Sequence[str]) -> int:
    own, passed = parse(arguments)
    on_cpu = given_value(passed, "--device") == "cpu"
    command = [sys.executable, "-m", "train", *passed]
    if "HOROVOD_LOCAL_RANK" in os.environ:  # started by horovodrun
        slots, _ = plan(int(os.environ["HOROVOD_LOCAL_SIZE"]), on_cpu)
        _become(command, slots[int(os.environ["HOROVOD_LOCAL_RANK"])])
    understood(passed)  # a mistake is told before Horovod is compiled, and once
    slots, notes = plan(own.processes, on_cpu)
    if own.min_np and own.min_np > len(slots):
        raise TrainError(f"--min-np {own.min_np} is more than the {len(slots)} processes here; lower it")
    for line in (*map(str, slots), *notes):
        print(line, flush=True)
    variables = [f"{name}={value}" for name, value in slots[0].environment.items()]
    print(shlex.join([*variables, "python", *command[1:]]), flush=True)
    elastic = f" --min-np {own.min_np}" + f" --cooldown {own.cooldown}" * bool(own.cooldown) if own.min_np else ""
    os.environ[LAUNCHER_VARIABLE] = f"{SCRIPT} -n {len(slots)}{elastic}"
    if own.min_np:
        return launch_elastic(slots, command, own.min_np, own.cooldown)
    if len(slots) == 1:
        _become(command, slots[0])  # alone it needs neither Horovod nor this process
    return launch(slots, command)


def _become(command: list[str], slot: Slot) -> NoReturn:
    """Bind this process to its part of the machine and go on as `command`."""
    if slot.bound:
        os.sched_setaffinity(0, slot.cores)
    os.execve(command[0], command, {**os.environ, **slot.environment})


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
