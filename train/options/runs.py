"""The options of the commands that work with several runs. Imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from common.command_line import POSITIONAL
from common.limits import NOT_NEGATIVE, Limit
from train.options.run import WeightsOptions
from train.options.training import TrainingOptions


@dataclass(frozen=True)
class CompareRunsOptions:
    """Set runs side by side: options that differ, accuracy with intervals, time to accuracy, speed, energy, curves.

    Runs that differ in nothing but --seed become one row, with mean and standard deviation. A run that cannot be
    compared is named with the reason, and the others are compared.
    """

    runs: tuple[Path, ...]
    """Run folders, or folders that contain run folders, such as a sweep's."""
    accuracies: Annotated[tuple[float, ...], "X"] = ()
    """Top-1 accuracies (fractions) for the time to accuracy; default: some that the runs reach."""
    output: Annotated[str, "FILE"] = ""
    """Also write the comparison to this file: .html (one page with the curves), .md (with the curves beside it) or
    .json."""
    format: Literal["auto", "text", "markdown", "html", "json"] = "auto"
    """Format of --output, or of the printed comparison; auto: by the file's suffix, or text."""


@dataclass(frozen=True)
class RunsOptions:
    """List runs with state, best top-1, epochs, age and size; the one that has changed last comes first."""

    folder: Annotated[tuple[Path, ...], POSITIONAL] = (Path("runs"),)
    """Folders whose runs are listed, up to three levels below; default: runs."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class Sweep:
    """The sweep."""

    grid: Annotated[Path | None, POSITIONAL] = None
    """TOML or JSON file with the values to try of each option: learning_rate = [0.1, 0.2]. Every combination is
    trained."""
    seeds: int = 0
    """Train each combination with this many seeds, from --seed on; 0: with --seed only."""
    parallel: int = 1
    """Number of trainings at a time, each on its own GPU if there are GPUs; 0: one for each GPU."""


@dataclass(frozen=True)
class SweepOptions(WeightsOptions, TrainingOptions, Sweep):
    """Train with several seeds or options, one run after the other, and compare the runs.

    The runs are in a folder each below --output, where the comparison is written as well. The same command resumes:
    finished runs are skipped, a stopped one continues. A run that fails is named, and the others go on.
    """


LIMITS: dict[str, Limit] = {
    "accuracies": (lambda values: all(0 < value <= 1 for value in values), "above 0 and at most 1 each"),
    **dict.fromkeys(("seeds", "parallel"), NOT_NEGATIVE),
}
