"""The command line of `python -m train`: the values that it gives to a command's options, each of them checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from common.command_line import given, given_value
from train import models
from train.commands import options as commands
from train.config import check_optimizer
from train.errors import TrainError
from train.options import training
from train.options.limits import check_limits
from train.options.run import DEFAULT_PRESET, LIST_PRESETS, DeviceOptions, RunOptions
from train.presets import describe_presets, load_preset

_LIMITS = training.LIMITS | commands.LIMITS


def read(options: type, arguments: Sequence[str], *, command: str) -> dict[str, Any]:
    """The values that a command line gives to `options`, each of them checked; what is left out is not in the result.

    Args:
        options: the dataclass of a command's options.
        arguments: what follows the command's name on the command line.
        command: 'train', 'validate', ...: whose help `--help` shows.

    Raises:
        UserError: an unknown option or preset, or a value that is not allowed.
        SystemExit: after `--help`, and after the list of presets for `--config ?`.
    """
    if (depth := given_value(arguments, "--depth")) is not None:
        raise TrainError(f"--depth has become the name of a network: give --model resnet{depth or 50}")
    default: object | None = None
    if issubclass(options, RunOptions):
        preset = given_value(arguments, "--config")
        if preset == LIST_PRESETS:
            print(describe_presets())
            raise SystemExit(0)
        default = load_preset(preset or DEFAULT_PRESET)
    elif issubclass(options, DeviceOptions):  # the defaults are in a checkpoint, and help does not tell them
        default = SimpleNamespace(**{field.name: "" for field in dataclasses.fields(options)})
    values = given(options, arguments, prog=f"python -m train {command}", default=default)
    check_limits(values, _LIMITS)
    if "model" in values:
        models.check(values["model"])
    models.named(values.get("models", ()))
    if "optimizer" in values:
        check_optimizer(values["optimizer"])
    return values
