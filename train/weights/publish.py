"""Writes a trained network as a state_dict for torchvision or timm, in PyTorch's or safetensors' format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from train import models
from train.checkpoint import Checkpoint
from train.errors import TrainError
from train.models.libraries import TORCH
from train.weights import safetensors_file, torch_file
from train.weights.recognise import COUNTER

Arrays = dict[str, np.ndarray]


def state_dict(trained: Checkpoint) -> Arrays:
    """The arrays under torchvision's or timm's names, in the network's order there, convolution weights OIHW, fp32.

    `num_batches_tracked`, PyTorch's counter, is the number of optimizer steps. Raises TrainError for a network that
    neither library has.
    """
    model = trained.config.model
    names = next((names for names in models.published(model) if names.library == TORCH), None)
    if not names:
        raise TrainError(f"neither torchvision nor timm has a {model}: export it "
                         "with --onnx or --params")
    arrays = {**trained.params, **trained.aux}
    found: Arrays = {}
    for layer in names.layers:
        ends = [end for end in _ENDS if f"{layer}_{end}" in arrays]
        for name, array in ((f"{layer}_{end}", arrays[f"{layer}_{end}"]) for end in ends):
            found[names.name(name)] = np.ascontiguousarray(array.transpose(0, 3, 1, 2)) if array.ndim == 4 else array
        if "moving_mean" in ends:
            found[f"{names.layers[layer]}.{COUNTER}"] = np.array(trained.progress.step, np.int64)
    assert len([name for name in found if not name.endswith(COUNTER)]) == len(arrays)
    return found


_ENDS = ("weight", "bias", "gamma", "beta", "moving_mean", "moving_var")


def content(tensors: Mapping[str, np.ndarray], file: Path) -> bytes:
    """The content of a file with these tensors, in the format of the file's ending. Raises TrainError for an unknown
    ending."""
    if file.suffix.lower() not in _FORMS:
        raise TrainError(f"--torchvision {file} must end in {' or '.join(_FORMS)}, which determines the format")
    return _FORMS[file.suffix.lower()](tensors)


_FORMS: Mapping[str, Callable[[Mapping[str, np.ndarray]], bytes]] = {
    ".pth": torch_file.content, ".pt": torch_file.content, ".safetensors": safetensors_file.content,
}
