"""The console command `resnet-mxnet`: all programs of this project under one name."""

from __future__ import annotations

import os
import runpy
import sys

from resnet_mxnet.own_packages import OwnPackages


def console() -> None:
    """The entry point of the installed script."""
    run(called_as=os.path.abspath(sys.argv[0]))


def run(called_as: str = "") -> None:
    """Run the program that the command line names, as `python -m MODULE` would. `called_as`: the path of the console
    script if the user has started that, else "".
    """
    sys.meta_path.insert(0, OwnPackages)
    from common.program import CALLED_AS, GUARD, PROGRAMS, TRAIN

    if called_as:
        os.environ[CALLED_AS] = called_as
    modules = {program.word: module for module, program in PROGRAMS.items()} | {GUARD: GUARD}
    word, *rest = sys.argv[1:] or ["--help"]
    sys.argv[1:] = rest if word in modules else [word, *rest]
    runpy.run_module(modules.get(word, TRAIN), run_name="__main__", alter_sys=True)
