"""RMSProp in TensorFlow's form, which the recipes of MobileNetV3 and EfficientNet use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from graph_passes.optimizers.base import Rule, Update


@dataclass(frozen=True)
class RMSProp(Rule):
    """Tieleman and Hinton, lecture 6.5 of 'Neural Networks for Machine Learning', 2012, in the form of
    tf.train.RMSPropOptimizer and of timm's rmsproptf:

        g = scale * gradient + weight_decay * w
        v = rho * v + (1 - rho) * g * g
        m = momentum * m + learning_rate * g / sqrt(v + epsilon)
        w = w - m

    Epsilon is inside the root. PyTorch's RMSprop adds epsilon outside the root: the 0.0316 of torchvision's recipe for
    MobileNetV3 is the root of the 0.001 here. v starts at 0, as in PyTorch and Keras; in timm and TensorFlow it starts
    at 1.
    """

    slots = ("mean_square", "momentum")
    rate_in = ("momentum",)
    # torchvision's recipe of MobileNetV3 (references/classification): a learning rate of 0.064 for 1,024 images.
    recipe: ClassVar[Mapping[str, Any]] = {"learning_rate": 0.016, "weight_decay": 1e-5, "momentum": 0.9,
                                           "epsilon": 1e-3}

    rho: float = 0.9
    momentum: float = 0.9
    epsilon: float = 1e-3

    @property
    def kernel(self) -> str:
        return "RmsProp"

    @property
    def kernel_constants(self) -> tuple[float, ...]:
        return self.rho, 1 - self.rho, self.momentum, self.epsilon

    def update(self, arrays: Any, weight: Any, gradient: Any, state: tuple[Any, ...], is_weight: bool,
               step: Update) -> None:
        mean_square, momentum = state
        gradient = step.scale * gradient + self.decay(is_weight) * weight
        mean_square[:] = self.rho * mean_square + (1 - self.rho) * gradient * gradient
        momentum[:] = self.momentum * momentum + step.learning_rate * gradient / arrays.sqrt(mean_square + self.epsilon)
        weight -= momentum


RULE = RMSProp
