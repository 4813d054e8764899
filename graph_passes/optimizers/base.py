"""The parts that all optimizers share: the interface of a rule, and the optimizer that applies one to MXNet or NumPy
arrays."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

Arrays = Mapping[str, Any]


class Update(NamedTuple):
    """The values of one step that are equal for all parameters."""

    learning_rate: float
    scale: float  # factor by which gradients are multiplied first
    number: int  # number of this update, from 1


@dataclass(frozen=True)
class Rule(ABC):
    """An optimizer: its constants, which are options of a run under the same names, and its formula.

    `weight_decay` and the ratios of LARS and LAMB apply only to weights (`roles.weights`).
    """

    slots: ClassVar[tuple[str, ...]]
    """Names of the state arrays for each parameter."""
    rate_in: ClassVar[tuple[str, ...]] = ()
    """State arrays that contain the learning rate as a factor: if it jumps, they must be scaled with it."""
    counts: ClassVar[bool] = False
    """Whether the formula contains the number of updates, which must then be saved."""
    norms_of: ClassVar[Literal["", "gradient", "update"]] = ""
    """What a weight's norm is compared with to scale its learning rate; on a GPU this takes additional launches."""
    recipe: ClassVar[Mapping[str, Any]] = {}
    """Default values of options for this optimizer, if a run's preset is made for another one."""

    weight_decay: float = 0.0

    @property
    @abstractmethod
    def kernel(self) -> str:
        """Name of the struct in optimizer.cu, with template arguments."""

    @property
    @abstractmethod
    def kernel_constants(self) -> tuple[float, ...]:
        """Values of `State::constants` for the struct."""

    @abstractmethod
    def update(self, arrays: Any, weight: Any, gradient: Any, state: tuple[Any, ...], is_weight: bool,
               step: Update) -> None:
        """Update a parameter and its `slots` in `state` in place. `arrays`: the module of the arrays, mx.nd or np. Does
        not wait for the device."""

    def decay(self, is_weight: bool) -> float:
        """The weight decay of a parameter."""
        return self.weight_decay if is_weight else 0.0


def ratio(above: Any, below: Any) -> Any:
    """`above` / `below`, or 1 if one of the two norms is 0. Does not wait for the device."""
    is_safe = (above > 0) * (below > 0)
    return is_safe * (above / (below + (1 - is_safe))) + (1 - is_safe)


def norm(arrays: Any, array: Any) -> Any:
    """Square root of the sum of squares. A Python float for NumPy arrays, so that their products with fp32 stay fp32.
    Does not wait for the device."""
    root = arrays.sqrt(_squares(arrays, array))
    return float(root) if is_numpy(arrays) else root


def global_norm(arrays: Any, tensors: Iterable[Any]) -> float:
    """The norm over all elements of all tensors. Waits for the device, once for all tensors."""
    squares = [_squares(arrays, tensor) for tensor in tensors]
    together = squares if is_numpy(arrays) else arrays.concat(*squares, dim=0).asnumpy().tolist()
    return math.sqrt(math.fsum(together))


def clip_factor(clip_norm: float, gradient_norm: float) -> float:
    """The factor that brings the global norm of the gradients down to at most `clip_norm`: Pascanu et al.,
    arXiv:1211.5063, algorithm 1, with the 1e-6 of torch.nn.utils.clip_grad_norm_. 1 if the norm is NaN."""
    return min(1.0, clip_norm / (gradient_norm + 1e-6))


def _squares(arrays: Any, array: Any) -> Any:
    """The sum of squares, by BLAS: on MXNet arrays it takes a seventh of the time of `(array * array).sum()`."""
    flat = array.reshape(-1)
    return arrays.dot(flat, flat)


