"""Data preparation and inspection: `python -m pipelines COMMAND --help`."""

from __future__ import annotations

import sys
from functools import partial

from common.command_line import Command, exit_code_of, run_command
from pipelines.options import BenchOptions, MakeRecordsOptions, MakeSamplesOptions, ShowOptions, VerifyOptions

COMMANDS = {
    "make-records": Command(MakeRecordsOptions, "pipelines.commands:make_records"),
    "verify": Command(VerifyOptions, "pipelines.commands:verify"),
    "bench": Command(BenchOptions, "pipelines.commands:bench"),
    "show": Command(ShowOptions, "pipelines.commands:show"),
    "make-samples": Command(MakeSamplesOptions, "pipelines.commands:make_sample_set"),
}


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code. A user's mistake is printed as one sentence, and the exit code is then
    2.
    """
    return exit_code_of(partial(run_command, COMMANDS, arguments, prog="python -m pipelines"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
