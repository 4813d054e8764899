"""Shows what the passes do to a network; see `python -m graph_passes show --help`."""

from __future__ import annotations

import sys
from functools import partial

from common.command_line import Command, exit_code_of, run_command
from graph_passes.options import ShowOptions

COMMANDS = {"show": Command(ShowOptions, "graph_passes.show:show")}


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code. A user's mistake is printed as one sentence, and the exit code is then
    2.
    """
    return exit_code_of(partial(run_command, COMMANDS, arguments, prog="python -m graph_passes"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
