"""Functions of the library for batches of images, networks and presets."""

from __future__ import annotations

import os
from typing import Any

import train.models
import train.presets
from common import plugins
from pipelines.loader import Loader
from pipelines.options import MAX_CLASSES
from train.build import open_data
from train.command_line import values_of
from train.config import Config
from train.errors import TrainError
from train.models.network import Network


def loader(data: str | os.PathLike[str] | None = None, *, split: str = "train", **options: Any) -> Loader:
    """A loader of the batches that training and validation use.

        with rm.loader("photos", batch_size=64, image_size=224) as batches:
            for batch in batches:                   # one epoch
                images = batch.data.asnumpy()       # (64, 224, 224, 3)

    Args:
        data: any form of docs/data.md; None: the built-in sample set.
        split: "train": shuffled and augmented; "val": in order, resized and cropped.
        options: those of the command `train` that concern images: `config`, `batch_size`, `image_size`, `val_split`,
            `seed`, `device`, all augmentations, ... By default `device` is "cpu" here.

    Returns:
        A loader. Iterating gives the rest of an epoch as `Batch`es: `data`, an MXNet array (N, height, width, 3),
        normalised, read only; `label` (N,) float32; `num_valid`, how many rows count (in validation the last batch is
        padded). `loader.class_names` has the classes. Close the loader, or use it in a `with` block.

    Raises:
        UserError: the data cannot be read, or an option is wrong.
    """
    return open_data(values_of(Config, {"device": "cpu", "data": data} | options, command="train"), split)


def models() -> list[str]:
    """The names of all networks, for `create_model` and the option `model`.

        rm.models()                                 # ["resnet18", "resnet34", "resnet50", ...]
    """
    return train.models.names()


def presets() -> dict[str, str]:
    """The presets for the option `config`, each with a sentence that describes it.

        rm.train(config="cifar10_resnet18", data="cifar10")
    """
    return train.presets.described()


def create_model(name: str, num_classes: int = 1000, label_smoothing: float = 0.0) -> Network:
    """A network by name, without weights: a training graph.

        network = rm.create_model("resnet50", num_classes=10)
        params, aux = network.initial_values(seed=0)

    Args:
        name: one of `models()`, or a file with a network: MXNet's -symbol.json, or .onnx.
        num_classes: the number of classes.
        label_smoothing: the share of the target that other classes get.

    Returns:
        `Network`, whose `symbol` is an MXNet Symbol with the inputs `data` (N, H, W, 3) and `softmax_label` (N,), and
        whose `graph` is the same network as a Graph of this project's passes.

    Raises:
        UserError: no network has this name, or a number is not allowed.
    """
    if not isinstance(name, str):
        raise TrainError(f"name is {name!r}: give one of rm.models()")
    if isinstance(num_classes, bool) or not isinstance(num_classes, int) or not 0 < num_classes <= MAX_CLASSES:
        raise TrainError(f"num_classes is {num_classes!r}: give a whole number from 1 to {MAX_CLASSES}")
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing < 1:
        raise TrainError(f"label_smoothing is {label_smoothing!r}: give a number of at least 0 and below 1")
    name, files = train.models.of_option(name)
    with plugins.alone():
        plugins.begin_call()
        plugins.load(files)
        return train.models.create(name, num_classes, label_smoothing)
