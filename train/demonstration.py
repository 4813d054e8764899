"""The first run of a newcomer, on the built-in sample set: what to try after it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from common.environment import ROOT
from train.build import SAMPLES_FOLDER
from train.config import DEFAULT_PRESET

PICTURE = SAMPLES_FOLDER / "val" / "rings" / "0000.jpg"


def next_commands(run_folder: Path) -> str:
    """Commands that work as they stand, in the shell that started this process, and show where one's own data goes."""
    python = _python()
    launcher = os.path.relpath(ROOT / "scripts" / "dgx1_8gpu.sh")
    environment = "" if Path(sys.prefix) == ROOT / ".venv" else f"PYTHON={shlex.quote(sys.executable)} "
    commands = [
        ("a picture of your own, in place of this one", f"{python} -m train predict --checkpoint "
         f"{shlex.quote(str(run_folder))} {PICTURE}"),
        ("images of your own: a folder that has a folder for each class, in place of this one",
         f"{python} -m train --config {DEFAULT_PRESET} --data {SAMPLES_FOLDER}"),
    ]
    if (ROOT / "scripts").is_dir():
        commands.append(("two processes, which average their gradients", f"{environment}{launcher} -n 2"))
    return "\n".join(["try next:", *(line for what, command in commands for line in (f"  # {what}", f"  {command}"))])


def _python() -> str:
    """What starts this interpreter in the user's shell."""
    if shutil.which("python") == sys.executable:
        return "python"
    inside = Path(sys.executable).is_relative_to(Path.cwd())
    return shlex.quote(os.path.relpath(sys.executable) if inside else sys.executable)
