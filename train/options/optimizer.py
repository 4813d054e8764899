"""Options of the optimizer, the loss and the schedule of the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from common.limits import ABOVE_0_TO_1, AT_LEAST_1, BELOW_1, FRACTION, NOT_NEGATIVE, Limit, between

REFERENCE_BATCH = 256  # images; learning rates are given for this global batch, as in Goyal et al. (arXiv:1706.02677)

LOSSES = SOFTMAX, BCE = ("softmax", "bce")
SCHEDULES = ("cosine", "step", "polynomial")


@dataclass(frozen=True)
class RuleOptions:
    """Optimizer and schedule."""

    learning_rate: float = 0.256
    """Peak learning rate for a global batch of 256 images, scaled linearly with the global batch."""
    optimizer: Annotated[str, "NAME"] = "sgd"
    """sgd: with momentum; adamw: arXiv:1711.05101; lars and lamb: these two with a learning rate for each layer, for
    large batches (arXiv:1708.03888, arXiv:1904.00962); lion: arXiv:2302.06675; rmsprop: in TensorFlow's form. If the
    preset has another optimizer, adamw, lamb, lion and rmsprop come with a learning rate and a weight decay of their
    own (docs/training.md)."""
    momentum: float = 0.875
    """Optimizers sgd, lars and rmsprop: momentum; with rmsprop 0.9 by default."""
    nesterov: bool = False
    """Optimizers sgd and lars: use Nesterov's momentum."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Optimizers adamw and lamb: decay of the moving averages of the gradient and of its square, per step. Optimizer
    lion: decay of the average in the step's direction, and in the stored average; by default 0.9 and 0.99."""
    rho: float = 0.9
    """Optimizer rmsprop: decay of the moving average of the squared gradient, per step."""
    epsilon: float = 1e-8
    """Optimizers adamw and lamb: constant added to the root of the mean square, by which gradients are divided.
    Optimizer rmsprop: constant added to the mean square itself; by default 1e-3."""
    weight_decay: float = 1 / 32768
    """Weight decay; never applied to BatchNorm parameters and biases."""
    trust_coefficient: float = 0.001
    """Optimizer lars: the learning rate of a layer is multiplied by this times |weights| / |decayed gradient|."""


@dataclass(frozen=True)
class ClippingOptions:
    """Optimizer and schedule."""

    clip_norm: float = 0.0
    """Gradient clipping (arXiv:1211.5063): scale all gradients down together if their common norm is larger than this,
    before the optimizer; 0: off. metrics.jsonl and TensorBoard have the norm before clipping."""


@dataclass(frozen=True)
class LossOptions:
    """Optimizer and schedule."""

    label_smoothing: float = 0.1
    """Share of the target that goes to the wrong classes."""
    loss: Annotated[str, "NAME"] = SOFTMAX
    """softmax: cross entropy of the scores' softmax. bce: binary cross entropy, the mean over the classes, each of
    which is decided independently, so probabilities need not add up to 1 (arXiv:2110.00476). Or a plug-in's loss."""
    bce_threshold: float = 0.0
    """Loss bce: targets above this, after smoothing and mixing, become 1 and the others 0; 0: targets stay as they
    are."""
    class_weights: float = 0.0
    """Loss softmax, for classes of unequal size: weigh a class's targets in proportion to its number of images to the
    power of -CLASS_WEIGHTS; 0: all equally. The mean weight of the images is 1. (--balance draws rare classes more
    often.)"""


@dataclass(frozen=True)
class OptimizerOptions(LossOptions, ClippingOptions, RuleOptions):
    """Optimizer and schedule."""

    accumulate: int = 1
    """Batches whose gradients are averaged into one optimizer step."""
    ema_decay: float = 0.0
    """Keep an exponential moving average of the weights with this decay per optimizer step, and use it in validation
    and export; 0: off. The decay is lower in the first steps, so that the average soon forgets the initial weights."""


@dataclass(frozen=True)
class ScheduleOptions:
    """Optimizer and schedule."""

    schedule: Annotated[str, "NAME"] = "cosine"
    """How the learning rate falls after the warm-up: cosine, step, polynomial, or a plug-in's schedule."""
    warmup_epochs: float = 5.0
    """Epochs over which the learning rate first rises linearly. If --epochs makes a run shorter than its preset, the
    default is at most a fifth of the epochs."""
    final_learning_rate: float = 0.0
    """Schedules cosine and polynomial: learning rate at the end, scaled like --learning-rate."""
    decay_epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    """Schedule step: epochs at which the learning rate is multiplied by --decay-factor."""
    decay_factor: float = 0.1
    """Schedule step: factor on the learning rate at each of --decay-epochs."""
    decay_power: float = 2.0
    """Schedule polynomial: its exponent."""


LIMITS: dict[str, Limit] = {
    # Published learning rates range from 2.5e-5 (Lion) to about 1 (LARS).
    "learning_rate": between(1e-9, 1000),
    **dict.fromkeys(("epsilon", "trust_coefficient", "decay_factor"), ABOVE_0_TO_1),
    "decay_power": between(0.01, 100),
    "weight_decay": between(0, 100),
    "clip_norm": (lambda value: value == 0 or value >= 1e-6, "0, or at least 1e-06"),  # clipping adds 1e-6 to the norm
    **dict.fromkeys(("warmup_epochs", "final_learning_rate"), NOT_NEGATIVE),
    **dict.fromkeys(("momentum", "rho", "label_smoothing", "bce_threshold", "ema_decay"), BELOW_1),
    "betas": (lambda value: min(value) >= 0 and max(value) < 1, "two fractions below 1"),
    "class_weights": FRACTION,
    "accumulate": AT_LEAST_1,
}
