"""AdamW: Adam with weight decay decoupled from the gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from graph_passes.optimizers.base import Rule, Update, is_numpy


@dataclass(frozen=True)
class AdamW(Rule):
    """Loshchilov and Hutter, arXiv:1711.05101, algorithm 2, with the learning rate as the schedule, as in PyTorch:

        g = scale * gradient
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w = w - learning_rate * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay * w)

    t is the number of the update, counted from 1.
    """

    slots = ("mean", "variance")
    counts = True
    # ConvNeXt's constants (Liu et al., arXiv:2201.03545, table 5), for a learning rate of 4e-3 with 4,096 images.
    recipe: ClassVar[Mapping[str, Any]] = {"learning_rate": 2.5e-4, "weight_decay": 0.05}

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    @property
    def kernel(self) -> str:
        return "AdamW"

    @property
    def kernel_constants(self) -> tuple[float, ...]:
        """Compute 1 - beta and log(beta) here: computed from an fp32 beta near 1, both would have few digits."""
        return (*(constant for beta in self.betas for constant in (beta, 1 - beta, _log(beta))), self.epsilon)

    def update(self, arrays: Any, weight: Any, gradient: Any, state: tuple[Any, ...], is_weight: bool,
               step: Update) -> None:
        rate, decay = step.learning_rate, self.decay(is_weight)
        if is_numpy(arrays):
            weight -= rate * self.direction(weight, gradient, state, decay, step)
            return
        # MXNet's Adam takes one pass over memory instead of ten, but has no bias correction, so the correction goes
        # into the rate.
        beta1, beta2 = self.betas
        root = math.sqrt(1 - beta2**step.number)
        if decay:
            weight *= 1 - rate * decay
        arrays.adam_update(weight, gradient, *state, lr=rate * root / (1 - beta1**step.number), beta1=beta1,
                           beta2=beta2, epsilon=self.epsilon * root, rescale_grad=step.scale, out=weight)

    def direction(self, weight: Any, gradient: Any, state: tuple[Any, ...], decay: float, step: Update) -> Any:
        """The update direction, which is multiplied by the learning rate. Also updates mean and variance in `state`.
        For NumPy arrays.
        """
        mean, variance = state
        gradient = step.scale * gradient
        beta1, beta2 = self.betas
        mean[...] = beta1 * mean + (1 - beta1) * gradient
        variance[...] = beta2 * variance + (1 - beta2) * gradient * gradient
        root = (variance / (1 - beta2**step.number)) ** 0.5
        return mean / (1 - beta1**step.number) / (root + self.epsilon) + decay * weight


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


RULE = AdamW
