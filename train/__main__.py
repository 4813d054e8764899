"""The entry point: parse the command line, then import and run the command. `python -m train --help` lists the
commands.
"""

from __future__ import annotations

import signal

from train.processes.signals import STOPPED_EARLY, StoppedBySignal, guard, interrupt, is_first, leave_at

if __name__ == "__main__":
    leave_at(signal.SIGINT)

import gc
import os
import sys
from collections.abc import Sequence
from functools import partial

from common.command_line import HELP, VERSION, VERSIONS, describe_commands, exit_code_of
from common.errors import ProgramError
from common.output import make_lasting
from common.phases import IMPORTS, described, phases, process_seconds
from common.program import summaries
from train import run_folder
from train.command_line import COMMANDS, OF_ONE_PROCESS, PROG, command_options, understood, with_plugins
from train.errors import TrainError
from train.presets import presets
from train.processes.invocation import is_of_several, naming_machine
from train.processes.pulse import pulse


def main(arguments: Sequence[str]) -> int:
    """Run a command and return the exit code. A user's mistake is printed on stderr as one sentence, and the exit code
    is then 2.
    """
    try:
        return exit_code_of(naming_machine()(partial(_run, arguments)))
    finally:
        run_folder.give_back()


def _run(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in HELP:
        print(describe_commands({**command_options(), **summaries()}, prog=PROG, default="train",
                                note=f"Presets: {', '.join(presets())}."))
        return 0
    if arguments and arguments[0] == VERSION:
        VERSIONS.load()()
        return 0
    try:
        name, values = understood(arguments)
        _check_processes(name)
        command = COMMANDS[name]
        if command.outlasts_output:
            make_lasting()
        if __name__ == "__main__":
            guard(speaks=is_first())  # called before the imports, because these start threads
        phases.begin()
        run = command.load()
        if __name__ == "__main__":
            signal.signal(signal.SIGINT, interrupt)
            phases.begin(process_seconds(), spent_on=IMPORTS)
        profiled = values.pop("profile_start", False)
        run(with_plugins(values))
        if profiled and is_first():
            print(described(phases.take(), phases.total), file=sys.stderr)
        if __name__ == "__main__":
            # the work is done: from here on Ctrl-C ends the process silently
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except TrainError as error:
        if is_first() or not error.on_all_ranks:
            raise
        return error.exit_code  # rank 0 prints the error
    except StoppedBySignal as stop:
        if is_first():
            print(stop, flush=True)
        return stop.exit_code
    except KeyboardInterrupt:
        if command.outlasts_output and not pulse.has_stepped and is_first():
            print(STOPPED_EARLY, file=sys.stderr, flush=True)
        raise
    except MemoryError as error:
        raise ProgramError(f"the machine has too little memory for this run ({error or 'MemoryError'}): lower "
                           "--batch-size or --num-threads, or start fewer processes") from None
    return 0


def _check_processes(name: str) -> None:
    """Raise TrainError, on all ranks, if the command cannot work in several processes or in an elastic run."""
    if name in OF_ONE_PROCESS and is_of_several() and int(os.environ["HOROVOD_SIZE"]) > 1:
        raise TrainError(f"{name} works in a single process: use {PROG} {name}", on_all_ranks=True)
    if name != "train" and os.environ.get("HOROVOD_ELASTIC") == "1":
        raise TrainError(f"--min-np is for training with images: {name} cannot continue after it has lost a process; "
                         "leave out --min-np", on_all_ranks=True)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # otherwise the garbage collector would scan all objects several times at exit, which takes a quarter of a second
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)
