"""Ends the processes of a run whose launcher has been killed: `python -m train.processes.guard`, the launcher's child.
(Not the guard in signals.py, which every process has for itself.)

Each process gets SIGTERM when its launcher is gone (PR_SET_PDEATHSIG), saves a checkpoint and ends. But a stopped
process receives no signal, and a hanging process blocks all others. So the guard wakes stopped processes, watches the
processes as the launcher did, and kills a process that hangs.

A process that horovodrun has started over ssh has no launcher on its machine. Its output goes through sshd to the
launcher, and `end_with_output` ends the process when nobody reads this output any more.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import time

from common.program import GUARD, own_process
from train.processes.signals import end_with_parent
from train.processes.watch import Watch, status

POLL_SECONDS = 0.1
ANSWER_SECONDS = 10  # seconds for a launcher to accept a connection
SECONDS_TO_SAVE = 60  # seconds for a process to save and report after a request to stop


class Guard:
    """The launcher's handle of its guard process."""

    def __init__(self, watch: Watch) -> None:
        command = own_process(GUARD, str(watch.descriptor), str(len(watch.records)), str(watch.seconds))
        # In its own session it does not receive signals to the run's process group.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(watch.descriptor,),
                                         start_new_session=True)

    def add(self, number: int, pid: int) -> None:
        """Add a process, whose record has this number, to the processes that the guard watches."""
        with contextlib.suppress(BrokenPipeError):  # the guard was killed; the run can continue without a guard
            assert self._process.stdin
            self._process.stdin.write(f"{number} {pid}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """End the guard, after all processes have ended."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()


def main(descriptor: int, count: int, seconds: float) -> None:
    watch = Watch(count, seconds, descriptor)
    processes: dict[int, tuple[int, int]] = {}  # record's number -> process id and its start time
    for line in sys.stdin:  # the loop ends when the launcher has ended
        number, pid = map(int, line.split())
        if found := status(pid):
            processes[number] = pid, found.started
    while left := {number: pid for number, (pid, started) in processes.items() if _is_there(pid, started)}:
        hang = watch.look(left)
        for number, pid in left.items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if hang and number in hang.processes else signal.SIGCONT)
        time.sleep(POLL_SECONDS)


def end_with_output() -> None:
    """From now on, end this process when its standard output loses its reader, also after an exec: with SIGTERM, and
    with SIGKILL if the process still exists SECONDS_TO_SAVE later. Does nothing if the output is neither a pipe nor a
    socket.

    In an elastic run whose launcher still exists, the process gets only SIGKILL, because SIGTERM would stop the other
    processes too.
    """
    process, output = os.getpid(), sys.stdout.fileno()
    mode = os.fstat(output).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)) or os.fork():
        return
    try:
        end_with_parent(signal.SIGKILL)
        os.setsid()
        if os.getppid() == process:
            _end_without_reader(process, output)
    finally:
        os._exit(0)


def _end_without_reader(process: int, output: int) -> None:
    """Wait until a descriptor has lost its reader, then end the process."""
    reader = select.poll()
    reader.register(output, 0)  # with no event mask, poll reports only errors: a lost reader is one
    reader.poll()
    if not _others_go_on():
        os.kill(process, signal.SIGTERM)
    time.sleep(SECONDS_TO_SAVE)
    os.kill(process, signal.SIGKILL)


def _others_go_on() -> bool:
    """Whether this is an elastic run whose launcher still exists."""
    if os.environ.get("HOROVOD_ELASTIC") != "1":
        return False
    place = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    try:
        socket.create_connection(place, ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def _is_there(pid: int, started: int) -> bool:
    found = status(pid)
    return found is not None and found.started == started


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
