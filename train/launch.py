"""Starts several processes of `python -m train` on this machine: `python -m train.launch NUM_PROCESSES ARGUMENTS`.

As horovodrun does with Gloo, but the terminal stays rank 0's (progress bar, no prefixes), signals reach all processes,
and the exit code is that of the first process that failed. Over several machines use horovodrun itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from train.errors import TrainError

LOOPBACK = {"HOROVOD_GLOO_IFACE": "lo", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo"}
GRACE_SECONDS = 3.0  # for the others to end by themselves when one process has failed
POLL_SECONDS = 0.05


def launch(num_processes: int, command: Sequence[str]) -> int:
    """Run `command` in so many processes, each with its rank in the environment.

    Returns the exit code: 0, or that of the first process that failed, whereupon the others are ended.

    Raises TrainError where Horovod is missing.
    """
    try:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.gloo_run import create_slot_env_vars
        from horovod.runner.http.http_server import RendezvousServer
    except ImportError as error:
        raise TrainError(
            f"{num_processes} processes need Horovod, which is not installed here ({error}): install g++ and make setup"
        ) from None
    slots = get_host_assignments(parse_hosts(f"localhost:{num_processes}"), num_processes)
    server = RendezvousServer()
    port = server.start()
    server.init(slots)
    common = {**os.environ, **LOOPBACK, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
              "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}  # fmt: skip
    workers = [_start(command, {**common, **create_slot_env_vars(slot)}) for slot in slots]

    def forward(number: int, frame: object) -> None:
        for worker in workers:
            worker.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group by itself
    try:
        return _wait(workers)
    finally:
        for worker in workers:
            worker.kill()
        server.stop()


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environment)


def _wait(workers: Sequence[subprocess.Popen[bytes]]) -> int:
    """Until all have ended, or until GRACE_SECONDS after the first one that failed."""
    failure, deadline = 0, float("inf")
    while time.monotonic() < deadline:
        codes = [worker.poll() for worker in workers]
        if not failure and any(codes):
            failure = next(code for code in codes if code)
            deadline = time.monotonic() + GRACE_SECONDS
        if None not in codes:
            break
        time.sleep(POLL_SECONDS)
    return 128 - failure if failure < 0 else failure  # a shell's code for a process that a signal ended


def main(arguments: Sequence[str]) -> int:
    if not arguments or not arguments[0].isdecimal() or int(arguments[0]) < 1:
        print("error: usage: python -m train.launch NUM_PROCESSES ARGUMENTS_OF_TRAIN", file=sys.stderr)
        return 2
    try:
        return launch(int(arguments[0]), [sys.executable, "-m", "train", *arguments[1:]])
    except TrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
