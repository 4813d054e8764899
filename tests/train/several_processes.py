"""For tests that start processes of their own: their environment, and a script run in several of them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NARROW = Path(__file__).with_name("narrow")  # on PYTHONPATH it makes networks an eighth as wide
needs_horovod = pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed (no g++ at set-up)")


def python_path(narrow: bool = False) -> str:
    """PYTHONPATH of a process whose networks may be narrow."""
    return os.pathsep.join([*[str(NARROW)] * narrow, str(REPOSITORY), os.environ.get("PYTHONPATH", "")])


def run_processes(
    script: str, *arguments: object, count: int = 2, narrow: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a Python script in several processes by the launcher of `python -m train.processes.launch`."""
    starter = ("import sys; from train.processes.launch import launch, plan; "
               "sys.exit(launch(plan(int(sys.argv[1]), on_cpu=True)[0], sys.argv[2:]))")
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(narrow)}
    starting = [sys.executable, "-c", starter, str(count), *command]
    return subprocess.run(starting, capture_output=True, text=True, env=environment, timeout=90)
