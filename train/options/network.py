"""Options of the network: which one, what is left out of it at random, and what of it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from common.limits import BELOW_1, Limit, between


@dataclass(frozen=True)
class NetworkOptions:
    """Network."""

    model: Annotated[str, "NAME"] = "resnet50"
    """Network, by its name: resnet18 to resnet152 (v1.5), resnet50d, resnext50_32x4d, wide_resnet50_2 and others;
    --model '?' names them all."""
    zero_init_residual: bool = True
    """Each residual block starts as its shortcut: the gamma of its last BatchNorm is initially 0, not 1
    (arXiv:1706.02677, section 5.1)."""


@dataclass(frozen=True)
class DroppingOptions:
    """Network."""

    stochastic_depth: float = 0.0
    """Leave out residual branches at random in training, with a probability that rises from 0 at the first block to
    this at the last (arXiv:1603.09382); 0: none."""
    stochastic_depth_mode: Literal["image", "block"] = "image"
    """With --stochastic-depth: image: a branch is left out for each image or not; block: for all of a batch at once."""
    dropout: float = 0.0
    """Set this part of what the classifier reads to 0 in training, at random; 0: none."""


@dataclass(frozen=True)
class FineTuningOptions:
    """Fine-tuning."""

    freeze: Annotated[str, "LAYERS"] = ""
    """Leave the beginning of the network as it is, up to the layers whose names begin so, such as stem, stage2 or
    stage3_block1; backbone: all but the classifier. BatchNorms there use their running statistics, and steps are
    faster."""
    backbone_lr_factor: float = 1.0
    """The learning rate of all layers but the classifier is multiplied by this."""


LIMITS: dict[str, Limit] = {
    **dict.fromkeys(("stochastic_depth", "dropout"), BELOW_1),
    "backbone_lr_factor": between(1e-6, 1000),
}
