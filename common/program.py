"""Names of the programs, for users who start programs and for programs that start each other.

In a checkout, programs are started as `python -m train`, `python -m pipelines` and so on, or as scripts. An installed
package also has the console command `resnet-mxnet`, which starts any program. The code uses the names of a checkout;
help texts and messages show the form that the user has typed (`as_typed`).
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
# Environment variable with the path of the console command; set by the console command, and inherited by child
# processes.
CALLED_AS = "RESNET_CALLED_AS"

TRAIN = "train"  # the console command also has the commands of this program: `resnet-mxnet predict`
LAUNCH, MULTI_HOST, REPORT = "train.processes.launch", "train.processes.multi_host", "train.report.page"
GUARD = "train.processes.guard"  # users never start this program, so its name is its module


class Program(NamedTuple):
    """A program that the console command starts as `resnet-mxnet WORD`."""

    word: str
    summary: str
    script: str = ""  # the program's script in a checkout, if users do not start it as `python -m MODULE`


PROGRAMS = {  # module -> program
    "pipelines": Program("data", "Prepare and inspect images: convert, verify, measure, show"),
    "graph_passes": Program("passes", "Show what the graph passes do to a network"),
    LAUNCH: Program("launch", "Train on several GPUs of this machine, or in several processes", "scripts/dgx1_8gpu.sh"),
    MULTI_HOST: Program("multi-host", "Train on the GPUs of several machines", "scripts/multi_host.sh"),
    REPORT: Program("report", "Make the report of a run again, from its metrics"),
}
_SPELLINGS = {f"python -m {TRAIN}": CONSOLE_COMMAND} | {
    spelling: f"{CONSOLE_COMMAND} {program.word}" for module, program in PROGRAMS.items()
    for spelling in (f"python -m {module}", program.script) if spelling}
# The lookahead rejects a module name that continues after the match.
_SPELLING = re.compile(f"(?:{'|'.join(map(re.escape, sorted(_SPELLINGS, key=len, reverse=True)))})(?![\\w.]\\w)")


def is_console() -> bool:
    """Whether the user has started this program through the console command."""
    return CALLED_AS in os.environ


def as_typed(text: str) -> str:
    """Replace `python -m MODULE` and script names by commands of the console command, if the user has started that."""
    if not is_console():
        return text
    return _SPELLING.sub(lambda match: _SPELLINGS[match[0]], text)


def start_of(module: str) -> str:
    """The shell command that starts a program. The command has its full path if the user's shell would not find it by
    name.
    """
    if is_console():
        command = _in_shell(os.environ[CALLED_AS], CONSOLE_COMMAND)
        return command if module == TRAIN else f"{command} {PROGRAMS[module].word}"
    return f"{_in_shell(sys.executable, 'python')} -m {module}"


def summaries() -> dict[str, str]:
    """One help line for each of the console command's other programs, by word. Empty if the user has not started the
    console command.
    """
    return {program.word: program.summary for program in PROGRAMS.values()} if is_console() else {}


def own_process(*words: str) -> list[str]:
    """The command line that starts a program of this project in a new process. `words`: the words after `resnet-mxnet`.

    The command line uses `-m resnet_mxnet`, because `python -m train` would prefer a `train.py` in the working folder.
    """
    return [sys.executable, *(f"-W{option}" for option in sys.warnoptions), "-m", "resnet_mxnet", *words]


def words_of(command: Sequence[str]) -> Sequence[str]:
    """The `words` from which `own_process` made a command."""
    return command[_place(command) + 2:]


def is_own(command: Sequence[str]) -> bool:
    """Whether `own_process` made this command."""
    return _place(command) >= 0


def _place(command: Sequence[str]) -> int:
    return next((i for i, words in enumerate(itertools.pairwise(command)) if words == ("-m", "resnet_mxnet")), -1)


def _in_shell(path: str, name: str) -> str:
    """`name` if the shell finds `path` under this name, otherwise `path`."""
    if shutil.which(name) == path:
        return name
    return shlex.quote(os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path)
