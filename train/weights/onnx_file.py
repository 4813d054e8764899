"""Reads weights from ONNX files: from this program's exports, and from other programs' exports together with the
network (`models/network_file.py`).

In this program's exports each BatchNorm after a convolution is folded into the convolution. `metadata` stores the
values lost by folding, gamma and beta, so that the BatchNorms can be restored. If b' is the folded bias, the output of
the convolution with the folded weights, minus b', has the mean beta - b' and the variance gamma^2, except for the part
due to epsilon. In inference the restored network gives equal results; training continues from almost equal statistics.
"""

from __future__ import annotations

import base64
import json
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common import plugins
from graph_passes import onnx_writer
from graph_passes.passes.fold_bn import foldings
from train import losses, models
from train.checkpoint import Checkpoint
from train.errors import TrainError
from train.models import onnx_reader
from train.options.optimizer import LOSSES
from train.weights import record
from train.weights.record import Record

PRODUCER = "resnet-mxnet"
PRODUCERS = (PRODUCER, "resnet50-mxnet")  # the second name was used before version 1.0

Arrays = dict[str, np.ndarray]


def metadata(trained: Checkpoint) -> dict[str, str]:
    """The metadata of an export, from which the network can be read back."""
    graph = models.create(trained.config.model, trained.num_classes).graph
    norms = {folding.norm.name: [_text(trained.params[ref.node]) for ref in folding.norm.inputs[1:3]]
             for folding in foldings(graph)}
    return {"model": trained.config.model, "loss": losses.answer_of(trained.config.loss),
            "batch_norms": json.dumps(norms), "class_keys": json.dumps([key for key, _ in trained.classes])}


def read(path: Path) -> tuple[Arrays, Record]:
    """Parameters and running statistics by our names, convolution weights OIHW, and how images are prepared. If the
    file is not an export of one of this program's networks, its own network is loaded as a plug-in.

    Raises OSError if the file cannot be read, and TrainError if the file is damaged, or has parts that no network here
    supports.
    """
    model = onnx_reader.parsed(str(path), onnx_reader.content_of(path))
    about = {entry.key: entry.value for entry in model.metadata_props}
    if model.producer_name not in PRODUCERS or "batch_norms" not in about:
        return _of_others(path), record.find(path)
    with onnx_reader.damage_of(str(path)):
        # the export's network came from a file; here this file itself has the network
        if about.get("model", "").endswith(models.NETWORK_FILES):
            return _of_others(path), replace(_record(path, about), architecture="")
        if any(node.op_type == "QuantizeLinear" for node in model.graph.node):
            raise TrainError(f"{path} is an export in INT8, from which float weights cannot be restored: give the "
                             "run folder or checkpoint that it was made from, or an export without --int8")
        from onnx import numpy_helper

        arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer
                  if not onnx_writer.is_constant(tensor.name)}
        return _unfold(arrays, about), _record(path, about)


def _of_others(path: Path) -> Arrays:
    plugins.load([str(path)])
    registered = plugins.find("model", path.name)
    assert registered
    return dict(registered.made.weights)


def _unfold(arrays: Arrays, about: Mapping[str, str]) -> Arrays:
    values, norms = dict(arrays), _value(about, "batch_norms")
    model = record.known("model", about.get("model"), models.names())
    for norm, conv, bias in foldings(models.create(model).graph):
        if missing := next((name for name in (conv.inputs[1].node, bias) if name not in values), ""):
            raise ValueError(f"it has no {missing}")
        if norm.name not in norms:
            raise ValueError(f"its batch_norms have no {norm.name}")
        gamma, beta = (np.frombuffer(base64.b64decode(text), "<f4") for text in norms[norm.name])
        variance = np.maximum(gamma.astype(np.float64) ** 2 - norm["eps"], 0).astype(np.float32)
        names = [ref.node for ref in norm.inputs[1:]]
        folded_bias = values.pop(bias)
        if len(conv.inputs) == 3:  # the convolution's own bias; the BatchNorm's mean absorbs it
            values[bias] = np.zeros_like(folded_bias)
        of_norm = (np.sqrt(variance.astype(np.float64) + norm["eps"]), beta, beta - folded_bias, variance)
        values |= dict(zip(names, of_norm, strict=True))
    return values


def _record(path: Path, about: Mapping[str, str]) -> Record:
    size = record.pixels("center_crop", _value(about, "center_crop"))
    shorter = _value(about, "resize_shorter")
    if type(shorter) is not int or shorter < size:
        raise ValueError(f"its resize_shorter {reprlib.repr(shorter)} is smaller than its center_crop, {size}")
    crop = record.part("center_crop / resize_shorter", size / shorter)
    mean, std = (record.of_pixels(name, _value(about, name)) for name in ("mean", "std"))
    keys, names = (_value(about, name) for name in ("class_keys", "class_names"))
    return Record(file=path, architecture=about["model"], size=size, crop=crop, mean=mean, std=std,
                  interpolation=record.known("interpolation", about.get("interpolation"), record.INTERPOLATIONS),
                  classes=record.classes("class_keys", keys, names),
                  loss=record.known("loss", about.get("loss", "softmax"), LOSSES))


def _value(about: Mapping[str, str], name: str) -> Any:
    try:
        return json.loads(about[name])
    except KeyError:
        raise ValueError(f"its metadata lacks {name}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its {name} is not JSON, {error}") from None


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.astype("<f4").tobytes()).decode()
