"""Starts the processes of a run on this machine, one for each GPU: `scripts/dgx1_8gpu.sh`, or `python -m
train.processes.launch`.

The launcher works like horovodrun with Gloo, with these differences: it checks the GPUs first, and binds each process
to the cores of its GPU's NUMA node; the terminal belongs to rank 0 (progress bar, no prefixes); signals reach all
processes; the exit code is that of the process that failed first. With several machines horovodrun starts `python -m
train.processes.launch` for each process (scripts/multi_host.sh), which then only binds itself to its cores and becomes
`python -m train`.
"""

from __future__ import annotations

import signal

from train.processes.signals import STOPPED_EARLY, ending_with, leave_at, see_through

if __name__ == "__main__":
    leave_at(signal.SIGINT, signal.SIGTERM)

import argparse
import importlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NoReturn

from common.command_line import Positive, exit_code_of, given_and_rest, given_value
from common.errors import EXIT_USER_ERROR
from common.output import make_lasting, print_error
from common.program import LAUNCH, PROGRAMS, TRAIN, own_process
from train.command_line import COMMANDS, understood
from train.errors import EXIT_HUNG_PROCESS, EXIT_LOST_PROCESS, NoHorovodError, TrainError
from train.processes import guard, topology
from train.processes.invocation import (
    LAUNCHER_VARIABLE,
    ROOT,
    check_code,
    is_of_several,
    is_own_environment,
    naming_machine,
    script,
)
from train.processes.watch import DEFAULT_SECONDS
from train.processes.worker import (
    GRACE_SECONDS,
    POLL_SECONDS,
    STOPPED,
    TOLD,
    WAY_OUT,
    EndedHang,
    Processes,
    Slot,
    Worker,
    exit_code,
    on_this_machine,
)

MAX_PROCESSES = 8  # without -n: a DGX-1 has 8 GPUs
# A killed process is gone only after its threads have ended, one by one. A process that crashed because of the kill may
# be gone earlier.
SETTLING_SECONDS = 0.2


def _seconds(text: str) -> int:
    if not text.isdecimal() or int(text) > 3600:
        raise argparse.ArgumentTypeError(f"needs whole seconds from 0 to 3600, not {text!r}")
    return int(text)


@dataclass(frozen=True)
class LaunchOptions:
    """Train on several GPUs of this machine, or in several processes on a machine without one (Horovod: NCCL or Gloo).

    The learning rate is given for a global batch of 256 images; the program scales it with PROCESSES x BATCH_SIZE.
    python -m train train --help lists its options. In a checkout the script also takes -p NAME, the settings of
    scripts/platforms/NAME.sh, and PYTHON=/path/to/python uses that environment instead of .venv. Example, two processes
    on a CPU:

      scripts/dgx1_8gpu.sh -n 2 -b 16 -e 8 --config cpu_sample
    """

    processes: Annotated[Positive | None, "-n"] = None
    """Number of processes, one per GPU; default: the number of GPUs, or else of cores, at most 8."""
    batch_size: Annotated[Positive | None, "-b"] = None
    """Images per process in a forward pass; default: the preset's."""
    epochs: Annotated[Positive | None, "-e"] = None
    """Passes over the training images; default: the preset's."""
    min_np: Positive | None = None
    """Elastic: when a process is lost, resume from the last commit as long as this many are left."""
    cooldown: Annotated[int, _seconds, "SECONDS"] = 0
    """Elastic: restart a lost process after about this many seconds, longer each time; 0: never."""
    hang_seconds: Annotated[int, _seconds, "SECONDS"] = DEFAULT_SECONDS
    """Kill a process that shows no sign of life for this long while the others wait for it; 0: never. The limit is ten
    times its longest step if that is more, and fifteen times as long for work done once, such as compiling."""


def plan(num_processes: int | None, on_cpu: bool) -> tuple[list[Slot], list[str]]:
    """The slots of the processes, and remarks for the user. Raises TrainError if a request cannot be met."""
    gpus = [] if on_cpu else topology.read_gpus()
    count = num_processes or min(len(gpus) or len(os.sched_getaffinity(0)), MAX_PROCESSES)
    if gpus:
        notes = topology.check(gpus, count)
    else:
        notes = [] if on_cpu else ["no NVIDIA GPU is visible here, so the processes train on the CPU"]
    shares = topology.assign_cores(gpus, count)
    slots = [Slot(i, gpus[i] if gpus else None, cores, bound=bool(gpus)) for i, cores in enumerate(shares)]
    return slots, notes


