"""Writes a trained network as a state_dict for torchvision or timm, in PyTorch's or safetensors' format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from train import models
from train.checkpoint import Checkpoint
from train.errors import TrainError
from train.models.libraries import GLUON, Published
from train.weights import safetensors_file, torch_file
from train.weights.recognise import COUNTER

Arrays = dict[str, np.ndarray]


def state_dict(trained: Checkpoint, names: Published | None = None) -> Arrays:
    """The arrays under another library's names, in that library's order, with convolution weights in OIHW, in fp32.

    Args:
        trained: the network.
        names: the names of the library; None: torchvision's names, or timm's names if only timm has the network.

    `num_batches_tracked`, PyTorch's counter, is the number of optimizer steps. Raises TrainError for a network that
    neither library has.
    """
    model = trained.config.model
    names = names or next((names for names in models.published(model) if names.library != GLUON), None)
    if not names:
        raise TrainError(f"neither torchvision nor timm has a {model}: export it "
                         "with --onnx or --params")
    arrays = {**trained.params, **trained.aux}
    found: Arrays = {}
    for layer, theirs in names.layers.items():
        ours = [layer] if layer in arrays else [name for end in _ENDS if (name := f"{layer}_{end}") in arrays]
        found |= {names.name(name): names.theirs(name, arrays[name]) for name in ours}
        if {f"{layer}_moving_mean", f"{layer}_running_mean"} & set(ours):
            found[f"{theirs}.{COUNTER}"] = np.array(trained.progress.step, np.int64)
    assert len([name for name in found if not name.endswith(COUNTER)]) == len(arrays)
    return found


_ENDS = ("weight", "bias", "gamma", "beta", "moving_mean", "moving_var", "running_mean", "running_var")


def content(tensors: Mapping[str, np.ndarray], file: Path) -> bytes:
    """The content of a file with these tensors, in the format of the file's suffix. Raises TrainError for an unknown
    suffix.
    """
    if file.suffix.lower() not in _FORMS:
        raise TrainError(f"--torchvision {file} must end in {' or '.join(_FORMS)}, which determines the format")
    return _FORMS[file.suffix.lower()](tensors)


_FORMS: Mapping[str, Callable[[Mapping[str, np.ndarray]], bytes]] = {
    ".pth": torch_file.content, ".pt": torch_file.content, ".safetensors": safetensors_file.content,
}
