"""Train image classifiers and use them: the library behind the command `resnet-mxnet`.

    import resnet_mxnet as rm

    run = rm.train(data="photos", val_split=0.1, epochs=5)
    net = run.load()
    net.predict("cat.jpg").best.name

Options have the names, defaults and limits of the command line: `--batch-size 64` is `batch_size=64`. A user's mistake
raises `UserError`, whose text is one sentence. docs/python.md shows everything.

Slow packages (MXNet, DALI, NumPy) are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from resnet_mxnet.own_packages import import_packages

if TYPE_CHECKING:
    from common.errors import ProgramError, UserError
    from pipelines.loader import Batch, Loader
    from resnet_mxnet.data import create_model, loader, models, presets
    from resnet_mxnet.networks import Predictions, TrainedNetwork, load
    from resnet_mxnet.runs import Comparison, Run, compare, list_runs, load_run, train
    from train.commands.validate import Validated
    from train.models.network import Network
    from train.plugins import augmentation, callback, loss, metric, model, schedule
    from train.prediction import Guess, Prediction
    from train.processes.signals import StoppedBySignal

__all__ = [
    "Batch", "Comparison", "Guess", "Loader", "Network", "Prediction", "Predictions", "ProgramError", "Run",
    "StoppedBySignal", "TrainedNetwork", "UserError", "Validated", "augmentation", "callback", "compare",
    "create_model", "list_runs", "load", "load_run", "loader", "loss", "metric", "model", "models", "presets",
    "schedule", "train",
]

_MODULES = {
    "common.errors": ("ProgramError", "UserError"),
    "pipelines.loader": ("Batch", "Loader"),
    "resnet_mxnet.data": ("create_model", "loader", "models", "presets"),
    "resnet_mxnet.networks": ("Predictions", "TrainedNetwork", "load"),
    "resnet_mxnet.runs": ("Comparison", "Run", "compare", "list_runs", "load_run", "train"),
    "train.commands.validate": ("Validated",),
    "train.models.network": ("Network",),
    "train.plugins": ("augmentation", "callback", "loss", "metric", "model", "schedule"),
    "train.prediction": ("Guess", "Prediction"),
    "train.processes.signals": ("StoppedBySignal",),
}

import_packages()


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
