"""The command runs: a list of the runs in a folder."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.command_line import part_of
from common.files import shown_size
from train.commands.tables import print_table
from train.options.runs import RunsOptions
from train.recording.metrics import VALIDATION, perplexity
from train.report.runs import DAMAGED, KILLED, Run

HEADER = ("run", "state", "best top-1", "epochs", "network", "age", "size")


def main(values: Mapping[str, Any]) -> None:
    """List the runs. Raises TrainError for a folder that does not exist."""
    own = part_of(RunsOptions, values)
    first, *others = own.folder
    if first == Path("list") and not first.is_dir():  # the user typed `runs list FOLDER`
        own = RunsOptions(tuple(others) or RunsOptions.folder, own.json)
    listed = Run.list_runs(own.folder, with_steps=False)
    if own.json:
        print(json.dumps([run.to_dict() for run in listed], indent=1))
        return
    if listed:
        print_table(HEADER, [_cells(run, time.time()) for run in listed])
    else:
        print(f"no runs in {', '.join(map(str, own.folder))}")
    for run in listed:
        if run.state == DAMAGED:
            print(run.reason, file=sys.stderr)


def _cells(run: Run, now: float) -> tuple[str, ...]:
    epochs = f"{run.epochs_done} of {run.epochs_wanted}" if run.epochs_wanted else ""
    return (str(run.folder), _state(run), _best(run), epochs, run.record.model, _age(now - run.changed),
            shown_size(run.size))


def _state(run: Run) -> str:
    """The state of a run. If an option ended the run, or a kill, the state names that."""
    told = {"max_steps": "--max-steps", "target_accuracy": "--target-accuracy", "patience": "--patience",
            "time_limit": "--time-limit", KILLED: "killed"}
    reason = told.get(run.reason, "")
    return f"{run.state} ({reason})" if reason else run.state


def _best(run: Run) -> str:
    """Top-1 accuracy of the best epoch, or a language model's perplexity; "" without an evaluation."""
    found = run.best_epoch.evaluation if run.best_epoch else None
    if not found:
        return ""
    if run.is_language_model:
        return f"perplexity {perplexity(found.loss):,.2f}"
    return f"{found.top1:.2%}" + f" ({found.images})" * (found.images != VALIDATION)


def _age(seconds: float) -> str:
    """A duration in words, in its largest unit."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(int(seconds), 0)} s"