def launch_elastic(slots: Sequence[Slot], command: Sequence[str], min_processes: int, cooldown: int = 0,
                   hang_seconds: float = DEFAULT_SECONDS) -> int:
    """Run a command in a process for each slot, and return the exit code. When a process is lost, the others continue
    as long as `min_processes` are left. A lost process is restarted after `cooldown` seconds, and after twice as long
    each further time; 0: no restart.

    Raises TrainError if Horovod is missing, and StoppedBySignal if a signal arrives during the start.
    """
    with ending_with(STOPPED_EARLY):
        require_horovod(len(slots))
        from train.processes.elastic_launch import ElasticRun  # needs Horovod

        run = ElasticRun(slots, command, min_processes, cooldown, hang_seconds)
    return run.run()


def launch(slots: Sequence[Slot], command: Sequence[str], hang_seconds: float = DEFAULT_SECONDS) -> int:
    """Run `command` in a process for each slot, with its rank in the environment.

    Returns the exit code: 0, or the exit code of the first process that failed. After a failure or a hang (`Watch`,
    with `hang_seconds`) the other processes are ended.

    Raises TrainError if Horovod is missing, and StoppedBySignal if a signal arrives during the start.
    """
    with ending_with(STOPPED_EARLY):
        require_horovod(len(slots))
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.gloo_run import create_slot_env_vars
        from horovod.runner.http.http_server import RendezvousServer

        ranks = get_host_assignments(parse_hosts(f"localhost:{len(slots)}"), len(slots))
        server = RendezvousServer()
        common = {**on_this_machine(hang_seconds), "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.start()),
                  "HOROVOD_ELASTIC": "0"}  # overrides a value left by another run
        server.init(ranks)
        processes = Processes(slots, command, hang_seconds)
    try:
        with processes.in_charge():
            for rank, slot in zip(ranks, slots, strict=True):
                processes.start(slot, {**common, **create_slot_env_vars(rank)})
            return _wait(processes)
    finally:
        server.stop()


def _wait(processes: Processes) -> int:
    """Wait until all processes have ended, until GRACE_SECONDS after the first failure, or until a second request to
    stop.

    A process that stopped on request has not failed, because process 0 may still be writing the report. A process that
    was killed after such a request has not failed either. If the run fails, a message about the process at fault is
    printed: its end, or that it hung. This message comes after the messages of Horovod and of the other processes.
    These fail because of that process, perhaps even before it is gone. Nothing is printed for a process that a
    forwarded signal ended during its start.
    """
    failed: list[Worker] = []  # in the order of detection
    hang: EndedHang | None = None
    deadline = float("inf")

    def seen() -> list[Worker]:
        return [worker for worker in processes.all if worker.process.returncode and worker not in failed
                and worker.process.returncode not in STOPPED and not processes.has_done_its_part(worker)]

    while time.monotonic() < deadline:
        running = processes.running
        if seen() and not failed:
            time.sleep(SETTLING_SECONDS)
            running = processes.running
        # A killed process may crash another one before the next check, because MXNet records errors without a lock. So
        # the killed process is sorted first.
        failed += sorted(seen(), key=lambda worker: worker.process.returncode != -signal.SIGKILL)
        if (failed or processes.must_end) and deadline == float("inf"):
            deadline = time.monotonic() + GRACE_SECONDS
        if not running:
            break
        if not (failed or hang) and (hang := processes.end_hang()):
            deadline = time.monotonic() + GRACE_SECONDS
        time.sleep(POLL_SECONDS)
    if hang:
        print_error(f"{hang.sentence}, so the run ends; {WAY_OUT}", apart=True)
        return EXIT_HUNG_PROCESS
    if processes.running and not failed:
        return 128 + processes.signals[-1]
    if not failed:
        return max(0, *(worker.process.returncode for worker in processes.all))
    culprit = next((worker for worker in failed if worker.process.returncode != EXIT_LOST_PROCESS), failed[0])
    code = culprit.process.returncode
    if code not in TOLD and -code not in processes.signals:
        print_error(processes.end_of_run(culprit.last_words()), apart=True)
    return exit_code(code)


