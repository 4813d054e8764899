"""Options of the optimizer, the loss and the schedule of the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from common.limits import ABOVE_0_TO_1, AT_LEAST_1, BELOW_1, FRACTION, NOT_NEGATIVE, Limit, between

REFERENCE_BATCH = 256  # images; learning rates are given for this global batch, as in Goyal et al. (arXiv:1706.02677)


@dataclass(frozen=True)
class OptimizerOptions:
    """Optimizer and schedule."""

    learning_rate: float = 0.256
    """Peak learning rate for a global batch of 256 images; it is scaled linearly with the global batch."""
    optimizer: Annotated[str, "NAME"] = "sgd"
    """sgd: with momentum; adamw: arXiv:1711.05101; lars and lamb: the same two with a learning rate for each layer, for
    large batches (arXiv:1708.03888, arXiv:1904.00962); lion: arXiv:2302.06675. Where the preset has another optimizer,
    adamw, lamb and lion bring a learning rate and a weight decay of their own (docs/training.md)."""
    momentum: float = 0.875
    """Optimizers sgd and lars: momentum."""
    nesterov: bool = False
    """Optimizers sgd and lars: Nesterov's momentum."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Optimizers adamw and lamb: what the moving averages of the gradient and of its square keep in each step.
    Optimizer lion: what is kept of the average for the step, and in the average; it brings 0.9 and 0.99."""
    epsilon: float = 1e-8
    """Optimizers adamw and lamb: added to the root of the mean square that gradients are divided by."""
    weight_decay: float = 1 / 32768
    """Weight decay; never applied to BatchNorm parameters and biases."""
    trust_coefficient: float = 0.001
    """Optimizer lars: the learning rate of a layer is multiplied by this times |weights| / |decayed gradient|."""
    clip_norm: float = 0.0
    """Clip gradients: where the norm of all of them together is larger than this, they are scaled down to it before the
    optimizer sees them (arXiv:1211.5063); 0: no clipping. metrics.jsonl and TensorBoard have the norm before."""
    label_smoothing: float = 0.1
    """Share of the target that goes to the wrong classes."""
    loss: Literal["softmax", "bce"] = "softmax"
    """softmax: cross entropy of the scores' softmax; bce: binary cross entropy, the mean over the classes, each of
    which is then a yes or no by itself: an image's probabilities need not add up to 1 (arXiv:2110.00476)."""
    bce_threshold: float = 0.0
    """Loss bce: targets above this, smoothed and mixed, become 1 and others 0; 0: they stay as they are."""
    class_weights: float = 0.0
    """Loss softmax, for classes of unequal size: weigh a class's targets in proportion to its number of images to the
    power of -CLASS_WEIGHTS; 0: all alike. The mean weight of the images is 1. (--balance draws them more often.)"""
    accumulate: int = 1
    """Batches whose gradients are averaged into one optimizer step."""
    ema_decay: float = 0.0
    """Keep an exponential moving average of the weights with this decay per optimizer step, and validate and export
    that; 0: no average. The decay of the first steps is lower, so that the average soon leaves the initial weights."""


@dataclass(frozen=True)
class ScheduleOptions:
    """Optimizer and schedule."""

    schedule: Literal["cosine", "step", "polynomial"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_epochs: float = 5.0
    """Epochs over which the learning rate first rises linearly. Where --epochs makes a run shorter than its preset, the
    default is a fifth of the epochs at most."""
    final_learning_rate: float = 0.0
    """Schedules cosine and polynomial: learning rate at the end, scaled like --learning-rate."""
    decay_epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    """Schedule step: epochs at which the learning rate is multiplied by --decay-factor."""
    decay_factor: float = 0.1
    """Schedule step: see --decay-epochs."""
    decay_power: float = 2.0
    """Schedule polynomial: exponent."""


LIMITS: dict[str, Limit] = {
    # Published ones are from 2.5e-5 (Lion) to about 1 (LARS).
    "learning_rate": between(1e-9, 1000),
    **dict.fromkeys(("epsilon", "trust_coefficient", "decay_factor"), ABOVE_0_TO_1),
    "decay_power": between(0.01, 100),
    "weight_decay": between(0, 100),
    "clip_norm": (lambda value: value == 0 or value >= 1e-6, "0, or at least 1e-06"),  # which clipping adds to the norm
    **dict.fromkeys(("warmup_epochs", "final_learning_rate"), NOT_NEGATIVE),
    **dict.fromkeys(("momentum", "label_smoothing", "bce_threshold", "ema_decay"), BELOW_1),
    "betas": (lambda value: min(value) >= 0 and max(value) < 1, "two fractions below 1"),
    "class_weights": FRACTION,
    "accumulate": AT_LEAST_1,
}