class Optimizer(Protocol):
    """The interface of an optimizer for a training loop."""

    scalars: Mapping[str, float]
    """State besides the arrays, to be saved and restored: the dynamic loss scale, and the number of updates if the
    formula contains it; may be empty."""

    @property
    def state(self) -> Mapping[str, Arrays]:
        """State by slot, then by parameter: live arrays in the executor's layout."""

    @property
    def ema(self) -> Arrays:
        """Moving averages of parameters and running statistics: live arrays in the executor's layout; may be empty."""

    def step(self, learning_rate: float, scale: float = 1.0, ema_decay: float = 0.0) -> None:
        """Update all parameters from the executor's gradients, which are first multiplied by `scale`, and then the
        averages. Asynchronous on a GPU."""

    def swap_ema(self) -> None:
        """Exchange the executor's parameters and running statistics with their averages."""


class ArrayOptimizer:
    """An `Optimizer` on live arrays of MXNet or NumPy, which are updated in place.

    Args:
        rule: the optimizer's formula.
        params, grads: arrays by parameter name; parameters are read and written, gradients are read in every step.
        weights: the parameters that are weights (`roles.weights`).
        ema_of: arrays of which moving averages are kept: ema = decay * ema + (1 - decay) * array.
        rate_factors: factors of the learning rate, by parameter, if not 1 (`roles.rate_factors`).
        clip_norm: the largest global norm of the gradients; 0: no clipping.
    """

    def __init__(self, rule: Rule, params: Arrays, grads: Arrays, weights: Collection[str],
                 ema_of: Arrays | None = None, rate_factors: Mapping[str, float] | None = None,
                 clip_norm: float = 0.0) -> None:
        self.rule, self.params, self.grads, self.weights = rule, params, grads, weights
        self.rate_factors = rate_factors or {}
        self.clip_norm = clip_norm
        # gradient norm of the latest step, before clipping; None without clipping
        self.gradient_norm: float | None = None
        self._arrays = _module_of(next(iter(params.values())))
        self.state = {slot: {name: self._zeros_like(array) for name, array in params.items()} for slot in rule.slots}
        self.ema_of = ema_of or {}
        self.ema = {name: self._zeros_like(array) for name, array in self.ema_of.items()}
        self._updates = 0

    @property
    def scalars(self) -> Mapping[str, float]:
        return {"updates": self._updates} if self.rule.counts else {}

    @scalars.setter
    def scalars(self, scalars: Mapping[str, float]) -> None:
        self._updates = int(scalars.get("updates", 0))

    def step(self, learning_rate: float, scale: float = 1.0, ema_decay: float = 0.0) -> None:
        """Update all parameters from gradients multiplied by `scale`, and then the averages. With clipping it waits for
        the gradients."""
        self._updates += 1
        if self.clip_norm:
            self.gradient_norm = scale * global_norm(self._arrays, (self.grads[name] for name in self.params))
            scale *= clip_factor(self.clip_norm, self.gradient_norm)
        for name, param in self.params.items():
            update = Update(learning_rate * self.rate_factors.get(name, 1.0), scale, self._updates)
            state = tuple(of_parameter[name] for of_parameter in self.state.values())
            self.rule.update(self._arrays, param, self.grads[name], state, name in self.weights, update)
        for name, array in self.ema_of.items():
            self.ema[name][:] = ema_decay * self.ema[name] + (1 - ema_decay) * array

    def swap_ema(self) -> None:
        """Exchange the arrays of `ema_of` with their averages."""
        for name, array in self.ema_of.items():
            own = array.copy()
            array[:] = self.ema[name]
            self.ema[name][:] = own

    def _zeros_like(self, array: Any) -> Any:
        if is_numpy(self._arrays):
            return self._arrays.zeros_like(array)
        return self._arrays.zeros(array.shape, array.context, array.dtype)


def is_numpy(arrays: Any) -> bool:
    """Whether a module of arrays is NumPy. NumPy is imported with the first array, so that --help is quick."""
    return bool(arrays.__name__ == "numpy")


def _module_of(array: Any) -> Any:
    """The array's module: np or mx.nd."""
    if type(array).__module__ == "numpy":
        return importlib.import_module("numpy")
    from common.mxnet_compat import mx

    return mx.nd