def require_horovod(num_processes: int | str) -> None:
    """Raise TrainError if Horovod cannot work: this machine's name has no address, or Horovod is missing. The project's
    own environment first tries to install it."""
    topology.check_host_name()
    if "PYTHON" not in os.environ and is_own_environment() and not (ROOT / ".venv" / ".ready-horovod").exists():
        if subprocess.run(["bash", str(ROOT / "scripts" / "setup.sh"), "horovod"]).returncode:
            sys.exit(EXIT_USER_ERROR)  # the installer has printed the reason
        importlib.invalidate_caches()
    try:
        import horovod.runner.gloo_run  # noqa: F401  # slow to import
    except ImportError as error:
        raise NoHorovodError(num_processes, error) from None


# --- the command line ---


def parse(arguments: Sequence[str]) -> tuple[LaunchOptions, list[str]]:
    """The launcher's own options, and the arguments for `python -m train`. Raises UserError for an invalid value."""
    values, passed = given_and_rest(LaunchOptions, arguments, prog=PROGRAMS[LAUNCH].script,
                                    rest="any option of python -m train")
    own = LaunchOptions(**values)
    end = passed.index("--") if "--" in passed else len(passed)  # file names follow "--"
    passed[end:end] = [word for option, value in (("--batch-size", own.batch_size), ("--epochs", own.epochs))
                       if value is not None for word in (option, str(value))]
    if own.min_np and own.processes and own.min_np > own.processes:
        raise TrainError(f"--min-np {own.min_np} is more than the {own.processes} processes of -n; lower --min-np")
    if own.cooldown and not own.min_np:
        raise TrainError("--cooldown is for elastic runs; give --min-np too, or leave it out")
    return own, passed


def main(arguments: Sequence[str]) -> int:
    own, passed = parse(arguments)
    on_cpu = given_value(passed, "--device") == "cpu"
    command = own_process(*passed or [TRAIN])
    if "HOROVOD_LOCAL_RANK" in os.environ and is_of_several():  # horovodrun has started this process
        with naming_machine():
            check_code()
            topology.check_host_name()
            slots, _ = plan(int(os.environ["HOROVOD_LOCAL_SIZE"]), on_cpu)
        guard.end_with_output()
        _become(command, slots[int(os.environ["HOROVOD_LOCAL_RANK"])])
    name, _ = understood(passed)  # reports a user's mistake once, before Horovod is compiled
    if COMMANDS[name].outlasts_output:
        make_lasting()
    slots, notes = plan(own.processes, on_cpu)
    if own.min_np and own.min_np > len(slots):
        raise TrainError(f"--min-np {own.min_np} is more than the {len(slots)} processes here; lower --min-np")
    for line in (*map(str, slots), *notes):
        print(line, flush=True)
    variables = [f"{name}={value}" for name, value in slots[0].environment.items()]
    print(shlex.join([*variables, "python", *command[1:]]), flush=True)
    elastic = f" --min-np {own.min_np}" + f" --cooldown {own.cooldown}" * bool(own.cooldown) if own.min_np else ""
    patience = f" --hang-seconds {own.hang_seconds}" * (own.hang_seconds != DEFAULT_SECONDS)
    os.environ[LAUNCHER_VARIABLE] = f"{script(LAUNCH)} -n {len(slots)}{elastic}{patience}"
    if len(slots) == 1 and not own.min_np:
        _become(command, slots[0])  # a single process needs neither Horovod nor this launcher
    if own.min_np:
        return see_through(partial(launch_elastic, slots, command, own.min_np, own.cooldown, own.hang_seconds))
    return see_through(partial(launch, slots, command, own.hang_seconds))


def _become(command: list[str], slot: Slot) -> NoReturn:
    """Bind this process to its cores and replace it by `command`."""
    if slot.bound:
        os.sched_setaffinity(0, slot.cores)
    os.execve(command[0], command, {**os.environ, **slot.environment})


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
