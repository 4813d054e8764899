"""Describes how this process was started: the launcher, the command line, and the machine's name in a run over several
machines.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from common.errors import ProgramError
from common.program import CALLED_AS, CONSOLE_COMMAND, PACKAGES, PROGRAMS, TRAIN, is_console, start_of, words_of
from train.errors import TrainError

# root of the project; repeated from common.environment, which imports slow modules
ROOT = Path(__file__).resolve().parents[2]
LAUNCHER_VARIABLE = "RESNET_LAUNCHER"  # environment variable: the launcher's command, with its own options

# Environment variables of Horovod, or of our launcher in its place: a process's rank, and the number of processes.
PLACE = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
MEETING = "HOROVOD_GLOO_RENDEZVOUS_ADDR"

# Environment variable of runs over several machines: the `code_digest` of the machine where the run was started.
DIGEST_VARIABLE = "RESNET_CODE_DIGEST"
CODE = (".py", ".cc", ".cu", ".cuh")


def is_of_several() -> bool:
    """Whether a launcher has started this process as one of several (the number may be 1). Raises TrainError if the
    environment has only some of the variables, as another run may have left them."""
    found = {name: os.environ[name] for name in (*PLACE, MEETING) if name in os.environ}
    if found.keys().isdisjoint(PLACE):
        return False
    rank, size, local_rank, local_size = (
        int(found[name]) if found.get(name, "").isdecimal() else -1 for name in PLACE)
    if MEETING in found and 0 <= rank < size and 0 <= local_rank < local_size:
        return True
    missing = [name for name in (*PLACE, MEETING) if name not in found]
    raise TrainError(f"{' '.join(f'{name}={value}' for name, value in found.items())} is in the environment, "
                     f"{'without ' + ' and '.join(missing) if missing else 'which do not fit together'}: unset all of "
                     "HOROVOD_*, or start the processes with scripts/dgx1_8gpu.sh")


def machine() -> str:
    """This machine's name in a run over several machines; "" in any other run."""
    return os.environ.get("HOROVOD_HOSTNAME", "") if DIGEST_VARIABLE in os.environ else ""


@contextlib.contextmanager
def naming_machine() -> Iterator[None]:
    """A context in which an error that only this process has names its machine, in a run over several machines."""
    try:
        yield
    except ProgramError as error:
        if machine() and not getattr(error, "on_all_ranks", False):
            error.args = (f"on {machine()}: {error}",)
        raise
    except OSError as error:
        if machine() and error.filename:
            error.filename = f"{error.filename} on {machine()}"
        raise


@cache
def code_digest() -> str:
    """A SHA-256 of this project's code, as it was at the first call."""
    digest = hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in CODE):
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def check_code() -> None:
    """Raise TrainError if the machine where the run was started has other code than this machine."""
    if DIGEST_VARIABLE in os.environ and os.environ[DIGEST_VARIABLE] != code_digest():
        raise TrainError(f"the code in {ROOT} differs from the code on the machine that started the run: check out the "
                         "same commit on both machines")


def launcher() -> str:
    """The command that starts runs like this one; options of `python -m train` can follow it."""
    return os.environ.get(LAUNCHER_VARIABLE) or start_of(TRAIN)


def is_own_environment() -> bool:
    """Whether this interpreter belongs to the project's .venv."""
    return Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()


def script(module: str) -> str:
    """The shell command of a program's script, for the user's shell and with this environment."""
    if is_console():
        return start_of(module)
    path = ROOT / PROGRAMS[module].script
    shown = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    return shlex.quote(shown) if is_own_environment() else f"PYTHON={shlex.quote(sys.executable)} {shlex.quote(shown)}"


def command_line() -> str:
    """The command that started this process, or its launcher, ready to paste into a shell."""
    if LAUNCHER_VARIABLE in os.environ:
        return f"{launcher()} {shlex.join(words_of(sys.orig_argv))}"
    if is_console() and os.path.abspath(sys.orig_argv[1]) == os.environ[CALLED_AS]:
        return shlex.join([CONSOLE_COMMAND, *sys.orig_argv[2:]])
    return shlex.join(["python", *sys.orig_argv[1:]])
