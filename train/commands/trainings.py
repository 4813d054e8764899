"""Runs that a command trains in separate processes: tests whether a run is complete, and whether a folder contains the
run.
"""

from __future__ import annotations

import json
from pathlib import Path

from common.command_line import option_name
from pipelines.options import AUTO
from train.config import CONFIG_FILE, FOUND_IN_DATA, OF_A_SESSION, Config
from train.content import content_of_file
from train.errors import TrainError
from train.report.runs import Run


def is_complete(config: Config, folder: Path) -> bool:
    """Whether the run in a folder is complete according to `config`; False for a folder without a run."""
    try:
        run = Run.read(folder, with_steps=False)
    except TrainError:
        return False
    limits = ("max_steps", "time_limit")
    return run.is_over and all(run.options[name] == getattr(config, name) for name in limits)


def check_same(config: Config, folder: Path, command: str) -> None:
    """Raise TrainError if the folder has a run with other settings than `config`. `command`: the user's command, for
    the message."""
    path = folder / CONFIG_FILE
    if not path.exists():
        return
    with content_of_file(lambda reason: f"{path} is not a configuration of a run ({reason}): remove {folder}, or give "
                                        "another --output"):
        there = Config.from_dict(json.loads(path.read_text())).to_dict()
    here = config.to_dict()
    for name, value in here.items():
        may_be = FOUND_IN_DATA.get(name, ()) if value == AUTO else ()
        if name not in OF_A_SESSION and there.get(name) not in (value, *may_be):
            option = option_name(name)
            raise TrainError(f"the run in {folder} was made with {option} {there.get(name)}, but this {command} has "
                             f"{value}: give another --output, or the same {option}")
