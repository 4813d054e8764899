"""The programs' names: how a user starts them, and how they start each other.

A checkout has `python -m train`, `python -m pipelines` and so on, and scripts. An installed package also has the
console command `resnet-mxnet`, which stands for all of them. The code names programs as a checkout does; help and
messages use the name that the user has typed (`as_typed`).
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("common", "train", "gpu_report", "pipelines", "graph_passes", "resnet_mxnet")
CONSOLE_COMMAND = "resnet-mxnet"
# Environment variable with the path of the console command, in its own process and in those that it starts.
CALLED_AS = "RESNET_CALLED_AS"

TRAIN = "train"  # its commands are the console command's own: `resnet-mxnet predict`
LAUNCH, MULTI_HOST, REPORT = "train.processes.launch", "train.processes.multi_host", "train.report.page"
GUARD = "train.processes.guard"  # no user starts it: its word is its module's name


class Program(NamedTuple):
    """A program as the console command has it: `resnet-mxnet WORD`."""

    word: str
    summary: str
    script: str = ""  # what starts it in a checkout, where that is not `python -m MODULE`


PROGRAMS = {  # by module
    "pipelines": Program("data", "Prepare and inspect images: convert, verify, measure, show"),
    "graph_passes": Program("passes", "Show what the graph passes do to a network"),
    LAUNCH: Program("launch", "Train on several GPUs of this machine, or in several processes", "scripts/dgx1_8gpu.sh"),
    MULTI_HOST: Program("multi-host", "Train on the GPUs of several machines", "scripts/multi_host.sh"),
    REPORT: Program("report", "Make the report of a run again, from its metrics"),
}
_SPELLINGS = {f"python -m {TRAIN}": CONSOLE_COMMAND} | {
    spelling: f"{CONSOLE_COMMAND} {program.word}" for module, program in PROGRAMS.items()
    for spelling in (f"python -m {module}", program.script) if spelling}
# Not the beginning of another module's name.
_SPELLING = re.compile(f"(?:{'|'.join(map(re.escape, sorted(_SPELLINGS, key=len, reverse=True)))})(?![\\w.]\\w)")


def is_console() -> bool:
    """Whether the user has started all this by the console command."""
    return CALLED_AS in os.environ


def as_typed(text: str) -> str:
    """Replaces `python -m MODULE` and names of scripts by the console command's names, if the user has started that."""
    if not is_console():
        return text
    return _SPELLING.sub(lambda match: _SPELLINGS[match[0]], text)


def start_of(module: str) -> str:
    """The shell command that starts a program; with its path where the user's shell would not find it."""
    if is_console():
        command = _in_shell(os.environ[CALLED_AS], CONSOLE_COMMAND)
        return command if module == TRAIN else f"{command} {PROGRAMS[module].word}"
    return f"{_in_shell(sys.executable, 'python')} -m {module}"


def summaries() -> dict[str, str]:
    """Help lines of the console command's other programs, by word; none where the user has not started it."""
    return {program.word: program.summary for program in PROGRAMS.values()} if is_console() else {}


def own_process(*words: str) -> list[str]:
    """The command that starts one of our programs in a process of its own; `words` are those of the console command.

    `python -m train` would run a `train.py` of the working folder, where there is one; `resnet_mxnet` is only ours.
    """
    return [sys.executable, *(f"-W{option}" for option in sys.warnoptions), "-m", "resnet_mxnet", *words]


def words_of(command: Sequence[str]) -> Sequence[str]:
    """The words that `own_process` was given, of a command that it made."""
    return command[_place(command) + 2:]


def is_own(command: Sequence[str]) -> bool:
    """Whether `own_process` made this command."""
    return _place(command) >= 0


def _place(command: Sequence[str]) -> int:
    return next((i for i, words in enumerate(itertools.pairwise(command)) if words == ("-m", "resnet_mxnet")), -1)


def _in_shell(path: str, name: str) -> str:
    """A program's name where the shell finds the one at `path` by it, else its path."""
    if shutil.which(name) == path:
        return name
    return shlex.quote(os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path)
