"""What docs/compatibility.md promises, held against tests/promised.json. A change is written there by

    python tests/test_compatibility.py

and told in CHANGELOG.md; what goes needs a version in which it was deprecated.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import graph_passes.__main__
import pipelines.__main__
import train.__main__
from common import environment, errors
from common.command_line import option_name
from common.program import PROGRAMS
from train import checkpoint
from train.errors import EXIT_HUNG_PROCESS, EXIT_LOST_PROCESS
from train.presets import presets
from train.processes.launch import LaunchOptions
from train.processes.multi_host import MultiHostOptions
from train.reporting import metrics

ROOT = Path(__file__).resolve().parents[1]
PROMISED = Path(__file__).with_name("promised.json")


def options_of(options: type) -> list[str]:
    return sorted(option_name(field.name) for field in dataclasses.fields(options))


def current() -> dict[str, Any]:
    """The names that users write, and that programs read."""
    programs = {"train": train.__main__, "pipelines": pipelines.__main__, "graph_passes": graph_passes.__main__}
    events = {name: value for name, value in vars(metrics).items()
              if dataclasses.is_dataclass(value) and isinstance(value, type) and value.__module__ == metrics.__name__}
    return {
        "console commands": sorted(program.word for program in PROGRAMS.values()),
        "options": {f"{name} {command}": options_of(found.options)
                    for name, program in programs.items() for command, found in program.COMMANDS.items()}
        | {"scripts/dgx1_8gpu.sh": options_of(LaunchOptions), "scripts/multi_host.sh": options_of(MultiHostOptions)},
        "presets": sorted(presets()),
        "make": sorted(set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))),
        "exit codes": {name: int(value) for name, value in vars(errors).items() if name.startswith("EXIT_")}
        | {"EXIT_LOST_PROCESS": EXIT_LOST_PROCESS, "EXIT_HUNG_PROCESS": EXIT_HUNG_PROCESS},
        "checkpoint versions": list(checkpoint.READ),
        "metrics": {name: sorted(field.name for field in dataclasses.fields(event)) for name, event in events.items()},
    }


def test_what_is_promised_is_there() -> None:
    assert json.loads(PROMISED.read_text()) == current(), f"{__doc__}"


def test_the_changelog_tells_this_version() -> None:
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == environment.project_version()


if __name__ == "__main__":
    PROMISED.write_text(json.dumps(current(), indent=1) + "\n")
