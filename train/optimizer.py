"""The optimizer: SGD with momentum, or LARS; the executor's own where it has one, else on its live arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from common.mxnet_compat import mx
from graph_passes.executors import Executor
from train.config import Config

NO_DECAY = ("_gamma", "_beta", "_bias")  # ends of names; He et al., arXiv:1812.01187, section 3.1


class Optimizer(Protocol):
    """What the training loop works with."""

    @property
    def momenta(self) -> Mapping[str, Any]:
        """Live arrays by parameter name, in the executor's layout."""

    scaling: Mapping[str, float]
    """Where dynamic loss scaling stands, to be saved and set again; empty where there is none."""

    @property
    def averages(self) -> Mapping[str, Any]:
        """Moving averages of parameters and running statistics, live arrays in the executor's layout; or empty."""

    def step(self, learning_rate: float, scale: float = 1.0, average_decay: float = 0.0) -> None:
        """Update all parameters from the executor's gradients, which are first multiplied by `scale`, and then the
        averages. Asynchronous where the device is."""

    def swap_averages(self) -> None:
        """Exchange the executor's parameters and running statistics with their averages."""


def average_decay(decay: float, step: int) -> float:
    """Decay of the moving averages at optimizer step `step`, counted from 0: `decay`, but less in the first steps, so
    that the average is of the weights so far and not of the initial ones.

    Source: tf.train.ExponentialMovingAverage, min(decay, (1 + n) / (10 + n)), with n = step - 1.
    """
    return min(decay, step / (9 + step))


@contextlib.contextmanager
def averages_in_use(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the network computes with the averages, if there are any."""
    if not optimizer.averages:
        yield
        return
    optimizer.swap_averages()
    try:
        yield
    finally:
        optimizer.swap_averages()


def make_optimizer(executor: Executor, config: Config) -> Optimizer:
    """The optimizer of the configuration, for all parameters of the executor."""
    trust_coefficient = config.trust_coefficient if config.optimizer == "lars" else None
    constants = (config.momentum, config.weight_decay, config.nesterov, trust_coefficient)
    if hasattr(executor, "create_optimizer"):  # where MXNet's operators cannot run
        return executor.create_optimizer(*constants, averages=config.ema_decay > 0)
    averaged = {**executor.params, **executor.aux} if config.ema_decay else {}
    return SGD(executor.params, executor.grads, *constants, averaged=averaged)


class SGD:
    """SGD with momentum, with the learning rate inside the momentum, as MXNet and NVIDIA's recipes have it:

        g = scale * gradient + weight_decay * w
        m = momentum * m - learning_rate * g
        w = w + m                                       or with Nesterov: w = w + momentum * m - learning_rate * g

    With a `trust_coefficient` it is LARS (You, Gitman, Ginsburg, arXiv:1708.03888, equation 6): g is multiplied by

        trust_coefficient * |w| / (|scale * gradient| + weight_decay * |w|)

    of its parameter, or by 1 where a norm is 0. Weight decay and LARS spare BatchNorm's gamma and beta and all biases.
    `momenta` holds m by parameter name, in the layout of the parameter. Parameters are MXNet arrays, or NumPy arrays
    for the reference executor; they are updated in place, from what `grads` holds at that time. `averages` holds a
    moving average of each array of `averaged`:

        average = decay * average + (1 - decay) * array
    """

    def __init__(self, params: Mapping[str, Any], grads: Mapping[str, Any], momentum: float, weight_decay: float,
                 nesterov: bool = False, trust_coefficient: float | None = None,
                 averaged: Mapping[str, Any] | None = None) -> None:
        self.params = params
        self.grads = grads
        self.momentum = momentum
        self.nesterov = nesterov
        self.trust_coefficient = trust_coefficient
        self.scaling: Mapping[str, float] = {}
        self.weight_decays = {name: 0.0 if name.endswith(NO_DECAY) else weight_decay for name in params}
        self.averaged = averaged or {}
        self.momenta = {name: _zeros_like(array) for name, array in params.items()}
        self.averages = {name: _zeros_like(array) for name, array in self.averaged.items()}

    def step(self, learning_rate: float, scale: float = 1.0, average_decay: float = 0.0) -> None:
        """Update all parameters; gradients are first multiplied by `scale`. Asynchronous on MXNet arrays."""
        self._update(learning_rate, scale)
        for name, array in self.averaged.items():
            self.averages[name][:] = average_decay * self.averages[name] + (1 - average_decay) * array

    def swap_averages(self) -> None:
        for name, array in self.averaged.items():
            own = array.copy()
            array[:] = self.averages[name]
            self.averages[name][:] = own

    def _update(self, learning_rate: float, scale: float) -> None:
        if isinstance(next(iter(self.params.values())), np.ndarray):
            self._step_numpy(learning_rate, scale)
        else:
            self._step_mxnet(learning_rate, scale)

    def _step_mxnet(self, learning_rate: float, scale: float) -> None:
        # One call an array: on the CPU MXNet's multi_sgd_mom_update takes six times as long for all of ResNet-50's.
        for name, param in self.params.items():
            grad, momentum, decay = self.grads[name], self.momenta[name], self.weight_decays[name]
            common = {"lr": learning_rate, "momentum": self.momentum, "out": param}
            update = mx.nd.nag_mom_update if self.nesterov else mx.nd.sgd_mom_update
            if self._adapts(name):
                update(param, self._trusted(param, scale * grad, decay, mx.nd), momentum, **common)
            elif self.nesterov:
                # The operator's own weight decay would read the parameter after its update in place.
                update(param, scale * grad + decay * param, momentum, **common)
            else:
                update(param, grad, momentum, wd=decay, rescale_grad=scale, **common)

    def _step_numpy(self, learning_rate: float, scale: float) -> None:
        for name, param in self.params.items():
            m, grad, decay = self.momenta[name], scale * self.grads[name], self.weight_decays[name]
            trusted = self._trusted(param, grad, decay, np) if self._adapts(name) else grad + decay * param
            step = learning_rate * trusted
            m[...] = self.momentum * m - step
            param += self.momentum * m - step if self.nesterov else m

    def _adapts(self, name: str) -> bool:
        return self.trust_coefficient is not None and not name.endswith(NO_DECAY)

    def _trusted(self, param: Any, grad: Any, decay: float, arrays: Any) -> Any:
        """The gradient with weight decay times LARS's trust ratio. `arrays` is mx.nd or np; nothing waits."""
        w, g = arrays.sqrt((param * param).sum()), arrays.sqrt((grad * grad).sum())
        is_safe = (w > 0) * (g > 0)
        ratio = self.trust_coefficient * w / (g + decay * w + (1 - is_safe))
        return (grad + decay * param) * (is_safe * ratio + (1 - is_safe))


def _zeros_like(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return np.zeros_like(array)
    return mx.nd.zeros(array.shape, array.context, array.dtype)
