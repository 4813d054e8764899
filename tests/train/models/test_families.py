"""Each family trains on a CPU by the command, with all kinds of layers that its networks have besides residual blocks.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from train import models
from train.models.network import init_params

# A network of each family; the one with LayerNorm and layer scale gets its own optimizer.
OPTIONS = {
    "efficientnet_b0": ("--stochastic-depth", "0.1", "--dropout", "0.1"),
    "efficientnet_v2_s": (),
    "tf_efficientnet_lite0": (),
    "mobilenet_v2": (),
    "mobilenet_v3_small": ("--dropout", "0.1"),
    "regnet_y_400mf": (),
    "convnext_tiny": ("--optimizer", "adamw", "--learning-rate", "0.02", "--stochastic-depth", "0.1"),
    "seresnet18": (),
    "resnetrs50": (),
}


@pytest.mark.long(but=["mobilenet_v3_small"])
@pytest.mark.parametrize("model", OPTIONS)
def test_a_run_learns(model, run_train, tiny_options, tmp_path):
    """Three colours, in steps of 9 images."""
    given = ("--model", model, "--epochs", "4", "--batch-size", "9", "--image-size", "32", "--learning-rate", "1.0")
    code, _, err = run_train("--output", tmp_path / "run", *tiny_options, *given, *OPTIONS[model])
    assert code == 0, err
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [line["train_loss"] for line in lines if line["event"] == "epoch"]
    assert len(losses) == 4 and np.isfinite(losses).all() and losses[-1] < losses[0]


def test_initial_values_of_convnext():
    """Normal with deviation 0.02, and 1e-6 for layer scale: torchvision/models/convnext.py. The standard error of a
    sample standard deviation is std / sqrt(2 n)."""
    params, _ = init_params(models.create("convnext_tiny", 7).symbol, seed=3, channels=4)
    for name, value in params.items():
        if name.endswith("_scale_gamma"):
            assert value.shape == (value.size,) and (value == np.float32(1e-6)).all(), name
        elif name.endswith("_gamma"):
            assert (value == 1).all(), name
        elif name.endswith("_weight"):
            drawn = value[..., :3] if name == "stem_conv_weight" else value
            assert abs(drawn.std() - 0.02) < 5 * 0.02 / np.sqrt(2 * drawn.size), name
        else:
            assert name.endswith(("_bias", "_beta")) and not value.any(), name
    assert not params["stem_conv_weight"][..., 3].any()
