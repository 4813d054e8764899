"""Our own ONNX exports as weights.

There each BatchNorm behind a convolution is folded into it. `metadata` keeps what folding loses, gamma and beta, so
that the BatchNorms can be taken out again: the output of the convolution with the folded weights and bias b', less b',
has the mean beta - b', and the variance gamma^2 but for the part that epsilon has in it. In inference the network is
the same; in training it goes on from about the same statistics.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from graph_passes.passes.fold_bn import foldings
from train import models
from train.checkpoint import Checkpoint
from train.errors import TrainError
from train.weights.record import Record

PRODUCER = "resnet50-mxnet"

Arrays = dict[str, np.ndarray]


def metadata(trained: Checkpoint) -> dict[str, str]:
    """What an export has besides its graph, so that it can be read back."""
    graph = models.create(trained.config.model, trained.num_classes).graph
    norms = {folding.norm.name: [_text(trained.params[ref.node]) for ref in folding.norm.inputs[1:3]]
             for folding in foldings(graph)}
    return {"model": trained.config.model, "loss": trained.config.loss, "batch_norms": json.dumps(norms),
            "class_keys": json.dumps([key for key, _ in trained.classes])}


def read(path: Path) -> tuple[Arrays, Record]:
    """Parameters and running statistics by our names, convolution weights OIHW, and how images are prepared.

    Raises OSError where the file cannot be read, and TrainError where it is damaged or no export of this program.
    """
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError:
        raise TrainError(f"{path} needs the package onnx: run make setup, or pip install onnx") from None
    try:
        model = onnx.load_model(str(path), load_external_data=False)
        about = {entry.key: entry.value for entry in model.metadata_props}
        if model.producer_name != PRODUCER or "batch_norms" not in about:
            raise TrainError(f"{path} is no ONNX export of this program, or one of an earlier version: give the "
                             "weights that it was made from")
        if any(node.op_type == "QuantizeLinear" for node in model.graph.node):
            raise TrainError(f"{path} is an export in INT8, from which weights in floats cannot be had back: give the "
                             "run folder or checkpoint that it was made from, or an export without --int8")
        arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        return _unfold(arrays, about), _record(path, about)
    except (DecodeError, ValueError, KeyError, TypeError) as error:
        raise TrainError(f"{path} is no complete ONNX file ({error}): write it once more") from None


def _unfold(arrays: Arrays, about: Mapping[str, str]) -> Arrays:
    values, norms = dict(arrays), json.loads(about["batch_norms"])
    for norm, conv, bias in foldings(models.create(about["model"]).graph):
        gamma, beta = (np.frombuffer(base64.b64decode(text), "<f4") for text in norms[norm.name])
        variance = np.maximum(gamma.astype(np.float64) ** 2 - norm["eps"], 0).astype(np.float32)
        names = [ref.node for ref in norm.inputs[1:]]
        folded_bias = values.pop(bias)
        of_norm = (np.sqrt(variance.astype(np.float64) + norm["eps"]), beta, beta - folded_bias, variance)
        values |= dict(zip(names, of_norm, strict=True))
        assert conv.inputs[1].node in values
    return values


def _record(path: Path, about: Mapping[str, str]) -> Record:
    size = int(about["center_crop"])
    mean, std = (tuple(json.loads(about[name])) for name in ("mean", "std"))
    names, keys = (json.loads(about[name]) for name in ("class_names", "class_keys"))
    return Record(file=path, size=size, crop=size / int(about["resize_shorter"]), mean=mean, std=std,
                  interpolation=about["interpolation"],
                  classes=list(zip(keys, names, strict=True)), loss=about.get("loss", "softmax"))


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.astype("<f4").tobytes()).decode()
