"""Starts a run on several machines: `scripts/multi_host.sh`, or `python -m train.processes.multi_host`.

horovodrun starts the processes over ssh, each as `python -m train.processes.launch`, which binds itself to the cores
beside its GPU and becomes `python -m train`. This module checks the machines, builds the call of horovodrun and
reports its failures.
"""

from __future__ import annotations

import signal

from train.processes.signals import STOPPED_EARLY, ending_with, leave_at, see_through

if __name__ == "__main__":
    leave_at(signal.SIGINT, signal.SIGTERM)

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from common.command_line import Positive, exit_code_of, given_and_rest, part_of, to_arguments
from common.errors import EXIT_FAILURE, ProgramError
from common.output import make_lasting, print_error
from common.program import LAUNCH, MULTI_HOST, PROGRAMS, own_process
from train.command_line import COMMANDS, understood
from train.errors import EXIT_LOST_PROCESS, TrainError
from train.processes import launch
from train.processes.guard import SECONDS_TO_SAVE
from train.processes.invocation import DIGEST_VARIABLE, LAUNCHER_VARIABLE, ROOT, code_digest, script
from train.processes.worker import TOLD, WAY_OUT, how_it_ended

# ssh closes a connection that is silent for 30 s, the time after which Gloo closes its connections.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", "ConnectTimeout=10",
       "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=6")
# The test that each machine runs before the training: import the module that Horovod starts first, and print the digest
# of the project's code.
PROBE = "import horovod.runner.task_fn; from train.processes.invocation import code_digest; print(code_digest())"
ANSWER_SECONDS = 60  # most seconds for a machine to run PROBE
EXIT_SSH = 255  # exit code of ssh itself, also if a signal has killed the remote process
if __name__ == "__mp_main__":  # in Horovod's helper processes, which start and end the processes of the run
    from horovod.runner.common.util import safe_shell_exec

    safe_shell_exec.GRACEFUL_TERMINATION_TIME_S = SECONDS_TO_SAVE


@dataclass(frozen=True)
class HorovodrunOptions:
    """Options of horovodrun."""

    host_discovery_script: Annotated[str, "FILE"] = ""
    """Elastic, with machines that come and go: a program that prints a line HOST:GPUS for each available machine.
    Horovod runs it every second."""
    min_np: Positive | None = None
    """Elastic: continue while this many processes are left."""
    max_np: Positive | None = None
    """Elastic: maximum number of processes."""
    blacklist_cooldown_range: tuple[Positive, Positive] | None = None
    """Elastic: shortest and longest time in seconds for which a failed machine is not used again."""
    network_interface: Annotated[str, "NAMES"] = ""
    """Network interfaces through which the machines reach each other."""
    ssh_port: Positive | None = None
    """ssh port of the other machines."""


@dataclass(frozen=True)
class MultiHostOptions(HorovodrunOptions):
    """Train on the GPUs of several machines: horovodrun starts the processes over ssh (Gloo for coordination, NCCL for
    the gradients).

    Required: this folder and its .venv at the same path on every machine, the data too, and ssh without a password. For
    -b, -e and -p see scripts/dgx1_8gpu.sh --help; python -m train train --help lists all further options.

      scripts/multi_host.sh -H node1:8,node2:8 --data data/imagenet
      scripts/multi_host.sh --host-discovery-script FILE --min-np N ...
    """

    hosts: Annotated[str, "HOST:GPUS,...", "-H"] = ""
    """Machines, with the number of processes on each; default: the machines and GPUs of the SLURM job."""
    processes: Annotated[Positive | None, "-n"] = None
    """Number of processes; default: all of -H."""


def parse(arguments: Sequence[str]) -> tuple[MultiHostOptions, list[str], list[str]]:
    """The parsed options; the options for horovodrun as words; the arguments for `python -m train.processes.launch`.
    Raises UserError for an invalid value."""
    values, passed = given_and_rest(MultiHostOptions, arguments, prog=PROGRAMS[MULTI_HOST].script,
                                    rest="any option of python -m train")
    if script := values.get("host_discovery_script"):  # a shell would search its PATH for a bare name
        values["host_discovery_script"] = str(Path(script).absolute())
    own = MultiHostOptions(**values)
    check_elastic(own)
    return own, to_arguments(part_of(HorovodrunOptions, values), HorovodrunOptions()), passed


def check_elastic(own: MultiHostOptions) -> None:
    """Raise TrainError if options of elastic runs contradict each other."""
    if (own.max_np or own.blacklist_cooldown_range) and not (own.min_np or own.host_discovery_script):
        raise TrainError("--max-np and --blacklist-cooldown-range are for elastic runs; give --min-np or "
                         "--host-discovery-script too, or leave them out")
    if own.min_np and own.max_np and own.min_np > own.max_np:
        raise TrainError(f"--min-np {own.min_np} is more than --max-np {own.max_np}; lower --min-np")
    first, last = own.blacklist_cooldown_range or (0, 0)
    if first > last:
        raise TrainError(f"--blacklist-cooldown-range goes from {first} to {last} seconds; give the smaller one first")


