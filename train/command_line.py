"""The command line of `python -m train`: its commands, and checks of the option values."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from common import plugins
from common.command_line import Command, choose_command, given, given_value, is_repeatable, option_name
from common.errors import UserError
from common.program import summaries
from train import models
from train.config import Config, check_loss, check_optimizer, check_schedule
from train.errors import TrainError
from train.options import commands, runs, training
from train.options.commands import (
    BenchmarkOptions,
    CompareOptions,
    EmbedOptions,
    ExportOptions,
    GpuReportOptions,
    PredictOptions,
    QuantizeOptions,
    ValidateOptions,
)
from train.options.language_model import LanguageModelOptions
from train.options.limits import check_limits
from train.options.run import DEFAULT_PRESET, LIST_PRESETS, DeviceOptions, RunOptions
from train.options.runs import CompareRunsOptions, RunsOptions, SweepOptions
from train.presets import describe_presets, load_preset

# Name -> options and function of a command. The function's module is imported only when the command runs, because MXNet
# and DALI take seconds to import.
COMMANDS = {
    "train": Command(Config, "train.commands.train:main", outlasts_output=True),
    "validate": Command(ValidateOptions, "train.commands.validate:main"),
    "benchmark": Command(BenchmarkOptions, "train.commands.benchmark:main", outlasts_output=True),
    "compare-precision": Command(CompareOptions, "train.commands.compare_precision:main"),
    "compare": Command(CompareRunsOptions, "train.commands.compare:main"),
    "runs": Command(RunsOptions, "train.commands.runs:main"),
    "sweep": Command(SweepOptions, "train.commands.sweep:main", outlasts_output=True),
    "gpu-report": Command(GpuReportOptions, "gpu_report.command:main"),
    "language-model": Command(LanguageModelOptions, "train.commands.language_model:main", outlasts_output=True),
    "predict": Command(PredictOptions, "train.commands.predict:main"),
    "embed": Command(EmbedOptions, "train.commands.embed:main"),
    "quantize": Command(QuantizeOptions, "train.commands.quantize:main"),
    "export": Command(ExportOptions, "train.commands.export:main"),
}
OF_ONE_PROCESS = ("compare-precision", "compare", "runs", "sweep", "gpu-report", "embed", "quantize", "export")
PROG = "python -m train"

_LIMITS = training.LIMITS | commands.LIMITS | runs.LIMITS


def read(options: type, arguments: Sequence[str], *, command: str) -> dict[str, Any]:
    """Parse and check a command line. Returns only the values given on the command line, without defaults.

    Args:
        options: the dataclass of a command's options.
        arguments: the command line after the command's name.
        command: 'train', 'validate', ...: the name that `--help` shows.

    Raises:
        UserError: an unknown option or preset, or a value that is not allowed.
        SystemExit: after `--help`, and after the list of presets for `--config ?`.
    """
    if (depth := given_value(arguments, "--depth")) is not None:
        raise TrainError(f"--depth has been replaced by --model: give --model resnet{depth or 50}")
    default: object | None = None
    if issubclass(options, RunOptions):
        preset = given_value(arguments, "--config")
        if preset == LIST_PRESETS:
            print(describe_presets())
            raise SystemExit(0)
        default = load_preset(preset or DEFAULT_PRESET)
    elif issubclass(options, DeviceOptions):  # defaults come from a checkpoint, so the help does not show defaults
        default = SimpleNamespace(**{field.name: "" for field in dataclasses.fields(options)})
    values = given(options, arguments, prog=f"{PROG} {command}", default=default)
    check_limits(values, _LIMITS)
    if "model" in values:
        given_plugins = values.get("plugin", ())
        values["model"], files = models.of_option(values["model"], given_plugins)
        if files:
            values["plugin"] = (*given_plugins, *files)
    if not values.get("plugin"):  # otherwise the commands check these names, after loading the plug-ins
        if "model" in values:
            models.check(values["model"])
        models.named(values.get("models", ()))
        if "loss" in values:
            check_loss(values["loss"])
        if "schedule" in values:
            check_schedule(values["schedule"])
        for name in values.get("augment", ()):
            plugins.get("augmentation", name)
    if "optimizer" in values:
        check_optimizer(values["optimizer"])
    return values


def with_plugins(values: dict[str, Any]) -> dict[str, Any]:
    """Load the plug-ins named in option values, and replace the names by the plug-ins' records. This is not part of
    `read`, because plug-ins import MXNet. Raises TrainError; on each machine only the first process prints the error.
    """
    if "plugin" not in values:
        return values
    try:
        return values | {"plugin": plugins.load(values["plugin"])}
    except UserError as error:
        raise TrainError(str(error), on_all_ranks=os.environ.get("HOROVOD_LOCAL_RANK", "0") != "0") from error


def values_of(options: type, given: Mapping[str, Any], *, command: str) -> dict[str, Any]:
    """Option values that a program gives by name in another call, checked and converted like a command line, with
    plug-ins loaded. None and "" count as not given. Raises UserError with the messages of the command line.

    Args:
        options, command: as for `read`.
        given: values by field name, for example {"epochs": 5, "data": Path("photos"), "tensorboard": False}.
    """
    plugins.begin_call()
    if "config" in given:
        load_preset(str(given["config"]))  # on a command line, ? would print the list of presets and exit
    if asked := {"help", "version"} & given.keys():  # on a command line, these two would print text and exit
        raise TrainError(f"{min(asked)} is an option of the command line only: see {PROG} {command} --{min(asked)}")
    words: list[str] = []
    for name, value in given.items():
        words += _words(options, name, value)
    return with_plugins(read(options, words, command=command))


def _words(options: type, name: str, value: Any) -> list[str]:
    """An option and its value as words of a command line."""
    option = option_name(name)
    if hasattr(value, "tolist"):  # a NumPy number or array; NumPy is slow to import
        value = value.tolist()
    if value is None or (isinstance(value, str) and not value):
        return []
    for each in value if isinstance(value, (tuple, list)) else [value]:
        if not isinstance(each, (str, int, float, os.PathLike)):
            raise TrainError(f"{option} needs text, a path, a number or a list of these, not a {type(each).__name__}")
        if "\0" in str(each):  # no command line can contain a null character
            raise TrainError(f"{option} {str(each)!r} has a null byte in it: leave that out")
    if isinstance(value, bool):
        # An option has a --no- form only if a preset or a run may have turned the option on.
        has_negation = issubclass(options, (RunOptions, DeviceOptions)) or getattr(options, name, False)
        return [option] if value else [option.replace("--", "--no-", 1)] * bool(has_negation)
    if isinstance(value, (tuple, list)):
        if is_repeatable(options, name):
            return [f"{option}={each}" for each in value]
        return [option, *map(str, value)]
    return [f"{option}={value}"]


def understood(arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The command's name and the given option values. Raises TrainError on all ranks, because all processes of a run
    have the same command line."""
    try:
        name, rest = choose_command(command_options(), arguments, prog=PROG, default="train", others=summaries())
        return name, read(COMMANDS[name].options, rest, command=name)
    except UserError as error:
        raise TrainError(str(error), on_all_ranks=True) from None


def command_options() -> dict[str, type]:
    return {name: command.options for name, command in COMMANDS.items()}
