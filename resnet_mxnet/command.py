"""The console command `resnet-mxnet`: all programs of this project under one name.

A working folder often has a `train.py`, and PYTHONPATH may have a package `common`, which are not ours: our packages
are looked for beside this one only.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = str(Path(__file__).resolve().parents[1])
PACKAGES = ("common", "train", "pipelines", "graph_passes")


class OwnPackages:
    """A finder that looks for this project's packages in one place."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [ROOT]) if name in PACKAGES else None


def console() -> None:
    """What the installed script runs."""
    sys.meta_path.insert(0, OwnPackages)
    from common.program import CALLED_AS

    os.environ[CALLED_AS] = os.path.abspath(sys.argv[0])
    run()


def run() -> None:
    """Run what the command line names, as `python -m MODULE` would."""
    if OwnPackages not in sys.meta_path:
        sys.meta_path.insert(0, OwnPackages)
    from common.program import GUARD, PROGRAMS, TRAIN

    modules = {program.word: module for module, program in PROGRAMS.items()} | {GUARD: GUARD}
    word = sys.argv[1] if len(sys.argv) > 1 else "--help"
    module = modules.get(word, TRAIN)
    sys.argv[1:] = sys.argv[2:] if word in modules else [word, *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
