"""How this process was started: by which launcher, and with which command."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

LAUNCHER_VARIABLE = "RESNET_LAUNCHER"  # environment variable: what started this process, with its own options


def launcher() -> str:
    """What starts runs like this one; the options of `python -m train` follow it."""
    return os.environ.get(LAUNCHER_VARIABLE) or f"{python()} -m train"


def python() -> str:
    """What starts this interpreter in the user's shell."""
    if shutil.which("python") == sys.executable:
        return "python"
    inside = Path(sys.executable).is_relative_to(Path.cwd())
    return shlex.quote(os.path.relpath(sys.executable) if inside else sys.executable)


def command_line() -> str:
    """The command that started this process, or the launcher that did, ready to be copied into a shell."""
    if LAUNCHER_VARIABLE in os.environ:
        return f"{launcher()} {shlex.join(sys.orig_argv[3:])}"  # it was: python -m train ...
    return shlex.join(["python", *sys.orig_argv[1:]])
