"""What docs/compatibility.md promises: no name of tests/promised.json may go, and new ones are added by

    python tests/test_compatibility.py
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import graph_passes.__main__
import pipelines.__main__
import resnet_mxnet
import train.__main__
from common import environment, errors
from common.command_line import option_name
from common.program import PROGRAMS
from train import checkpoint
from train.errors import EXIT_HUNG_PROCESS, EXIT_LOST_PROCESS
from train.presets import presets
from train.processes.launch import LaunchOptions
from train.processes.multi_host import MultiHostOptions
from train.recording import metrics

ROOT = Path(__file__).resolve().parents[1]
PROMISED = Path(__file__).with_name("promised.json")


def options_of(options: type) -> list[str]:
    return sorted(option_name(field.name) for field in dataclasses.fields(options))


def current() -> dict[str, Any]:
    """The names that users write and that programs read."""
    programs = {"train": train.__main__, "pipelines": pipelines.__main__, "graph_passes": graph_passes.__main__}
    events = {name: value for name, value in vars(metrics).items()
              if dataclasses.is_dataclass(value) and isinstance(value, type) and value.__module__ == metrics.__name__}
    return {
        "console commands": sorted(program.word for program in PROGRAMS.values()),
        "options": {f"{name} {command}": options_of(found.options)
                    for name, program in programs.items() for command, found in program.COMMANDS.items()}
        | {"scripts/dgx1_8gpu.sh": options_of(LaunchOptions), "scripts/multi_host.sh": options_of(MultiHostOptions)},
        "library": sorted(resnet_mxnet.__all__),
        "functions of the library": {name: list(inspect.signature(value).parameters)
                                     for name, value in functions_of_library().items()},
        "presets": sorted(presets()),
        "make": sorted(set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))),
        "exit codes": {name: int(value) for name, value in vars(errors).items() if name.startswith("EXIT_")}
        | {"EXIT_LOST_PROCESS": EXIT_LOST_PROCESS, "EXIT_HUNG_PROCESS": EXIT_HUNG_PROCESS},
        "checkpoint versions": list(checkpoint.READ),
        "metrics": {name: sorted(field.name for field in dataclasses.fields(event)) for name, event in events.items()},
    }


def functions_of_library() -> dict[str, Any]:
    found = {name: getattr(resnet_mxnet, name) for name in resnet_mxnet.__all__}
    methods = {f"{kind.__name__}.{name}": value for kind in (resnet_mxnet.TrainedNetwork, resnet_mxnet.Run)
               for name, value in vars(kind).items() if not name.startswith("_")}
    return {name: value for name, value in (found | methods).items() if inspect.isfunction(value)}


def names(value: Any, inside: str = "") -> set[str]:
    """Every name of `current`, with its container."""
    if isinstance(value, dict):
        return {inside, *(name for key, each in value.items() for name in names(each, f"{inside} {key}"))}
    if isinstance(value, list):
        return {inside, *(f"{inside} {each}" for each in value)}
    return {f"{inside} {value}"}


def test_nothing_that_is_promised_has_gone() -> None:
    gone = names(json.loads(PROMISED.read_text())) - names(current())
    assert not gone, "deprecate it first, and remove it in a major version: docs/compatibility.md"


def test_what_is_new_is_promised() -> None:
    new = names(current()) - names(json.loads(PROMISED.read_text()))
    assert not new, "python tests/test_compatibility.py writes it into promised.json; CHANGELOG.md tells it"


def test_the_changelog_tells_this_version() -> None:
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == environment.project_version()


if __name__ == "__main__":
    test_nothing_that_is_promised_has_gone()
    PROMISED.write_text(json.dumps(current(), indent=1) + "\n")
