"""The runs of a sweep: each combination of a grid file's values, with each seed."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import plugins
from common.command_line import as_arguments, is_repeatable, nearest
from common.content import refused_as
from common.errors import UserError
from common.program import TRAIN
from pipelines.options import SAMPLES
from pipelines.sources import splits_of
from train.command_line import read, with_plugins
from train.commands.train import new_config
from train.config import Config
from train.content import reason
from train.errors import TrainError
from train.options.data import SYNTHETIC
from train.options.limits import shown
from train.options.runs import Sweep, SweepOptions

LONGEST_NAME = 120  # most characters of a run folder's name
NOT_IN_GRID = {*(field.name for field in dataclasses.fields(Sweep)), "output"}  # options of the sweep itself


class Point(NamedTuple):
    """One run of a sweep."""

    name: str  # name of the run's folder
    folder: Path
    config: Config
    arguments: list[str]  # arguments of `python -m train` that begin or resume the run


def plan(own: Sweep, values: Mapping[str, Any]) -> list[Point]:
    """The runs of a sweep; the seeds of a combination come one after the other. `values`: the given options. Raises
    UserError for an invalid grid or combination."""
    if not (own.grid or own.seeds):
        raise TrainError("a sweep needs something to vary: give a grid file, or --seeds 3")
    given = {name: value for name, value in values.items() if name not in NOT_IN_GRID}
    axes = _read_grid(own.grid, given) if own.grid else {}
    if own.seeds:
        if "seed" in axes:
            raise TrainError(f"{own.grid} has seeds, and --seeds {own.seeds} is given: leave out one of them")
        first = given.get("seed", 0)
        axes["seed"] = list(range(first, first + own.seeds))
    names = [name for name, column in axes.items() if len(column) > 1] or list(axes)
    points: list[Point] = []
    for combination in itertools.product(*axes.values()):
        named = {**given, **dict(zip(axes, combination, strict=True))}
        try:
            with plugins.forgotten():
                chosen = with_plugins(named)
                config, _ = new_config(chosen, local_rank=0)
        except UserError as error:
            raise _refused(_named(names, named), error) from None
        output = Path(values.get("output") or f"runs/sweep-{own.grid.stem if own.grid else config.config}")
        folder = output / _folder_name(names, named)
        if config not in [point.config for point in points]:
            points.append(Point(folder.name, folder, config, _arguments(chosen, config, folder)))
    return points


def check_data(points: Sequence[Point]) -> None:
    """Raise TrainError, with the training's name, if its images do not exist."""
    is_told: set[str] = {SAMPLES, SYNTHETIC}
    for point in points:
        if point.config.data not in is_told:
            is_told.add(point.config.data)
            try:
                splits_of(point.config.data)
            except UserError as error:
                raise _refused(point.name, error) from None


def _refused(name: str, error: UserError) -> TrainError:
    return TrainError(f"{name} cannot be trained: {error}")


def _named(names: Sequence[str], chosen: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={shown(chosen[name])}" for name in names)


def _folder_name(names: Sequence[str], chosen: Mapping[str, Any]) -> str:
    """A folder name that contains the varied values; a digest of the values if they do not fit into a name."""
    full = _named(names, chosen).replace(" ", "+")
    name = re.sub(r"[^\w.,=+-]+", "-", full)
    if name == full and len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"


def _arguments(chosen: Mapping[str, Any], config: Config, folder: Path) -> list[str]:
    # --epochs is always given. Without --epochs, the demonstration would choose its length by the machine's speed.
    settings = {**chosen, "epochs": config.epochs, "output": str(folder), "resume": "auto"}
    return [word for name, value in settings.items() for word in as_arguments(name, value, is_repeatable(Config, name))]


def _read_grid(path: Path, given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values of each option of a grid file. Raises UserError if the file is not a grid, an option does not accept a
    value, or an option is also `given` on the command line."""
    axes: dict[str, list[Any]] = {}
    content = _content(path)
    # Names that only a plug-in of the grid defines are checked when the plug-in is loaded.
    unchecked = as_arguments("plugin", ("of the grid",), True) if "plugin" in content else []
    for key, column in content.items():
        name = key.replace("-", "_")
        if name in given or name in axes:
            where = "twice" if name in axes else "on the command line as well"
            raise TrainError(f"{path} gives {key}, which is given {where}: leave out one of them")
        axes[name] = _values(path, key, name, column, [] if name == "plugin" else unchecked)
    return axes


def _content(path: Path) -> dict[str, Any]:
    """The content of a TOML or JSON file. Raises UserError."""
    ending = path.suffix.lower()
    if ending not in (".toml", ".json"):
        raise TrainError(f"{path} is not a grid file: its name must end in .toml or .json")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise TrainError(f"cannot read the grid {path} ({error.strerror}): give a file that can be read") from None
    if ending == ".toml":
        try:
            parse = importlib.import_module("tomllib").loads
        except ModuleNotFoundError:
            raise TrainError(f"Python reads TOML from version 3.11 on: write {path} as JSON") from None
    else:
        parse = json.loads
    with refused_as(lambda error: TrainError(f"{path} is not a {ending[1:].upper()} file ({reason(error)}): "
                                             "correct the file")):
        found = parse(text.decode())
    if not (isinstance(found, dict) and found):
        raise TrainError(f"{path} names no options: write for example learning_rate = [0.1, 0.2]"
                         if ending == ".toml" else f'{path} names no options: write {{"learning_rate": [0.1, 0.2]}}')
    return found


def _values(path: Path, key: str, name: str, column: Any, others: Sequence[str]) -> list[Any]:
    """The values of an option in a grid, without duplicates, checked like a command line that also has the words
    `others`.
    """
    known = {field.name: field.default for field in dataclasses.fields(SweepOptions)}
    if name not in known or name in NOT_IN_GRID:
        choices = [option.replace("_", "-") for option in known if option not in NOT_IN_GRID]
        hint = "" if name in NOT_IN_GRID else nearest(key.replace("_", "-"), choices) + " (see --help)"
        raise TrainError(f"{path}: {key} is not a training option that a grid can vary{hint}")
    column = column if isinstance(column, list) else [column]
    if not column:
        raise TrainError(f"{path}: {key} has no values: give some, or leave it out")
    found: list[Any] = []
    repeats = is_repeatable(Config, name)
    for value in column:
        if isinstance(known[name], tuple) and not repeats and not isinstance(value, list):
            raise TrainError(f"{path}: {key} takes several numbers at once, so that each of its values is a list: "
                             f"{key} = [[...], [...]]")
        if value is None or isinstance(value, dict):
            raise TrainError(f"{path}: {key} cannot be {json.dumps(value)}: give a number, a word, or true or false")
        try:
            parsed = read(Config, [*as_arguments(name, value, repeats), *others], command=TRAIN)[name]
        except UserError as error:
            raise TrainError(f"{path}: {error}") from None
        if parsed not in found:
            found.append(parsed)
    return found
