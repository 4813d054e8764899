"""Trained weights from this program, PyTorch, Gluon or an ONNX export.

    trained = load("resnet50.pth")                             # to validate, predict with or export
    weights = read("runs/my-run", model="resnet50")            # to start from
    start, notes = starting_point(weights, classes, config)

`files` reads file formats, `recognise` finds the network, `record` describes how images are prepared. `publish` writes
weights in other programs' formats.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import imagenet, plugins
from common.phases import WEIGHTS, phase
from pipelines.sources import Classes
from pipelines.transform import Normalisation
from train import checkpoint, models
from train.checkpoint import Checkpoint, Progress
from train.classes import numbers_by_name
from train.config import Config
from train.errors import TrainError
from train.weights import files
from train.weights.recognise import Found, recognise

BATCH_SIZE = 32  # for validation and export, if no run here has produced the weights


class Weights(NamedTuple):
    """Trained weights, and remarks on them."""

    trained: Checkpoint  # the network; `params` has no classifier if the weights have none
    classifier: str  # name of the classifier's weight in the source
    num_classes: int  # 0 without a classifier
    notes: list[str]  # remarks on what was used, what was not, and why


def settings(config: Config, with_sizes: bool = False) -> dict[str, Any]:
    """The options that a run takes from the trained weights it starts from: the network, the plug-in that defines the
    network, if any, the images' normalisation, and with `with_sizes` also the sizes of images.
    """
    sizes = ("image_size", "val_image_size", "val_crop_fraction") if with_sizes else ()
    names = ("model", *(field.name for field in fields(Normalisation)), *sizes)
    of_plugin = plugins.find("model", config.model)
    plugin = {"plugin": (of_plugin.record,)} if of_plugin and of_plugin.record else {}
    return {name: getattr(config, name) for name in names} | plugin


@phase(WEIGHTS)
def read(place: str, model: str = "") -> Weights:
    """Read the weights of a run folder, a checkpoint, or a file of another program.

    Args:
        place: the folder or file. A run folder stands for its best checkpoint, with moving averages if the run keeps
            them.
        model: the network to which the weights must belong; "": any known network.

    Raises:
        UserError: no weights are found; or the weights are damaged, belong to another network, or would give other
            results here.
    """
    path = Path(place)
    if not _is_of_others(path):
        return _own(place, model)
    if not path.stat().st_size:
        raise TrainError(f"{path} is empty: fetch or write it again")
    beside, has_norm_of_images = ("", False) if model else _network_beside(path)
    arrays, about = files.read(path)
    first = _network_inside(path, arrays) or model or ("" if has_norm_of_images else beside)
    found = recognise(path, arrays, about, wanted=model, first=first, beside=beside)
    weight, *_ = models.create(found.model).classifier
    count = len(found.params.get(weight, ()))
    classes, about_classes = _classes(path, found, count)
    trained = Checkpoint(
        params=found.params, aux=found.aux, state={},
        config=Config(model=found.model, batch_size=BATCH_SIZE, label_smoothing=0.0, **found.record.settings),
        class_names=[name for _, name in classes], class_keys=[key for key, _ in classes],
        progress=Progress(step=found.num_batches),
    )
    whose = f" by {found.library}'s names" if found.library else ""
    said_by = found.record.file or f"{found.prepared_by}'s, as no {path.stem}.json says otherwise"
    notes = [f"weights: {found.model} of {path}, {found.num_arrays} arrays{whose}", *found.notes,
             f"images: {found.record} ({said_by})", *([about_classes] if about_classes else [])]
    return Weights(trained, found.classifier, count, notes)


@phase(WEIGHTS)
def load(place: str, quiet: bool = False) -> Checkpoint:
    """The network to validate, predict with or export. Remarks on a file of another program go to stderr, unless
    `quiet`. Raises UserError."""
    if not _is_of_others(Path(place)):
        return _own_checkpoint(place)
    weights = read(place)
    if not weights.num_classes:
        raise TrainError(f"{place} has no classifier: train one from it with --weights")
    for note in () if quiet else weights.notes:
        print(note, file=sys.stderr)
    return weights.trained


def starting_point(weights: Weights, classes: Classes, config: Config) -> tuple[Checkpoint, list[str]]:
    """A network for these classes, and the remarks, including a remark on the classifier. The classifier of the weights
    is used if it has all of the classes, by name; otherwise a new classifier is initialised by the configuration's
    seed.
    """
    trained, known = weights.trained, weights.num_classes
    network = models.create(trained.config.model, len(classes), images=config.image_size)
    initial, _ = network.initial_values(config.seed)
    rows = numbers_by_name(classes, trained.classes) if known else None
    params = dict(trained.params)
    for name in network.classifier:
        params[name] = params[name][rows] if rows else initial[name]
    if rows and rows == list(range(known)):
        note = "as it is"
    elif rows:
        note = f"its rows of these {len(classes)} classes, by their names"
    else:
        note = "a new classifier"
    there = f"{known:,} classes" if known else "no classifier"
    start = replace(trained, params=params, class_names=[name for _, name in classes],
                    class_keys=[key for key, _ in classes])
    return start, [*weights.notes, f"{weights.classifier}: {there} there, {len(classes):,} here: {note}"]


def _is_of_others(path: Path) -> bool:
    return path.suffix.lower() in files.READERS and path.is_file()


def _network_inside(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """The name of the network that the file with these arrays contains itself; "": the file has no network. Reading the
    file has loaded this network. Another file with an equal name may have been read before.
    """
    registered = plugins.find("model", path.name)
    weights = getattr(registered.made, "weights", {}) if registered else {}
    return path.name if weights and all(arrays.get(name) is array for name, array in weights.items()) else ""


def _network_beside(path: Path) -> tuple[str, bool]:
    """The name of the network that lies beside an MXNet parameter file, by MXNet's names of such files: net-symbol.json
    beside net-0000.params; "": no network. The network is loaded as a plug-in. Raises UserError.

    The second value is True if the network begins with a BatchNorm of the images, like Gluon's ResNet v2. A network of
    this program with these arrays is then preferred, because it contains that BatchNorm in the normalisation.
    """
    numbered = re.fullmatch(r"(.+)-\d{4}\.params", path.name)
    symbol = path.with_name(f"{numbered[1]}-symbol.json") if numbered else path
    if symbol == path or not symbol.is_file():
        return "", False
    plugins.load([str(symbol)])
    registered = plugins.find("model", symbol.name)
    assert registered
    has_norm_of_images = any(node.op == "BatchNorm" and node.inputs[0].node in ("data", "data_nchw")
                             for node in registered.made.graph)
    return symbol.name, has_norm_of_images


def _own_checkpoint(place: str) -> Checkpoint:
    """A checkpoint of this program's own runs. Raises UserError, also for a file of unknown format (a checkpoint is a
    zip)."""
    path = Path(place)
    if path.suffix.lower() != ".npz" and path.is_file() and not zipfile.is_zipfile(path):
        raise TrainError(f"{path} is not a file with weights: give a run folder, a checkpoint, or a file "
                         f"that ends in {', '.join(files.READERS)}")
    return checkpoint.load_trained(place)


def _own(place: str, model: str) -> Weights:
    """The weights of this program's own runs."""
    trained = _own_checkpoint(place)
    if model and model != trained.config.model:
        raise TrainError(f"{place} holds a {trained.config.model}, but this run has --model {model}: give weights of "
                         f"{model}, or --model {trained.config.model}")
    network = models.create(trained.config.model)
    count = len(trained.params) + len(trained.aux)
    return Weights(trained, network.classifier[0], trained.num_classes,
                   [f"weights: {trained.network} of {place}, {count} arrays"])


def _classes(path: Path, found: Found, count: int) -> tuple[Classes, str]:
    """The classes of a file's classifier, and a remark on them. Raises TrainError."""
    classes = found.record.classes
    if not count:
        return [], ""
    if classes is not None:
        if len(classes) != count:
            raise TrainError(f"{path} has {count} classes, and the list of their names beside it {len(classes)}: "
                             "correct the list or remove it")
        return imagenet.in_words(classes), ""
    if count == len(imagenet.classes()):
        return list(imagenet.classes()), "classes: 1,000 without names, taken for ImageNet's"
    return [(str(label), str(label)) for label in range(count)], ""
