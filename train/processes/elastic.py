"""Elastic runs: training continues when processes are lost or join, through Horovod's elastic mode.

Horovod's part (horovod.common.elastic) is to notice a change and to call `sync` and the session again in every process.
Our part has two pieces: `RunState`, which Horovod has for other frameworks but not for MXNet, and new ranks on a single
machine (elastic_launch.py; over several machines horovodrun assigns ranks). A session is an ordinary run that starts
from a checkpoint, except that the checkpoint is in memory: the last commit, made every `--commit-every` steps. A change
therefore costs the steps since that commit, plus the cost of a resumed run. The rules for resuming with another number
of processes apply: the batch per process stays, the learning rate follows the global batch, and no image occurs twice
in an epoch (RunState.restore in train/run_state.py). docs/elastic.md explains more.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from horovod.common.elastic import State, run_fn
from horovod.common.exceptions import HorovodInternalError
from horovod.runner.elastic.worker import HostUpdateResult

from graph_passes.executors import Executor
from train.checkpoint import Checkpoint
from train.errors import LostProcessError, TrainError
from train.processes.distributed import Workers, drain_engine, is_lost_process
from train.processes.horovod_mxnet import hvd
from train.processes.pulse import BEGINNING, pulse
from train.processes.worker import WAY_OUT


class Member(NamedTuple):
    """The message of each process to the others when they have connected."""

    host: str
    pid: int
    knows: bool  # whether the process knows the run's state
    commits: int  # number of commits so far
    fault: str  # the error that ended the process's latest session; "" if there was none

    @property
    def place(self) -> tuple[str, int]:
        """An identity that no other process has."""
        return self.host, self.pid


class RunState(State):  # type: ignore[misc]  # Horovod is untyped
    """The state that a process carries from one session to the next. `commit()` keeps the trainer's state in memory,
    then checks whether processes have come or gone. In this case all processes raise HostsUpdatedInterrupt, which ends
    the session.
    """

    def __init__(self) -> None:
        super().__init__(bcast_object=_broadcast, get_rank=hvd.rank)
        self.beginning: Any = None  # the next session's `Beginning`; None: the beginning of the first session
        # kept for the next session, because its batch size stays and compiled steps are reused
        self.executor: Executor | None = None
        self.capture: Callable[[], Checkpoint]  # method of the session's trainer
        self.fault = ""  # see `Member`
        self.members: list[Member] = []  # members of the latest session, by rank

    def save(self) -> None:
        """Keep the state in memory; called by `commit`."""
        assert self.beginning
        committed = self.capture()
        self.beginning = self.beginning._replace(config=committed.config, checkpoint=committed, fit_machine=False)
        pulse.count_commit()
        if pulse.is_recalled:
            self.on_hosts_updated(time.time(), HostUpdateResult.added)

    def restore(self) -> None:
        """Record the fault that has ended a session; Horovod calls this. Nothing else is restored: the next session
        starts from `beginning` in any case.
        """
        # the last line of an MXNet trace is the message
        self.fault = str(sys.exc_info()[1]).strip().rpartition("\n")[2]

    def sync(self) -> None:
        """Give the run's state to processes that join. The state comes from the first process that knows it. Also
        reports how the run continues after a fault. Raises TrainError, like `run`.
        """
        with _losses_named():
            own = Member(socket.gethostname(), os.getpid(), self.beginning is not None, pulse.commits, self.fault)
            before, self.members, self.fault = self.members, _gather(own), ""
            happened = _what_happened(before, self.members)
            knowing = [rank for rank, member in enumerate(self.members) if member.knows]
            self.beginning = _broadcast(self.beginning, min(knowing, default=0))
        if happened and hvd.rank() == 0:
            committed = getattr(self.beginning, "checkpoint", None)
            step = f", step {committed.progress.step}" if committed else ""
            where = f"resuming from the last commit{step}"
            if max(member.commits for member in self.members) < 2:
                where = f"beginning again {BEGINNING}"
            print(f"{happened}; {where}", file=sys.stderr, flush=True)


def _what_happened(before: Sequence[Member], now: Sequence[Member]) -> str:
    """The fault that has ended the session of `before`; "" if there was none, or if our launcher reports the fault.
    Raises TrainError, like `run`.
    """
    fault = next((member.fault for member in now if member.fault), "")
    if not fault:
        return ""
    commits = {member.place: member.commits for member in before}
    processes = f"{len(before)} process{'es' * (len(before) > 1)}"
    if lost := sorted(commits.keys() - {member.place for member in now}):
        names = ", ".join(f"process {pid} on {host}" for host, pid in lost)
        are = "is" if len(lost) == 1 else "are"
        return "" if pulse.is_watched else f"{len(lost)} of {processes} {are} lost ({names})"
    sentence = f"an operation among the {processes} failed, though none of them was lost ({fault})"
    # A session's first commit is its own starting point.
    has_committed = any(member.commits > commits.get(member.place, 0) + 1 for member in now)
    if not has_committed and len(now) == len(before):
        raise TrainError(f"{sentence}, so the run ends: check that each process has its own GPU and reaches the others "
                         f"(NCCL_DEBUG=WARN says more); {WAY_OUT}", on_all_ranks=True)
    return sentence


def _gather(value: Any) -> list[Any]:
    """Every rank's value, on every rank, in rank order."""
    pulse.begin_collective()
    return hvd.allgather_object(value, name="elastic members")