def read_hosts(own: MultiHostOptions) -> dict[str, int]:
    """The number of processes for each machine. Raises TrainError if no machines are given."""
    script = own.host_discovery_script
    if script:
        if not (Path(script).is_file() and os.access(script, os.X_OK)):
            raise TrainError(f"the host discovery script {script} is not there or not executable; "
                             "give an executable file that prints lines of HOST:GPUS")
        done = subprocess.run(shlex.quote(script), shell=True, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise TrainError(f"the host discovery script {script} failed with exit code {done.returncode}; correct "
                             "it to print lines of HOST:GPUS")
        lines = done.stdout.split()
    elif own.hosts:
        lines = own.hosts.split(",")
    elif "SLURM_JOB_NODELIST" in os.environ:
        command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        gpus = os.environ.get("SLURM_GPUS_ON_NODE", "8")
        try:
            names = subprocess.check_output(command, text=True).split()
        except (OSError, subprocess.CalledProcessError) as error:
            raise TrainError(f"SLURM does not tell the machines of this job ({error}); give -H "
                             "HOST:GPUS,HOST:GPUS") from None
        lines = [f"{name}:{gpus}" for name in names]
    else:
        raise TrainError("which machines? give -H HOST:GPUS,HOST:GPUS or run inside a SLURM job")
    for line in lines:
        if not re.fullmatch(r"[^:]+:[1-9]\d*", line):
            raise TrainError(f"{script or '-H'} must name machines as HOST:GPUS, not {line!r}")
    hosts: Counter[str] = Counter()
    for host, gpus in (line.split(":") for line in lines):
        hosts[host] += int(gpus)
    return hosts


def main(arguments: Sequence[str]) -> int:
    own, words, passed = parse(arguments)
    _, of_run = launch.parse(passed)
    name, _ = understood(of_run)  # reports a user's mistake here, once
    if COMMANDS[name].outlasts_output:
        make_lasting()
    hosts = read_hosts(own)
    available = sum(hosts.values())
    count = own.processes or available
    if not own.host_discovery_script:
        if count > available:
            raise TrainError(f"-n {count} is more than the {available} processes of the machines; lower -n")
        words += ["-H", ",".join(f"{host}:{gpus}" for host, gpus in hosts.items())]
    if (own.host_discovery_script or own.min_np) and len(hosts) < 2 and not own.network_interface:
        raise TrainError(f"an elastic run over machines needs two machines to begin, or --network-interface, but there "
                         f"{'is' if hosts else 'are'} {len(hosts)}; on one machine use scripts/dgx1_8gpu.sh --min-np")
    if not count:
        raise TrainError(f"the host discovery script {own.host_discovery_script} names no machine yet; give -n, the "
                         "number of processes to wait for")
    os.environ[DIGEST_VARIABLE] = code_digest()
    os.environ[LAUNCHER_VARIABLE] = f"{script(MULTI_HOST)} {shlex.join(['-n', str(count), *words])}"
    # Horovod runs the script through a shell.
    words = [shlex.quote(word) if word == own.host_discovery_script else word for word in words]
    asked = ["--gloo", "-np", str(count), *words, *own_process(PROGRAMS[LAUNCH].word), *passed]
    print(shlex.join(["horovodrun", *asked]), flush=True)
    if count > available:
        print(f"waiting for {count} processes; {own.host_discovery_script} names {available} so far", flush=True)
    return see_through(partial(horovodrun, asked, hosts, own.ssh_port))


def horovodrun(arguments: Sequence[str], hosts: Mapping[str, int], ssh_port: int | None) -> int:
    """Run horovodrun and return the exit code: 0, or the exit code of the first process that failed. The reason for
    that failure is printed. Raises ProgramError if Horovod is missing or a machine cannot be used, and StoppedBySignal
    if a signal arrives during the start.
    """
    with ending_with(STOPPED_EARLY):
        launch.require_horovod("several")
        from horovod.runner.common.util.timeout import TimeoutException
        from horovod.runner.launch import run_commandline

        if faults := unusable(hosts, ssh_port):
            raise ProgramError(f"{'; '.join(faults)}: each machine needs ssh without a password from here, and "
                               f"{sys.executable} and the same commit in {ROOT} as here")
    _adapt_horovod(hosts, ssh_port)
    sys.argv[1:] = arguments
    try:
        with _noting_codes() as codes:
            run_commandline()
    except (RuntimeError, ValueError, TimeoutException) as error:
        sentence = " ".join(str(error).split())
        failed = re.search(r"Process name: (\S+) Exit code: (\d+)", sentence)
        if not failed:
            raise ProgramError("; ".join([sentence, *unusable(hosts, ssh_port)])) from None
        process, code = failed[1], int(failed[2])
        # in an elastic run, one process that has trained to the end is enough
        if not process.isdecimal() and 0 in codes:
            return 0
        if code not in TOLD or code == EXIT_LOST_PROCESS:
            faults = unusable(hosts, ssh_port)
            if faults or code != EXIT_LOST_PROCESS:
                why = "; ".join(faults) or f"{_name(process, hosts)} {_end(code)}"
                print_error(f"{why}, so the run ends; {WAY_OUT}", apart=True)
        return code
    return 0


def _adapt_horovod(hosts: Mapping[str, int], ssh_port: int | None) -> None:
    """Change three things in Horovod. It uses our options of ssh. It names a machine that fails while Horovod looks for
    network interfaces. It uses --network-interface even while this machine is the only one: otherwise Horovod would
    accept only the interface of 127.0.0.1, through which no other machine can join later.
    """
    from horovod.runner.driver import driver_service
    from horovod.runner.util import remote

    def end(code: int) -> None:
        why = "; ".join(unusable(hosts, ssh_port)) or "a machine has failed for the reason above"
        print_error(f"{why}, while the run was starting: start it again with the same command", apart=True)
        os._exit(EXIT_FAILURE)

    driver_service.os = SimpleNamespace(_exit=end)  # Horovod would end this process from a thread, without a message
    remote.SSH_COMMAND_PREFIX = shlex.join(SSH)
    of_this_machine = driver_service.get_local_interfaces
    driver_service.get_local_interfaces = lambda settings: settings.nics or of_this_machine(settings)


@contextlib.contextmanager
def _noting_codes() -> Iterator[list[int]]:
    """A context in which Horovod adds the exit code of each process that ends to the list."""
    from horovod.runner.common.util import safe_shell_exec

    codes: list[int] = []
    execute = safe_shell_exec.execute

    def noting(*words: Any, index: int | None = None, **options: Any) -> int:
        code = int(execute(*words, index=index, **options))
        if index is not None:  # a process without an index does not belong to the run
            codes.append(code)
        return code

    safe_shell_exec.execute = noting
    try:
        yield codes
    finally:
        safe_shell_exec.execute = execute


def unusable(hosts: Iterable[str], port: int | None) -> list[str]:
    """For each machine that cannot take part in a run, a sentence with the reason."""
    from horovod.runner.util.network import filter_local_addresses

    there = f"cd {shlex.quote(str(ROOT))} && exec {shlex.quote(sys.executable)} -c {shlex.quote(PROBE)}"
    ssh = [*SSH, *(["-p", str(port)] if port else [])]
    with contextlib.ExitStack() as started:
        probes = {}
        for host in filter_local_addresses(list(hosts)):
            probes[host] = started.enter_context(subprocess.Popen(
                [*ssh, host, there], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True))
            started.callback(probes[host].kill)  # kills the process first, because its exit handler waits for it
        end = time.monotonic() + ANSWER_SECONDS
        return [fault for host, probe in probes.items() if (fault := _fault(host, probe, end - time.monotonic()))]


def _fault(host: str, probe: subprocess.Popen[str], seconds: float) -> str:
    """The reason why a machine cannot take part in a run; "" if its probe succeeds within `seconds`."""
    try:
        out, err = probe.communicate(timeout=max(0, seconds))
    except subprocess.TimeoutExpired:
        return f"machine {host} does not answer within {ANSWER_SECONDS} s"
    if not probe.returncode:
        return "" if out.split()[-1:] == [code_digest()] else f"machine {host} has other code in {ROOT}"
    said = (err.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
    return f"machine {host} cannot {'be reached' if probe.returncode == EXIT_SSH else 'start the project'} ({said})"


def _name(process: str, hosts: Mapping[str, int]) -> str:
    """The name of a process for users. Horovod's name is the rank, or HOST[NUMBER] in an elastic run."""
    if not process.isdecimal():
        host, number = process.rstrip("]").split("[")
        return f"process {number} on {host}"
    machines = [host for host, count in hosts.items() for _ in range(count)]
    return f"process {process} on {machines[int(process)]}"


def _end(code: int) -> str:
    """How a process has ended, by the exit code that horovodrun has seen."""
    if code == EXIT_SSH:
        return "was killed, or its connection to this machine was lost"
    by_signal = code - 128 in set(signal.Signals)  # shells use 128 + the signal's number
    return how_it_ended(128 - code if by_signal else code)


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
