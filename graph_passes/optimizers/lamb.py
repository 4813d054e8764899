"""LAMB: AdamW with a separate learning rate for each layer, for large batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from graph_passes.optimizers.adamw import AdamW
from graph_passes.optimizers.base import Update, is_numpy, norm, ratio


@dataclass(frozen=True)
class LAMB(AdamW):
    """You et al., arXiv:1904.00962, algorithm 2, with phi(z) = z: the step that AdamW takes for a weight is multiplied
    by the ratio

        |w| / |m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay * w|

    or by 1 if a norm is 0. Biases, gamma and beta are excluded, as in the authors' own code (LAMBOptimizer in
    google-research/albert, `exclude_from_layer_adaptation`). Gradients are not normalised first; `clip_norm` of the
    optimizer clips them to a norm of 1, as NVIDIA's and timm's LAMB do.
    """

    norms_of = "update"
    # Wightman et al., arXiv:2110.00476, table 2, A2: a learning rate of 5e-3 for 2,048 images. Epsilon is the authors'.
    recipe: ClassVar[Mapping[str, Any]] = {"learning_rate": 6.25e-4, "weight_decay": 0.02, "epsilon": 1e-6}

    @property
    def kernel(self) -> str:
        return "Lamb"

    def update(self, arrays: Any, weight: Any, gradient: Any, state: tuple[Any, ...], is_weight: bool,
               step: Update) -> None:
        decay = self.decay(is_weight)
        if is_numpy(arrays):
            direction = self.direction(weight, gradient, state, decay, step)
        else:
            beta1, beta2 = self.betas
            direction = arrays.lamb_update_phase1(weight, gradient, *state, t=step.number, beta1=beta1, beta2=beta2,
                                                  epsilon=self.epsilon, wd=decay, rescale_grad=step.scale)
        if is_weight:
            direction *= ratio(norm(arrays, weight), norm(arrays, direction))
        weight -= step.learning_rate * direction


RULE = LAMB
