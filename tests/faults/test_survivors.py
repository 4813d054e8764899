"""Processes that survive the loss of another process of their run: the loss must not end any of them.

The tests use Horovod's `Workers` alone, without a network, so that a loss takes a second and interrupts many operations
at once. RESNET_FAULT_TRIES=250 loses 500 processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from importlib.util import find_spec

import numpy as np
import pytest
from faulty import PATIENCE, REPOSITORY, TRIES

pytestmark = pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed (no g++ at set-up)")

FEW = 3  # losses per test in `make test-long`, with three and with four processes
GLOO_SECONDS = 60  # shorter than Gloo's time-out: a process that relies on it, or hangs, has not ended by then
# For each loss, this process, which has imported everything, forks several others. They average 40 groups of arrays
# until one is killed at a random moment. Prints seconds and exit codes of each loss as JSON.
SCRIPT = """
    import json, os, random, signal, sys, threading, time
    from common.mxnet_compat import mx
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer
    from train.processes.distributed import Workers, drain_engine, is_lost_process
    from train.processes.horovod_mxnet import hvd
    from train.processes.worker import on_this_machine

    def fork(work, *arguments):
        pid = os.fork()
        if pid:
            return pid
        code = 3
        try:
            code = work(*arguments)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def serve(places, pipe):
        server = RendezvousServer()
        port = server.start()
        server.init(places)
        os.write(pipe, str(port).encode())
        while True:
            time.sleep(1)

    def die_in(seconds):
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    def work(seconds, sizes):
        '''Average until a process is lost; `seconds`: of the one that is, after which it is killed, else 0.'''
        workers = Workers()
        workers.gather("all are here")
        if seconds:
            threading.Thread(target=die_in, args=[seconds]).start()
        groups = [[mx.nd.full((size,), workers.rank) for size in group] for group in sizes]
        try:
            while True:
                for number, group in enumerate(groups):
                    workers.all_reduce(group, f"group{number}")
                workers.vote([False])
        except Exception as error:
            if not is_lost_process(error):
                raise
        drain_engine()
        hvd.shutdown()
        return 0

    def wait(pid, deadline):
        '''Its exit code, or "hangs".'''
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "hangs"

    def lose_one(count, limit, chance):
        sizes = [[chance.randrange(1, 5000) for _ in range(3)] for _ in range(40)]
        victim, seconds = chance.randrange(count), chance.uniform(0.001, 0.15)
        places = [SlotInfo(f"slot{rank}", rank, 0, rank, count, 1, count) for rank in range(count)]
        reading, writing = os.pipe()
        server = fork(serve, places, writing)
        port = os.read(reading, 10).decode()
        begin, pids = time.monotonic(), []
        for rank, place in enumerate(places):
            os.environ.update(**on_this_machine(0), **create_slot_env_vars(place), HOROVOD_GLOO_RENDEZVOUS_PORT=port)
            pids.append(fork(work, seconds * (rank == victim), sizes))
        codes = [wait(pid, begin + limit) for pid in pids]
        print(json.dumps({"seconds": time.monotonic() - begin, "codes": codes, "victim": victim}), flush=True)
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        os.close(reading)
        os.close(writing)

    seed, losses, count, limit = map(int, sys.argv[1:])
    chance = random.Random(seed)
    for _ in range(losses):
        lose_one(count, limit, chance)
"""


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("losses", [
    pytest.param(FEW, marks=pytest.mark.long), pytest.param(max(TRIES - FEW, 1), marks=pytest.mark.slow)])
def test_a_loss_takes_no_other_process_with_it(rng: np.random.Generator, count: int, losses: int) -> None:
    """One of three or four processes is killed (SIGKILL) during many collective operations."""
    # MALLOC_PERTURB_ overwrites freed memory, so that reading it fails. Several threads of MXNet see operations fail.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
                   "OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_SECONDS),
                   "MALLOC_PERTURB_": str(rng.integers(1, 256)), "MXNET_CPU_WORKER_NTHREADS": "4"}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(rng.integers(2**31)), str(losses), str(count),
               str(GLOO_SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE + 2 * losses)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    print(f"{losses} losses, the slowest noticed after {max(loss['seconds'] for loss in found):.1f} s")
    assert len(found) == losses
    for loss in found:
        expected = [-signal.SIGKILL if rank == loss["victim"] else 0 for rank in range(count)]
        assert loss["codes"] == expected, f"{loss} {done.stderr[-2000:]}"
