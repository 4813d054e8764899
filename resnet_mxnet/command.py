"""The console command `resnet-mxnet`: all programs of this project under one name.

The working folder may have a foreign `train.py`, and PYTHONPATH a foreign package `common`. Therefore our packages are
looked for only in the folder that holds this one.
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
PACKAGES = ("common", "train", "gpu_report", "pipelines", "graph_passes")


class OwnPackages:
    """A module finder that looks for this project's packages in one folder only."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [ROOT]) if name in PACKAGES else None


def console() -> None:
    """The entry point of the installed script."""
    run(called_as=os.path.abspath(sys.argv[0]))


def run(called_as: str = "") -> None:
    """Run the program that the command line names, as `python -m MODULE` would. `called_as`: the path of the script if
    the user has started it, else ""."""
    sys.meta_path.insert(0, OwnPackages)
    from common.program import CALLED_AS, GUARD, PROGRAMS, TRAIN

    if called_as:
        os.environ[CALLED_AS] = called_as
    modules = {program.word: module for module, program in PROGRAMS.items()} | {GUARD: GUARD}
    word, *rest = sys.argv[1:] or ["--help"]
    sys.argv[1:] = rest if word in modules else [word, *rest]
    runpy.run_module(modules.get(word, TRAIN), run_name="__main__", alter_sys=True)
