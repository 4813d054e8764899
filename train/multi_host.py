"""Starts a run on several machines: `scripts/multi_host.sh`, or `python -m train.multi_host`.

horovodrun starts the processes over ssh, each as `python -m train.launch`, which binds itself to the cores beside its
GPU and becomes `python -m train`. Here is what horovodrun is asked for, and what is said where it fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

from common.command_line import Parser, exit_code_of, positive_int
from common.errors import ProgramError
from train.errors import NoHorovodError, TrainError
from train.invocation import LAUNCHER_VARIABLE
from train.launch import TOLD

HELP = """usage: scripts/multi_host.sh -H HOST:GPUS,HOST:GPUS... [-b BATCH] [-e EPOCHS] [any option of python -m train]
       scripts/multi_host.sh --host-discovery-script FILE --min-np N ...       elastic: machines may come and go

Train on the GPUs of several machines: horovodrun starts the processes over ssh (Gloo to agree, NCCL for the gradients).

  -H HOST:GPUS,...    machines, and how many processes each gets   (default in a SLURM job: its machines and their GPUs)
  -n N                processes                                    (default: all of -H)
  -b, -e, -p          as scripts/dgx1_8gpu.sh -h tells
  -h, --help          this help; python -m train train --help lists all further options

  --host-discovery-script FILE, --min-np N, --max-np N, --blacklist-cooldown-range LOW HIGH, --network-interface NAMES,
  --ssh-port PORT     as horovodrun --help tells

Needed: this folder and its .venv at the same path on every machine, the data too, and ssh without a password. FILE
prints one line HOST:GPUS for each machine that is there; Horovod asks it every second."""


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """The options here; those of horovodrun among them once more, as words; the arguments of `python -m train.launch`.
    Raises UserError for a wrong value."""
    parser = Parser(prog="scripts/multi_host.sh", add_help=False)
    parser.add_argument("-H", dest="hosts", default="")
    parser.add_argument("-n", type=positive_int, dest="processes")
    parser.add_argument("-h", "--help", action="store_true")
    passed_on = [parser.add_argument(name) for name in ("--host-discovery-script", "--network-interface")]
    passed_on += [parser.add_argument(name, type=positive_int) for name in ("--min-np", "--max-np", "--ssh-port")]
    passed_on.append(parser.add_argument("--blacklist-cooldown-range", nargs=2, type=positive_int))
    own, passed = parser.parse_known_args(arguments)
    words = []
    for option in passed_on:
        if value := getattr(own, option.dest):
            words += [option.option_strings[0], *map(str, value if isinstance(value, list) else [value])]
    return own, words, passed


def read_hosts(own: argparse.Namespace) -> dict[str, int]:
    """Processes that each machine can have. Raises TrainError where nothing names machines."""
    script = own.host_discovery_script
    if script:
        if not os.access(script, os.X_OK):
            raise TrainError(f"the host discovery script {script} is not there or not executable; "
                             "make it print HOST:GPUS lines")
        lines = subprocess.run(script, shell=True, stdout=subprocess.PIPE, text=True).stdout.split()
    elif own.hosts:
        lines = own.hosts.split(",")
    elif "SLURM_JOB_NODELIST" in os.environ:
        command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        gpus = os.environ.get("SLURM_GPUS_ON_NODE", "8")
        lines = [f"{name}:{gpus}" for name in subprocess.check_output(command, text=True).split()]
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
    if own.help:
        print(HELP)
        return 0
    hosts = read_hosts(own)
    available = sum(hosts.values())
    count = own.processes or available
    if not own.host_discovery_script:
        if count > available:
            raise TrainError(f"-n {count} is more than the {available} processes of the machines; lower it")
        words += ["-H", ",".join(f"{host}:{gpus}" for host, gpus in hosts.items())]
    if (own.host_discovery_script or own.min_np) and len(hosts) < 2 and not own.network_interface:
        raise TrainError(f"an elastic run over machines needs two of them to begin, or --network-interface, but there "
                         f"{'is' if hosts else 'are'} {len(hosts)}; on one machine use scripts/dgx1_8gpu.sh --min-np")
    command = [sys.executable, "-m", "train.launch", *passed]
    print(shlex.join(["horovodrun", "--gloo", "-np", str(count), *words, *command]), flush=True)
    if count > available:
        print(f"waiting for {count} processes; {own.host_discovery_script} names {available} so far", flush=True)
    os.environ[LAUNCHER_VARIABLE] = shlex.join(["scripts/multi_host.sh", "-n", str(count), *words])
    return horovodrun(["--gloo", "-np", str(count), *words, *command])


def horovodrun(arguments: Sequence[str]) -> int:
    """Its exit code: 0, or that of the first process that failed, whose last words this prints. Raises ProgramError
    where Horovod is missing, or finds the machines wanting."""
    try:
        from horovod.runner.common.util.timeout import TimeoutException
        from horovod.runner.launch import run_commandline
    except ImportError as error:
        raise NoHorovodError("several", error) from None
    sys.argv[1:] = arguments
    try:
        run_commandline()
    except (RuntimeError, ValueError, TimeoutException) as error:
        sentence = " ".join(str(error).split())
        failed = re.search(r"Process name: (\S+) Exit code: (\d+)", sentence)
        if not failed:
            hint = "; see that ssh to each of them works without a password" if "ssh" in sentence else ""
            raise ProgramError(sentence + hint) from None
        process, code = failed[1], int(failed[2])
        if code not in TOLD:
            by_signal = code - 128 in set(signal.Signals)
            end = f"was killed by {signal.Signals(code - 128).name}" if by_signal else f"failed with exit code {code}"
            print(f"error: process {process} {end}, so the run ends; its last checkpoint, if there is one, is whole: "
                  "go on with --resume and the run's folder", file=sys.stderr, flush=True)
        return code
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
