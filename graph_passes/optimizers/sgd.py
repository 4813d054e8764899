"""SGD with momentum, plain or Nesterov."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graph_passes.optimizers.base import Rule, Update, is_numpy


@dataclass(frozen=True)
class SGD(Rule):
    """SGD with the learning rate inside the momentum, as in MXNet and NVIDIA's recipes:

        g = scale * gradient + weight_decay * w
        m = momentum * m - learning_rate * g
        w = w + m                                       or with Nesterov: w = w + momentum * m - learning_rate * g
    """

    slots = ("momentum",)
    rate_in = ("momentum",)

    momentum: float = 0.9
    nesterov: bool = False

    @property
    def kernel(self) -> str:
        return f"Sgd<{str(self.nesterov).lower()}>"

    @property
    def kernel_constants(self) -> tuple[float, ...]:
        return (self.momentum,)

    def update(self, arrays: Any, weight: Any, gradient: Any, state: tuple[Any, ...], is_weight: bool,
               step: Update) -> None:
        decay = self.decay(is_weight)
        if is_numpy(arrays) or self.nesterov:
            # Add the decay to the gradient first: MXNet's Nesterov with weight decay would read the parameter after its
            # update.
            self.move(arrays, weight, step.scale * gradient + decay * weight, state, step.learning_rate)
        else:
            # One call per array: on the CPU MXNet's multi_sgd_mom_update takes six times as long for all of ResNet-50's
            # arrays.
            arrays.sgd_mom_update(weight, gradient, *state, lr=step.learning_rate, momentum=self.momentum, wd=decay,
                                  rescale_grad=step.scale, out=weight)

    def move(self, arrays: Any, weight: Any, gradient: Any, state: tuple[Any, ...], rate: Any) -> None:
        """The last two lines of the formula, for a gradient with decay."""
        (momentum,) = state
        if is_numpy(arrays):
            step = rate * gradient
            momentum[...] = self.momentum * momentum - step
            weight += self.momentum * momentum - step if self.nesterov else momentum
        else:
            update = arrays.nag_mom_update if self.nesterov else arrays.sgd_mom_update
            update(weight, gradient, momentum, lr=rate, momentum=self.momentum, out=weight)


RULE = SGD
