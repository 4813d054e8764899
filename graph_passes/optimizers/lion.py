"""Lion: each weight moves by the learning rate in the direction of the sign of a moving average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from graph_passes.optimizers.base import Rule, Update


@dataclass(frozen=True)
class Lion(Rule):
    """Chen et al., arXiv:2302.06675, algorithm 2:

        g = scale * gradient
        c = beta1 * m + (1 - beta1) * g
        w = w - learning_rate * (sign(c) + weight_decay * w)
        m = beta2 * m + (1 - beta2) * g
    """

    slots = ("mean",)
    # The authors' advice (google/automl, lion/README.md): a tenth of AdamW's learning rate, ten times its weight decay.
    recipe: ClassVar[Mapping[str, Any]] = {"learning_rate": 2.5e-5, "weight_decay": 0.5, "betas": (0.9, 0.99)}

    betas: tuple[float, float] = (0.9, 0.99)

    @property
    def kernel(self) -> str:
        return "Lion"

    @property
    def kernel_constants(self) -> tuple[float, ...]:
        return tuple(constant for beta in self.betas for constant in (beta, 1 - beta))

    def update(self, arrays: Any, weight: Any, gradient: Any, state: tuple[Any, ...], is_weight: bool,
               step: Update) -> None:
        (mean,) = state
        beta1, beta2 = self.betas
        gradient = step.scale * gradient
        between = beta1 * mean + (1 - beta1) * gradient
        mean[:] = beta2 * mean + (1 - beta2) * gradient
        sign = arrays.sign(between) + 0 * between  # keeps NaN as NaN, although MXNet's sign of NaN is 0
        weight -= step.learning_rate * (sign + self.decay(is_weight) * weight)


RULE = Lion
