"""Ends the processes of a run whose launcher has been killed: `python -m train.processes.guard`, the launcher's child.
(The guard of signals.py is another one, which each process has for itself.)

Each process gets SIGTERM by itself when its launcher is gone (PR_SET_PDEATHSIG), saves a checkpoint and ends. One that
is stopped takes no signal, and one that hangs holds up all. So this wakes those that are stopped, watches the others as
the launcher did, and kills what hangs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from common.program import GUARD, own_process
from train.processes.watch import Watch, status

POLL_SECONDS = 0.1


class Guard:
    """The guard of this process's own processes."""

    def __init__(self, watch: Watch) -> None:
        command = own_process(GUARD, str(watch.descriptor), str(len(watch.records)), str(watch.seconds))
        # In a session of its own no signal to the run's process group reaches it.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(watch.descriptor,),
                                         start_new_session=True)

    def add(self, number: int, pid: int) -> None:
        """It is to know of a process, whose record has this number."""
        with contextlib.suppress(BrokenPipeError):  # somebody has ended it, and the run does not need it
            assert self._process.stdin
            self._process.stdin.write(f"{number} {pid}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Its processes have ended."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()


def main(descriptor: int, count: int, seconds: float) -> None:
    watch = Watch(count, seconds, descriptor)
    processes: dict[int, tuple[int, int]] = {}  # by number: process id, and when it started
    for line in sys.stdin:  # until the launcher has ended
        number, pid = map(int, line.split())
        if found := status(pid):
            processes[number] = pid, found.started
    while left := {number: pid for number, (pid, started) in processes.items() if _is_there(pid, started)}:
        hang = watch.look(left)
        for number, pid in left.items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if hang and number in hang.processes else signal.SIGCONT)
        time.sleep(POLL_SECONDS)


def _is_there(pid: int, started: int) -> bool:
    found = status(pid)
    return found is not None and found.started == started


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
