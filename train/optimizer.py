"""SGD with momentum on an executor's live arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mxnet_compat import mx
from train.model import BATCH_NORM_PARAMS

NO_DECAY = (*BATCH_NORM_PARAMS, "_bias")  # ends of names; He et al., arXiv:1812.01187, section 3.1
ARRAYS_PER_CALL = 60  # MXNet's multi_sgd_mom_update takes no more (MultiSGDKernelParam::N in optimizer_op-inl.h)


class SGD:
    """SGD with momentum, with the learning rate inside the momentum, as MXNet and NVIDIA's recipes have it:

        g = scale * gradient + weight_decay * w
        m = momentum * m - learning_rate * g
        w = w + m                                       or with Nesterov: w = w + momentum * m - learning_rate * g

    Weight decay spares BatchNorm's gamma and beta and all biases. `momenta` holds m by parameter name, in the layout of
    the parameter. Parameters are MXNet arrays, or NumPy arrays for the reference executor; they are updated in place.
    """

    def __init__(self, params: Mapping[str, Any], momentum: float, weight_decay: float, nesterov: bool = False) -> None:
        self.params = params
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decays = {name: 0.0 if name.endswith(NO_DECAY) else weight_decay for name in params}
        self.momenta = {
            name: np.zeros_like(p) if isinstance(p, np.ndarray) else mx.nd.zeros(p.shape, p.context, p.dtype)
            for name, p in params.items()
        }

    def step(self, grads: Mapping[str, Any], learning_rate: float, scale: float = 1.0) -> None:
        """Update all parameters; gradients are first multiplied by `scale`. Asynchronous on MXNet arrays."""
        names = list(self.params)
        if isinstance(self.params[names[0]], np.ndarray):
            self._step_numpy(grads, learning_rate, scale)
        elif self.nesterov:
            self._step_nesterov(grads, learning_rate, scale)
        else:
            for start in range(0, len(names), ARRAYS_PER_CALL):
                self._step_many(names[start : start + ARRAYS_PER_CALL], grads, learning_rate, scale)

    def _step_many(self, names: list[str], grads: Mapping[str, Any], learning_rate: float, scale: float) -> None:
        mx.nd.multi_sgd_mom_update(
            *(array for name in names for array in (self.params[name], grads[name], self.momenta[name])),
            lrs=[learning_rate] * len(names),
            wds=[self.weight_decays[name] for name in names],
            momentum=self.momentum,
            rescale_grad=scale,
            num_weights=len(names),
            out=[self.params[name] for name in names],
        )

    def _step_nesterov(self, grads: Mapping[str, Any], learning_rate: float, scale: float) -> None:
        for name, param in self.params.items():  # MXNet has no multi-tensor operator for it
            # The operator's own weight decay reads the parameter after it was updated in place, so it is added here.
            grad = scale * grads[name] + self.weight_decays[name] * param
            mx.nd.nag_mom_update(param, grad, self.momenta[name], lr=learning_rate, momentum=self.momentum, out=param)

    def _step_numpy(self, grads: Mapping[str, Any], learning_rate: float, scale: float) -> None:
        for name, param in self.params.items():
            m = self.momenta[name]
            step = learning_rate * (scale * grads[name] + self.weight_decays[name] * param)
            m[...] = self.momentum * m - step
            param += self.momentum * m - step if self.nesterov else m
