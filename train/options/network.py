"""Options of the network: its name, stochastic depth and dropout, and which layers are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from common.limits import BELOW_1, Limit, between


@dataclass(frozen=True)
class NetworkOptions:
    """Network."""

    model: Annotated[str, "NAME"] = "resnet50"
    """Name of the network: resnet18 to resnet152 (v1.5), resnet50d, resnext50_32x4d, densenet121, vgg16 and others;
    --model '?' lists all. Or a file with a network: MXNet's -symbol.json, or .onnx (docs/migrating.md)."""
    zero_init_residual: bool = True
    """Start each residual block as its shortcut: the gamma of its last BatchNorm is initially 0, not 1
    (arXiv:1706.02677, section 5.1)."""


@dataclass(frozen=True)
class DroppingOptions:
    """Network."""

    stochastic_depth: float = 0.0
    """Stochastic depth (arXiv:1603.09382): in training, leave out residual branches at random, with a probability that
    rises from 0 at the first block to this at the last; 0: off."""
    stochastic_depth_mode: Literal["image", "block"] = "image"
    """With --stochastic-depth, how branches are left out: image: for each image independently; block: for the whole
    batch."""
    dropout: float = 0.0
    """Dropout: in training, set this share of the classifier's inputs to 0 at random; 0: off."""


@dataclass(frozen=True)
class FineTuningOptions:
    """Fine-tuning."""

    freeze: Annotated[str, "LAYERS"] = ""
    """Do not train the first layers, up to the layers whose names begin with this, such as stem, stage2 or
    stage3_block1; backbone: all layers but the classifier. Frozen BatchNorms use their running statistics, and steps
    are faster."""
    backbone_lr_factor: float = 1.0
    """Factor on the learning rate of all layers except the classifier."""


LIMITS: dict[str, Limit] = {
    **dict.fromkeys(("stochastic_depth", "dropout"), BELOW_1),
    "backbone_lr_factor": between(1e-6, 1000),
}
