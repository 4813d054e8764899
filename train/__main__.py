"""The program: understand the command line, then import and run the command. `python -m train --help` lists them."""

from __future__ import annotations

import signal

from train.processes.signals import STOPPED_EARLY, StoppedBySignal, guard, interrupt, is_first, leave_at

if __name__ == "__main__":
    leave_at(signal.SIGINT)

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from common.command_line import HELP, VERSION, VERSIONS, Command, choose_command, describe_commands, exit_code_of
from common.errors import ProgramError, UserError
from common.output import make_lasting
from common.program import summaries
from train.command_line import read
from train.commands.options import (
    BenchmarkOptions,
    CompareOptions,
    ExportOptions,
    GpuReportOptions,
    PredictOptions,
    QuantizeOptions,
    ValidateOptions,
)
from train.config import Config
from train.errors import TrainError
from train.options.language_model import LanguageModelOptions
from train.presets import presets
from train.processes.invocation import is_of_several
from train.processes.pulse import pulse

# What each takes, and what is called with the values that the command line gives. The rest of this program is imported
# there: MXNet and DALI take seconds.
COMMANDS = {
    "train": Command(Config, "train.commands.train:main", outlasts_output=True),
    "validate": Command(ValidateOptions, "train.commands.validate:main"),
    "benchmark": Command(BenchmarkOptions, "train.commands.benchmark:main", outlasts_output=True),
    "compare-precision": Command(CompareOptions, "train.commands.compare_precision:main"),
    "gpu-report": Command(GpuReportOptions, "train.commands.gpu_report:main"),
    "language-model": Command(LanguageModelOptions, "train.commands.language_model:main", outlasts_output=True),
    "predict": Command(PredictOptions, "train.commands.predict:main"),
    "quantize": Command(QuantizeOptions, "train.commands.quantize:main"),
    "export": Command(ExportOptions, "train.commands.export:main"),
}
OF_ONE_PROCESS = ("compare-precision", "gpu-report", "quantize", "export")
PROG = "python -m train"


def main(arguments: Sequence[str]) -> int:
    """Run a command; returns the exit code. A user's mistake becomes one sentence on stderr and code 2."""
    return exit_code_of(partial(_run, arguments))


def _run(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in HELP:
        print(describe_commands({**_options(), **summaries()}, prog=PROG, default="train",
                                note=f"Presets: {', '.join(presets())}."))
        return 0
    if arguments and arguments[0] == VERSION:
        VERSIONS.load()()
        return 0
    try:
        command, values = understood(arguments)
        if command.outlasts_output:
            make_lasting()
        if __name__ == "__main__":
            guard(speaks=is_first())  # before the imports, which start threads
        run = command.load()
        if __name__ == "__main__":
            signal.signal(signal.SIGINT, interrupt)
        run(values)
        if __name__ == "__main__":
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is done: Ctrl-C finds nothing to tell
    except TrainError as error:
        if is_first() or not error.on_all_ranks:
            raise
        return error.exit_code  # rank 0 says why
    except StoppedBySignal as stop:
        if is_first():
            print(stop, flush=True)
        return stop.exit_code
    except KeyboardInterrupt:
        if command.outlasts_output and not pulse.has_stepped and is_first():
            print(STOPPED_EARLY, file=sys.stderr, flush=True)
        raise
    except MemoryError as error:
        raise ProgramError(f"the machine's memory does not hold this ({error or 'MemoryError'}): lower --batch-size or "
                           "--num-threads, or start fewer processes") from None
    return 0


def understood(arguments: Sequence[str]) -> tuple[Command, dict[str, Any]]:
    """The command that is asked for, and the values given for its options. Raises TrainError: all processes of a run
    have the same command line."""
    try:
        name, rest = choose_command(_options(), arguments, prog=PROG, default="train", others=summaries())
        if name in OF_ONE_PROCESS and is_of_several() and int(os.environ["HOROVOD_SIZE"]) > 1:
            raise UserError(f"{name} works in one process: use {PROG} {name}")
        if name != "train" and os.environ.get("HOROVOD_ELASTIC") == "1":
            raise UserError(f"--min-np is for training with images: {name} cannot go on without a process that is "
                            "lost; leave it out")
        return COMMANDS[name], read(COMMANDS[name].options, rest, command=name)
    except UserError as error:
        raise TrainError(str(error), on_all_ranks=True) from None


def _options() -> dict[str, type]:
    return {name: command.options for name, command in COMMANDS.items()}


if __name__ == "__main__":
    code = main(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)
