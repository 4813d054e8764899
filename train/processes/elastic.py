"""Elastic runs: processes may be lost or join, and training goes on, through Horovod's elastic mode.

Horovod's part is to notice a change and to call `sync` and the session again in every process
(horovod.common.elastic); ours is `RunState`, which Horovod has for other frameworks but not for MXNet, and on one
machine to give out new ranks (elastic_launch.py; over several machines horovodrun does). A session is an ordinary run
that starts from a checkpoint, only that this one is in memory: the last commit, made every `--commit-every` steps. So a
change costs the steps since then and whatever a resumed run costs, and what holds for resuming with another number of
processes holds here: the batch of each process stays, the learning rate follows the global batch, and no image comes
twice in an epoch (Trainer._restore). docs/elastic.md tells more.
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
    """What a process tells the others when they have found each other."""

    host: str
    pid: int
    knows: bool  # the run's state
    commits: int  # so far
    fault: str  # that has ended its latest session; "": something else has, or there was none

    @property
    def place(self) -> tuple[str, int]:
        """That no other process has."""
        return self.host, self.pid


class RunState(State):  # type: ignore[misc]  # Horovod is untyped
    """What a process takes from one session into the next. `commit()` keeps the trainer's state in memory, then looks
    whether processes have come or gone: all raise HostsUpdatedInterrupt if so, which ends the session."""

    def __init__(self) -> None:
        super().__init__(bcast_object=_broadcast, get_rank=hvd.rank)
        self.beginning: Any = None  # `Beginning` that the next session starts from; None: as the first one does
        self.executor: Executor | None = None  # kept: its batch stays, and compiled steps are not thrown away
        self.capture: Callable[[], Checkpoint]  # of the session's trainer
        self.fault = ""  # as in `Member`
        self.members: list[Member] = []  # of the latest session, by rank

    def save(self) -> None:
        """Part of `commit`."""
        assert self.beginning
        committed = self.capture()
        self.beginning = self.beginning._replace(config=committed.config, checkpoint=committed, fit_machine=False)
        pulse.count_commit()
        if pulse.is_recalled:
            self.on_hosts_updated(time.time(), HostUpdateResult.added)

    def restore(self) -> None:
        """Horovod calls it while it handles the fault that has ended a session; the next one starts from `beginning` in
        any case."""
        self.fault = str(sys.exc_info()[1]).strip().rpartition("\n")[2]  # of MXNet's traces the last line says it

    def sync(self) -> None:
        """A process that joins takes over what the first one has that knows the run's state; what becomes of the run
        after a fault is told. Raises TrainError, as `run`."""
        with _losses_named():
            own = Member(socket.gethostname(), os.getpid(), self.beginning is not None, pulse.commits, self.fault)
            before, self.members, self.fault = self.members, _gather(own), ""
            happened = _what_happened(before, self.members)
            knowing = [rank for rank, member in enumerate(self.members) if member.knows]
            self.beginning = _broadcast(self.beginning, min(knowing, default=0))
        if happened and hvd.rank() == 0:
            committed = getattr(self.beginning, "checkpoint", None)
            step = f", step {committed.progress.step}" if committed else ""
            where = f"going on from the last commit{step}"
            if max(member.commits for member in self.members) < 2:
                where = f"beginning again {BEGINNING}"
            print(f"{happened}; {where}", file=sys.stderr, flush=True)


def _what_happened(before: Sequence[Member], now: Sequence[Member]) -> str:
    """Where a fault has ended the session of the members `before`, what it was; "" where there was none, or our own
    launcher tells it. Raises TrainError, as `run`."""
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
    # The first commit of a session is what it began with.
    has_committed = any(member.commits > commits.get(member.place, 0) + 1 for member in now)
    if not has_committed and len(now) == len(before):
        raise TrainError(f"{sentence}, so the run ends: see that each has a GPU of its own and reaches the others "
                         f"(NCCL_DEBUG=WARN says more); {WAY_OUT}", on_all_ranks=True)
    return sentence


def _gather(value: Any) -> list[Any]:
    """The values of all ranks, on every rank, by rank."""
    pulse.begin_collective()
    return hvd.allgather_object(value, name="elastic members")


def _broadcast(value: Any, rank: int = 0) -> Any:
    """That of one rank, on every rank."""
    pulse.begin_collective()
    return hvd.broadcast_object(value, root_rank=rank, name="elastic")


@contextlib.contextmanager
def _losses_named() -> Iterator[None]:
    """What an operation among the processes raises inside when one is lost becomes what Horovod looks for."""
    try:
        yield
    except Exception as error:
        if not is_lost_process(error):
            raise
        raise HorovodInternalError(str(error)) from None


def run(session: Callable[[RunState], None]) -> None:
    """Call `session` in this process, and again after each change, until it returns. Raises whatever else it raises,
    and TrainError where it fails though no process was lost, with nothing trained and committed: it would for ever."""
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
        drain_engine()  # of what failed between two sessions
        connections = _join()

    run_fn(guarded, reset)(RunState())


def _join(attempts: int = 3) -> dict[int, str]:
    """Become one of the processes that the launcher wants now; returns the connections made for that, by descriptor.
    Raises LostProcessError where they cannot connect."""
    if pulse.is_watched:  # by our own launcher; under horovodrun, Horovod gives out the ranks
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
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
    return found


def _hang_up(connections: dict[int, str]) -> None:
    """End the connections to the other processes, which else would wait for this one until Gloo's time-out of 30 s.

    Horovod keeps them open when it has met an error, and only those that talked to the lost process meet it at once.
    """
    still_open = _sockets()
    for number, name in connections.items():
        if still_open.get(number) == name:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
