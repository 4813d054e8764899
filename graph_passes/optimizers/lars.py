"""LARS: SGD with a separate learning rate for each layer, for large batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graph_passes.optimizers.base import Update, norm
from graph_passes.optimizers.sgd import SGD


@dataclass(frozen=True)
class LARS(SGD):
    """You, Gitman, Ginsburg, arXiv:1708.03888, equation 6: SGD's term g for a weight is multiplied by

        trust_coefficient * |w| / (|scale * gradient| + weight_decay * |w|)

    or by 1 if a norm is 0.
    """

    norms_of = "gradient"

    trust_coefficient: float = 0.001

    @property
    def kernel(self) -> str:
        return f"Lars<{str(self.nesterov).lower()}>"

    @property
    def kernel_constants(self) -> tuple[float, ...]:
        return self.momentum, self.trust_coefficient

    def update(self, arrays: Any, weight: Any, gradient: Any, state: tuple[Any, ...], is_weight: bool,
               step: Update) -> None:
        if not is_weight:
            super().update(arrays, weight, gradient, state, is_weight, step)
            return
        gradient = step.scale * gradient
        w, g = norm(arrays, weight), norm(arrays, gradient)
        is_safe = (w > 0) * (g > 0)
        trust = self.trust_coefficient * w / (g + self.weight_decay * w + (1 - is_safe))
        trusted = (gradient + self.weight_decay * weight) * (is_safe * trust + (1 - is_safe))
        self.move(arrays, weight, trusted, state, step.learning_rate)


RULE = LARS