def _broadcast(value: Any, rank: int = 0) -> Any:
    """The value of one rank, on every rank."""
    pulse.begin_collective()
    return hvd.broadcast_object(value, root_rank=rank, name="elastic")


@contextlib.contextmanager
def _losses_named() -> Iterator[None]:
    """A context in which the error of an operation that fails because a process is lost becomes Horovod's own
    exception."""
    try:
        yield
    except Exception as error:
        if not is_lost_process(error):
            raise
        raise HorovodInternalError(str(error)) from None


def run(session: Callable[[RunState], None]) -> None:
    """Call `session` in this process, and again after each change, until it returns. Other exceptions propagate. Raises
    TrainError if a session fails without a lost process and without a commit, because it would fail forever."""
    connections = _join()

    def guarded(state: RunState) -> None:
        try:
            with _losses_named():
                session(state)
        finally:
            drain_engine()

    def reset() -> None:
        nonlocal connections
        _hang_up(connections)
        hvd.shutdown()
        drain_engine()  # discards errors from the time between two sessions
        connections = _join()

    run_fn(guarded, reset)(RunState())


def _join(attempts: int = 3) -> dict[int, str]:
    """Join the launcher's current processes. Returns the sockets opened for this, by descriptor. Raises
    LostProcessError if the processes cannot connect.
    """
    if pulse.is_watched:  # our own launcher assigns ranks here; under horovodrun, Horovod assigns ranks
        rank, size = map(str, pulse.wait_for_place())
        os.environ.update(HOROVOD_RANK=rank, HOROVOD_SIZE=size, HOROVOD_CROSS_RANK=rank, HOROVOD_CROSS_SIZE=size)
    before = _sockets()
    try:
        workers = Workers()
    except HorovodInternalError as error:  # another process was lost meanwhile
        if attempts == 1:
            raise LostProcessError(f"{error}; {WAY_OUT}") from None
        return _join(attempts - 1)
    pulse.lose_pace()
    os.environ.update(HOROVOD_RANK=str(workers.rank), HOROVOD_SIZE=str(workers.size))
    return {number: name for number, name in _sockets().items() if before.get(number) != name}


def _sockets() -> dict[int, str]:
    """This process's open sockets, by descriptor, as the kernel names them."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
    return found


def _hang_up(connections: dict[int, str]) -> None:
    """Close the connections to the other processes, which would otherwise wait for this process until Gloo's time-out
    of 30 s.

    After an error Horovod keeps the connections open, and only the processes that communicated with the lost process
    notice the loss at once.
    """
    still_open = _sockets()
    for number, name in connections.items():
        if still_open.get(number) == name:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
