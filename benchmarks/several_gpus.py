"""Shared by the programs that measure on several GPUs: options, a check, and starting the measuring processes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from record import RESULTS, ROOT

from common.command_line import Positive
from common.errors import UserError
from common.nvidia_gpus import find_gpus

LAUNCH = """import sys
from train.processes.launch import launch, plan
sys.exit(launch(plan(int(sys.argv[1]), on_cpu=False)[0], sys.argv[2:]))"""


@dataclass(frozen=True)
class SeveralGpusOptions:
    """Options of all programs that measure on several GPUs."""

    batch: Positive = 256
    """Images on each GPU."""
    steps: Positive = 50
    """Timed steps in each round."""
    results: Path = RESULTS
    """Folder to write to."""
    worker: Annotated[Path | None, "FILE"] = None
    """For processes that `measure_in_processes` starts: the file to which the first one writes its measurements."""


def check_gpus(count: int) -> None:
    """Raise UserError if `--gpus` asks for one GPU, or for more than this machine has."""
    num_gpus = len(find_gpus())
    if not 2 <= count <= num_gpus:
        raise UserError(f"--gpus {count} must be from 2 to the number of NVIDIA GPUs here, {num_gpus}")


def measure_in_processes(count: int, program: str, options: Sequence[str]) -> Any:
    """Start a program of this folder with these options and `--worker FILE` in `count` processes, each with a GPU.

    Returns the JSON that the first process wrote to the file, or None if the program failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        launch = [] if count == 1 else [sys.executable, "-c", LAUNCH, count]
        done = run_command([*launch, sys.executable, program, "--worker", out, *options])
        return None if done is None else json.loads(out.read_text())


def run_command(command: Sequence[object], environment: dict[str, str] | None = None) -> str | None:
    """Run a command and return its output; if it failed, returns None, and prints its last words on standard error."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **(environment or {})}
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=ROOT)
    if done.returncode:
        print(f"{shlex.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return done.stdout
