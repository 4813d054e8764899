"""The processes of a run, managed by their launcher: share of the machine, start, and end."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from common.errors import EXIT_USER_ERROR
from common.mxnet_compat import given_threads
from common.program import REPORT, is_own, start_of
from train.errors import EXIT_HUNG_PROCESS, EXIT_LOST_PROCESS, TrainError
from train.processes import topology
from train.processes.guard import Guard
from train.processes.pulse import Activity
from train.processes.signals import (
    INSISTENT,
    SAME_SECONDS,
    STOPPED_EARLY,
    STOPPING,
    end_with_parent,
    ending,
    handled,
)
from train.processes.watch import Watch

GRACE_SECONDS = 3.0  # seconds for the other processes to end by themselves after one has failed
POLL_SECONDS = 0.05
# Exit codes of processes that have reported why they end.
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)  # stopped on request
TOLD = (EXIT_USER_ERROR, EXIT_LOST_PROCESS, EXIT_HUNG_PROCESS, *STOPPED)
WAY_OUT = "its last checkpoint, if there is one, is complete: resume with --resume and the run's folder"


class Slot(NamedTuple):
    """The share of the machine for a process."""

    number: int
    gpu: topology.GpuPlace | None
    cores: frozenset[int]
    bound: bool  # whether the process is bound to these cores; if not, only the number of threads is set

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the process. Raises UserError for an invalid number of threads."""
        count = str(len(self.cores))
        variables = {"OMP_NUM_THREADS": given_threads() or count, topology.CORES_VARIABLE: count}
        if self.gpu:
            variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order; CUDA's own puts the fastest first
            # Number of the GPU's hardware queues, which CUDA's streams share: a stream that waits for another GPU
            # blocks its queue.
            variables["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        return variables

    def __str__(self) -> str:
        where = f"GPU {self.gpu.visible} ({self.gpu})" if self.gpu else "CPU"
        return f"process {self.number}: {where}" + (f", cores {topology.format_cores(self.cores)}" * self.bound)


class Worker(NamedTuple):
    slot: Slot
    process: subprocess.Popen[bytes]

    @property
    def place(self) -> str:
        """The process's name for users."""
        gpu = f"GPU {self.slot.gpu.visible}, " if self.slot.gpu else ""
        return f"process {self.slot.number} ({gpu}pid {self.process.pid})"

    def last_words(self) -> str:
        """The reason why the process ended, in words."""
        return f"{self.place} {how_it_ended(self.process.returncode)}"


def how_it_ended(code: int) -> str:
    """How a process ended, in words that follow the process's name. `code`: its exit code, or minus the number of the
    signal.
    """
    if code >= 0:
        return f"failed with exit code {code}"
    memory = ", as the kernel does when the machine's memory runs out" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{memory}"


def exit_code(code: int) -> int:
    """The exit code in shell convention, where a signal's number is added to 128."""
    return 128 - code if code < 0 else code


def on_this_machine(hang_seconds: float) -> dict[str, str]:
    """Horovod's settings for processes that are all on one machine. Raises TrainError."""
    settings = {"HOROVOD_GLOO_IFACE": "lo", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo",
                "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    # Gloo's own time-out (30 s) would end the healthy processes and name nobody, so hangs must be found earlier.
    patience = str(max(30, math.ceil(hang_seconds) + 15)) if hang_seconds else "3600"
    given = os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS") or patience
    if not given.isdecimal() or int(given) == 0:
        raise TrainError(f"HOROVOD_GLOO_TIMEOUT_SECONDS is {given!r}: give whole seconds, or unset it")
    return {**settings, "HOROVOD_GLOO_TIMEOUT_SECONDS": given}


class EndedHang(NamedTuple):
    """The result of `end_hang`: processes that hung and were killed."""

    sentence: str  # a message without its ending
    workers: list[Worker]


class Processes:
    """The processes of a run on this machine, at most one per slot. All these processes end with this process.

    Args: slots: the processes' shares of the machine. command: the command that each process runs. hang_seconds: see
        `Watch`.
    """

    def __init__(self, slots: Sequence[Slot], command: Sequence[str], hang_seconds: float) -> None:
        self.command = command
        self.watch = Watch(1 + max(slot.number for slot in slots), hang_seconds)
        self.all: list[Worker] = []  # in the order of their start, including ended ones
        self.signals: list[int] = []  # signals that this process has received and must forward
        # times, in seconds, of received signals that mean 'stop at once' if repeated
        self._insisted_at: list[float] = []
        # processes killed for hanging; a process that waits for a dead disk never ends
        self._given_up: list[Worker] = []
        self._guard = Guard(self.watch)

    def start(self, slot: Slot, environment: Mapping[str, str]) -> Worker:
        """Start the process of a slot."""
        variables = {**os.environ, **slot.environment, **environment, **self.watch.begin(slot.number)}
        self.watch.records[slot.number].rank = int(environment["HOROVOD_RANK"])
        is_ours = is_own(self.command)
        process = subprocess.Popen(self.command, env=variables, pass_fds=(self.watch.descriptor,),
                                   preexec_fn=stop_ours_with_us if is_ours else stop_with_us)
        self.all.append(Worker(slot, process))
        self._guard.add(slot.number, process.pid)
        if slot.bound:
            with contextlib.suppress(ProcessLookupError):  # it has already ended
                os.sched_setaffinity(process.pid, slot.cores)
        return self.all[-1]

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self.all if worker.process.poll() is None and worker not in self._given_up]

    def end_hang(self) -> EndedHang | None:
        """Kill processes that hang, and return these processes, if any. To be called several times a second."""
        running = {worker.slot.number: worker for worker in self.running}
        hang = self.watch.look({number: worker.process.pid for number, worker in running.items()})
        if not hang:
            return None
        hung = [running[number] for number in hang.processes]
        last = "; ".join(f"{worker.place} shows {self.watch.describe(worker.slot.number, worker.process.pid)}"
                         for worker in hung)
        if hang.is_certain:
            ended = EndedHang(f"{last}; {'it hangs and is' if len(hung) == 1 else 'they hang and are'} killed", hung)
        else:
            ended = EndedHang("no process makes progress, and which one holds up the others cannot be told: "
                              f"{last}; all are killed", list(running.values()))
        self.kill(ended.workers)
        self._given_up += ended.workers
        return ended

    @property
    def has_trained(self) -> bool:
        """Whether the processes have finished training. It is enough to find one that has, because all finish at the
        same time.
        """
        return any(record.activity in (Activity.REPORTING, Activity.DONE) for record in self.watch.records)

    def has_done_its_part(self, worker: Worker) -> bool:
        """Whether the run can do without the process: all is done, or training is finished and the process has no
        report to write.
        """
        record = self.watch.records[worker.slot.number]
        return record.activity == Activity.DONE or (self.has_trained and record.rank > 0)

    def end_of_run(self, why: str) -> str:
        """The message about a process whose end ends the run."""
        if self.has_trained:
            return (f"{why}, before the report was complete; training had ended and its last "
                    f"checkpoint is complete: make the report with {start_of(REPORT)} and the run's folder")
        return f"{why}, so the run ends; {WAY_OUT}"

    def kill(self, workers: Collection[Worker] | None = None) -> None:
        """Kill processes; by default all of them."""
        for worker in self.all if workers is None else workers:
            worker.process.kill()

    def send(self, number: int) -> None:
        """Send a signal to all running processes."""
        for worker in self.running:
            worker.process.send_signal(number)

    @contextlib.contextmanager
    def in_charge(self) -> Iterator[None]:
        """A context in which signals to this process are forwarded to all processes. All processes are ended at the end
        of the block.
        """

        def forward(number: int, frame: object) -> None:
            self._note(number)
            self.send(number)

        try:  # the terminal also sends Ctrl-C to the processes; both signals count as one (SAME_SECONDS)
            with handled(dict.fromkeys((*ending(), signal.SIGUSR1), forward)):
                yield
        finally:
            self.kill()
            for worker in self.all:
                if worker not in self._given_up:
                    worker.process.wait()
            self._guard.close()
            if self._was_stopped_early:
                print(STOPPED_EARLY, file=sys.stderr, flush=True)

    @property
    def _was_stopped_early(self) -> bool:
        """Whether a forwarded signal has ended processes during their start, before they have a handler that could
        report the signal.
        """
        begun = any(record.activity > Activity.JOINING for record in self.watch.records)
        return not begun and any(-(worker.process.returncode or 0) in self.signals for worker in self.all)

    @property
    def is_to_stop(self) -> bool:
        """Whether somebody has requested a stop with saving."""
        return not set(STOPPING).isdisjoint(self.signals)

    def _note(self, number: int) -> None:
        self.signals.append(number)
        if number in INSISTENT:
            self._insisted_at.append(time.monotonic())

    @property
    def must_end(self) -> bool:
        """Whether a stop was requested twice, which means at once."""
        return bool(self._insisted_at) and self._insisted_at[-1] - self._insisted_at[0] > SAME_SECONDS


def stop_with_us() -> None:
    """`preexec_fn` of a new process: the process gets SIGTERM when its parent dies, so that it saves a checkpoint and
    frees the GPU. (In a run of several processes, `Guard` also ends processes that do not react.)
    """
    end_with_parent(signal.SIGTERM)


def stop_ours_with_us() -> None:
    """Like `stop_with_us`, for our own programs: also blocks Ctrl-C until `signals.leave_at`, because Python prints a
    stack trace while it starts.
    """
    stop_with_us()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
