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
from collections.abc import Callable, Iterator
from typing import Any

from horovod.common.elastic import State, run_fn
from horovod.common.exceptions import HorovodInternalError
from horovod.runner.elastic.worker import HostUpdateResult

from graph_passes.executors import Executor
from train.checkpoint import Checkpoint
from train.errors import TrainError
from train.processes.distributed import Workers, drain_engine, is_lost_process
from train.processes.horovod_mxnet import hvd
from train.processes.pulse import pulse
from train.processes.worker import WAY_OUT


class RunState(State):  # type: ignore[misc]  # Horovod is untyped
    """What a process takes from one session into the next. `commit()` keeps the trainer's state in memory, then looks
    whether processes have come or gone: all raise HostsUpdatedInterrupt if so, which ends the session."""

    def __init__(self) -> None:
        super().__init__(bcast_object=_broadcast, get_rank=hvd.rank)
        self.beginning: Any = None  # `Beginning` that the next session starts from; None: as the first one does
        self.executor: Executor | None = None  # kept: its batch stays, and compiled steps are not thrown away
        self.capture: Callable[[], Checkpoint]  # of the session's trainer
        self.fault = ""  # that has ended the latest session; "": something else has

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
        """A process that joins takes over what rank 0 has, which is never one that joins."""
        with _losses_named():
            self.beginning = self._bcast_object(self.beginning)


def _broadcast(value: Any) -> Any:
    """Rank 0's, on every rank."""
    pulse.begin_collective()
    return hvd.broadcast_object(value, name="elastic")


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
    own, commits = RunState(), pulse.commits  # of a session the first commit is what it began with

    def guarded(state: RunState) -> None:
        try:
            with _losses_named():
                session(state)
        finally:
            drain_engine()

    def reset() -> None:
        nonlocal connections, commits
        _hang_up(connections)
        hvd.shutdown()
        fault, own.fault = own.fault, ""
        connections = _join(fault, pulse.commits > commits + 1)
        commits = pulse.commits

    run_fn(guarded, reset)(own)


def _join(fault: str = "", has_committed: bool = False) -> dict[int, str]:
    """Become one of the processes that the launcher wants now; returns the connections made for that, by descriptor.

    Args:
        fault: that has ended the session before.
        has_committed: whether that one has committed anything that it trained.

    Raises TrainError, as `run`.
    """
    if pulse.is_watched:  # by our own launcher; under horovodrun, Horovod gives out the ranks
        rank, size = map(str, pulse.wait_for_place())
        os.environ.update(HOROVOD_RANK=rank, HOROVOD_SIZE=size, HOROVOD_CROSS_RANK=rank, HOROVOD_CROSS_SIZE=size)
        if fault and pulse.is_unchanged:
            sentence = f"an operation among the {size} processes failed, though none of them was lost ({fault})"
            if not has_committed:
                raise TrainError(f"{sentence}, so the run ends: see that each has a GPU of its own and reaches the "
                                 f"others (NCCL_DEBUG=WARN says more); {WAY_OUT}", on_all_ranks=True)
            if rank == "0":
                print(f"{sentence}; going on from the last commit", file=sys.stderr, flush=True)
    before = _sockets()
    workers = Workers()
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
