"""The optimizer: SGD with momentum, the executor's own where it has one, else on the executor's live arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from graph_passes.executors import Executor
from mxnet_compat import mx
from train.config import Config
from train.model import BATCH_NORM_PARAMS

NO_DECAY = (*BATCH_NORM_PARAMS, "_bias")  # ends of names; He et al., arXiv:1812.01187, section 3.1


class Optimizer(Protocol):
    """What the training loop works with."""

    @property
    def momenta(self) -> Mapping[str, Any]:
        """Live arrays by parameter name, in the executor's layout."""

    scaling: Mapping[str, float]
    """Where dynamic loss scaling stands, to be saved and set again; empty where there is none."""

    def step(self, learning_rate: float, scale: float = 1.0) -> None:
        """Update all parameters from the executor's gradients, which are first multiplied by `scale`. Asynchronous
        where the device is."""


def make_optimizer(executor: Executor, config: Config) -> Optimizer:
    """SGD with the constants of the configuration, for all parameters of the executor."""
    constants = (config.momentum, config.weight_decay, config.nesterov)
    if hasattr(executor, "create_optimizer"):  # where MXNet's operators cannot run
        return executor.create_optimizer(*constants)
    return SGD(executor.params, executor.grads, *constants)


class SGD:
    """SGD with momentum, with the learning rate inside the momentum, as MXNet and NVIDIA's recipes have it:

        g = scale * gradient + weight_decay * w
        m = momentum * m - learning_rate * g
        w = w + m                                       or with Nesterov: w = w + momentum * m - learning_rate * g

    Weight decay spares BatchNorm's gamma and beta and all biases. `momenta` holds m by parameter name, in the layout of
    the parameter. Parameters are MXNet arrays, or NumPy arrays for the reference executor; they are updated in place,
    from what `grads` holds at that time.
    """

    def __init__(self, params: Mapping[str, Any], grads: Mapping[str, Any], momentum: float, weight_decay: float,
                 nesterov: bool = False) -> None:
        self.params = params
        self.grads = grads
        self.momentum = momentum
        self.nesterov = nesterov
        self.scaling: Mapping[str, float] = {}
        self.weight_decays = {name: 0.0 if name.endswith(NO_DECAY) else weight_decay for name in params}
        self.momenta = {
            name: np.zeros_like(p) if isinstance(p, np.ndarray) else mx.nd.zeros(p.shape, p.context, p.dtype)
            for name, p in params.items()
        }

    def step(self, learning_rate: float, scale: float = 1.0) -> None:
        """Update all parameters; gradients are first multiplied by `scale`. Asynchronous on MXNet arrays."""
        if isinstance(next(iter(self.params.values())), np.ndarray):
            self._step_numpy(learning_rate, scale)
        else:
            self._step_mxnet(learning_rate, scale)

    def _step_mxnet(self, learning_rate: float, scale: float) -> None:
        # One call an array: on the CPU MXNet's multi_sgd_mom_update takes six times as long for all of ResNet-50's.
        for name, param in self.params.items():
            grad, momentum, decay = self.grads[name], self.momenta[name], self.weight_decays[name]
            common = {"lr": learning_rate, "momentum": self.momentum, "out": param}
            if self.nesterov:
                # The operator's own weight decay would read the parameter after its update in place.
                mx.nd.nag_mom_update(param, scale * grad + decay * param, momentum, **common)
            else:
                mx.nd.sgd_mom_update(param, grad, momentum, wd=decay, rescale_grad=scale, **common)

    def _step_numpy(self, learning_rate: float, scale: float) -> None:
        for name, param in self.params.items():
            m = self.momenta[name]
            step = learning_rate * (scale * self.grads[name] + self.weight_decays[name] * param)
            m[...] = self.momentum * m - step
            param += self.momentum * m - step if self.nesterov else m
