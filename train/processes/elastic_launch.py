"""Starts the processes of an elastic run on this machine, and assigns new ranks whenever a process is lost or comes
back.

elastic.py is the counterpart in the processes. This module needs Horovod, but not Horovod's driver. The driver waits
forever for a process that hangs, and waits until Gloo's time-out if a process is lost while the others connect.

Before a process connects to the others, it waits (`Pulse.wait_for_place`, "at the door"). When all remaining processes
wait at the door, they get their ranks and connect together, as a new generation. Nobody waits for a process that is
lost before it reaches the door.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.gloo_run import create_slot_env_vars
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer, RendezvousServer

from common.output import print_error, print_line
from train.errors import EXIT_HUNG_PROCESS
from train.processes.pulse import BEGINNING, Activity, Record
from train.processes.worker import (
    GRACE_SECONDS,
    POLL_SECONDS,
    TOLD,
    WAY_OUT,
    Processes,
    Slot,
    Worker,
    exit_code,
    on_this_machine,
)

LONGEST_COOLDOWN = 3600.0  # longest cooldown in seconds


class ElasticRun:
    """An elastic run; arguments as in `launch_elastic`."""

    def __init__(self, slots: Sequence[Slot], command: Sequence[str], min_processes: int, cooldown: float,
                 hang_seconds: float) -> None:
        self._slots, self._min_processes, self._cooldown = slots, min_processes, cooldown
        self._processes = Processes(slots, command, hang_seconds)
        self._server = RendezvousServer()
        self._environment = {**on_this_machine(hang_seconds), "HOROVOD_ELASTIC": "1"}
        self._generation = 0
        self._members: list[Worker] = []  # processes of the latest generation, by rank
        self._ended: list[Worker] = []  # processes whose end has been handled
        self._hung: dict[int, str] = {}  # process id -> message, for processes that hung and were killed
        self._losses = [0] * len(slots)  # number of losses of each slot
        self._hangs = 0  # number of processes lost by hanging since the run's last step
        self._furthest = 0  # most steps done by any process at the latest loss
        self._returns: dict[int, float] = {}  # abandoned slot -> time of its next start, seconds
        self._code: int | None = None  # exit code, if the run ends because of a loss

    def run(self) -> int:
        """Run to the end and return the exit code."""
        ranks = self._ranks
        # a thread that waits for a dead process must not keep this process alive
        RendezvousHTTPServer.daemon_threads = True

        class Handler(RendezvousHandler):  # type: ignore[misc]  # Horovod is untyped
            def _get_value(self, scope: str, key: str) -> bytes | None:
                """Answer Horovod when it initialises again in a process that already has a rank."""
                if scope == "rank_and_size":
                    return ranks()[key.partition(":")[0]].to_response_string().encode()
                return super()._get_value(scope, key)

        self._environment["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(self._server.start(Handler))
        logging.disable(logging.ERROR)  # hides Horovod's messages about events that this module reports itself
        try:
            with self._processes.in_charge():
                for slot in self._slots:
                    self._start(slot)
                deadline = float("inf")
                while self._processes.running and time.monotonic() < deadline:
                    self._look()
                    if self._processes.must_end and deadline == float("inf"):
                        deadline = time.monotonic() + GRACE_SECONDS
                    time.sleep(POLL_SECONDS)
                self._look()
                if self._processes.running:
                    return 128 + self._processes.signals[-1]
                return self._end()
        finally:
            self._server.stop()
            logging.disable(logging.NOTSET)

    def _end(self) -> int:
        if self._code is not None:
            return self._code
        return max((exit_code(worker.process.returncode) for worker in self._processes.all
                    if self._is_regular(worker)), default=1)

    def _look(self) -> None:
        """Handle everything that has happened since the last call."""
        self._part_with_ended()
        if self._code is not None:
            return
        if hang := self._processes.end_hang():
            self._hung |= {worker.process.pid: hang.sentence for worker in hang.workers}
            self._part_with_ended()
            if self._code is not None:
                return
        self._bring_back()
        self._let_in()
        if self._processes.is_to_stop:
            for worker in self._members:
                self._record(worker).stops = 1

    # --- processes come and go ---

    def _record(self, worker: Worker) -> Record:
        return self._processes.watch.records[worker.slot.number]

    def _start(self, slot: Slot) -> None:
        # Horovod is told that each process is alone on its host
        visible = {"CUDA_VISIBLE_DEVICES": slot.gpu.visible} if slot.gpu else {}
        place = SlotInfo(hostname=_host(slot), rank=slot.number, size=len(self._slots), local_rank=0, local_size=1,
                         cross_rank=slot.number, cross_size=len(self._slots))
        self._processes.start(slot, {**self._environment, **visible, **create_slot_env_vars(place)})

    def _is_regular(self, worker: Worker) -> bool:
        """Whether a process has ended without being lost: the process was done, has reported why it ends, or was asked
        to end.
        """
        if worker.process.pid in self._hung:  # a killed process may still exist, without an exit code
            return False
        code = worker.process.returncode
        has_told = code in (0, *TOLD) or (code > 0 and self._processes.has_done_its_part(worker))
        return has_told or -code in self._processes.signals

    @property
    def _is_over(self) -> bool:
        """Whether there is nothing left to train."""
        return self._processes.has_trained or any(worker.process.returncode == 0 for worker in self._processes.all)

    def _part_with_ended(self) -> None:
        for worker in list(self._processes.all):  # the list grows if all are restarted
            if worker in self._processes.running or worker in self._ended:
                continue
            self._ended.append(worker)
            if not (self._is_regular(worker) or self._processes.has_done_its_part(worker)) and self._code is None:
                self._lose(worker)

    def _lose(self, worker: Worker) -> None:
        """Continue without a process, or end the run, and report that; do this silently if the process tried to join a
        run that is over.
        """
        why = self._hung.get(worker.process.pid)
        code = EXIT_HUNG_PROCESS if why else exit_code(worker.process.returncode)
        why = why or worker.last_words()
        running = self._processes.running
        left, least = len(running), self._min_processes
        furthest = max(record.step for record in self._processes.watch.records)
        self._hangs = (self._hangs if furthest <= self._furthest else 0) + (worker.process.pid in self._hung)
        self._furthest = max(furthest, self._furthest)
        if self._is_over:
            if worker in self._members:
                self._give_up(code, self._processes.end_of_run(why))
        # for example, every process that becomes rank 0 hangs because nobody reads its output
        elif self._hangs > len(self._slots):
            self._give_up(code, f"{why}; {self._hangs} processes have hung without a step in between, so the "
                                f"run ends; {WAY_OUT}")
        elif left < least and not (left and self._cooldown):
            self._give_up(code, f"{why}; {left} {'is' if left == 1 else 'are'} left, but --min-np is {least}, so the "
                                f"run ends; {WAY_OUT}")
        elif self._commits and not any(member in running for member in self._members):
            self._give_up(code, f"{why}; no process that is left knows the state of the training, so the "
                                f"run ends; {WAY_OUT}")
        elif self._commits and worker in self._members and self._is_joining:
            self._give_up(code, f"{why} while the processes connected to each other, so the run ends; {WAY_OUT}")
        else:
            go, wait = ("processes go", "processes wait") if left > 1 else ("process goes", "process waits")
            do = f"{go} on" if left >= least else f"{wait} until there are {least}, to go on"
            print_line(f"{why}; {left} {do} {self._where_to_go_on}", apart=True)
            if self._cooldown:
                pause = self._cooldown * 2 ** self._losses[worker.slot.number]
                self._returns[worker.slot.number] = time.monotonic() + min(pause, LONGEST_COOLDOWN)
            self._losses[worker.slot.number] += 1
            if worker in self._members and self._is_joining:
                self._begin_again()

    @property
    def _commits(self) -> int:
        """The point where the run resumes, in words. A run's first commit is its starting point."""
        return max((self._record(worker).commits for worker in self._members), default=0)

    @property
    def _where_to_go_on(self) -> str:
        if self._commits > 1:
            return "from the last commit"
        if self._commits:
            return f"from {BEGINNING}"
        return "without it: nothing was trained yet"

    @property
    def _is_joining(self) -> bool:
        """Whether some processes of the latest generation are not connected yet."""
        return any(self._record(worker).activity == Activity.JOINING for worker in self._members
                   if worker in self._processes.running)

    def _begin_again(self) -> None:
        """Restart all processes. Horovod would wait for the process that was lost while the processes connected, and
        then end the others.
        """
        members = [worker for worker in self._members if worker in self._processes.running]
        self._processes.kill(members)
        for worker in members:
            worker.process.wait()
            self._ended.append(worker)
            self._start(worker.slot)
        self._members = []

    def _give_up(self, code: int, sentence: str) -> None:
        print_error(sentence, apart=True)
        self._code = code
        self._processes.kill()

    def _bring_back(self) -> None:
        for number, when in list(self._returns.items()):
            if time.monotonic() >= when and not (self._is_over or self._processes.is_to_stop):
                del self._returns[number]
                self._start(self._slots[number])

    # --- ranks ---

    def _let_in(self) -> None:
        """Once no further process is expected at the door, give ranks to all processes that wait there, and let them
        connect.
        """
        running = self._processes.running
        waiting = [worker for worker in running if self._record(worker).activity == Activity.AT_DOOR]
        inside = [worker for worker in self._members if worker in running and worker not in waiting]
        if inside:
            for member in inside:
                self._record(member).recalled = bool(waiting)
            return
        is_first = not self._members
        if not waiting or (is_first and len(waiting) < len(running)):
            return
        if len(waiting) < self._min_processes and not self._is_over:
            return
        # Processes that know the run's state get the first ranks, because rank 0 sends the state to the others.
        knowing = [worker for worker in self._members if worker in waiting]
        self._members = knowing + [worker for worker in waiting if worker not in knowing]
        self._generation += 1
        self._server.init(list(self._ranks().values()))
        for rank, worker in enumerate(self._members):
            record = self._record(worker)
            record.rank, record.size, record.recalled = rank, len(self._members), 0
            # set here, because the process may be lost before it sets the activity itself
            record.activity = Activity.JOINING
            record.generation = self._generation

    def _ranks(self) -> dict[str, SlotInfo]:
        """The ranks of the latest generation, by host. For Horovod each slot is a separate host."""
        size = len(self._members)
        return {_host(worker.slot): SlotInfo(hostname=_host(worker.slot), rank=rank, size=size, local_rank=0,
                                             local_size=1, cross_rank=rank, cross_size=size)
                for rank, worker in enumerate(self._members)}


def _host(slot: Slot) -> str:
    return f"slot{slot.number}"
