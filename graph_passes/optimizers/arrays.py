"""The optimizer that applies a rule to arrays of MXNet or NumPy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from graph_passes.optimizers.base import Arrays, Rule, Update


class ArrayOptimizer:
    """An `Optimizer` on live arrays, MXNet's or NumPy's, which are updated in place.

    Args:
        rule: what it does.
        params, grads: by parameter; read and written, and read, in every step.
        weights: the parameters that are weights (`roles.weights`).
        averaged: what to keep moving averages of: average = decay * average + (1 - decay) * array.
    """

    def __init__(self, rule: Rule, params: Arrays, grads: Arrays, weights: Collection[str],
                 averaged: Arrays | None = None) -> None:
        self.rule, self.params, self.grads, self.weights = rule, params, grads, weights
        self._arrays = _module_of(next(iter(params.values())))
        self.state = {slot: {name: self._zeros_like(array) for name, array in params.items()} for slot in rule.slots}
        self.averaged = averaged or {}
        self.averages = {name: self._zeros_like(array) for name, array in self.averaged.items()}
        self._updates = 0

    @property
    def scalars(self) -> Mapping[str, float]:
        return {"updates": self._updates} if self.rule.counts else {}

    @scalars.setter
    def scalars(self, scalars: Mapping[str, float]) -> None:
        self._updates = int(scalars.get("updates", 0))

    def step(self, learning_rate: float, scale: float = 1.0, average_decay: float = 0.0) -> None:
        """See `Optimizer`."""
        self._updates += 1
        update = Update(learning_rate, scale, self._updates)
        for name, param in self.params.items():
            state = tuple(of_parameter[name] for of_parameter in self.state.values())
            self.rule.update(self._arrays, param, self.grads[name], state, name in self.weights, update)
        for name, array in self.averaged.items():
            self.averages[name][:] = average_decay * self.averages[name] + (1 - average_decay) * array

    def swap_averages(self) -> None:
        """See `Optimizer`."""
        for name, array in self.averaged.items():
            own = array.copy()
            array[:] = self.averages[name]
            self.averages[name][:] = own

    def _zeros_like(self, array: Any) -> Any:
        if self._arrays is np:
            return np.zeros_like(array)
        return self._arrays.zeros(array.shape, array.context, array.dtype)


def _module_of(array: Any) -> Any:
    """np or mx.nd."""
    if isinstance(array, np.ndarray):
        return np
    from common.mxnet_compat import mx

    return mx.nd
