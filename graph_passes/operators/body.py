"""The language of bodies. The body of an operator expresses it in primitives:

    def body(b: Body) -> list[Any]:                                # of ConvolutionAddRelu
        return [b.relu(b.add(b.bias(b.conv(b["data"], b["weight"]), b["bias"]), b["addend"]))]

A body is a function from a `Body` to the outputs. A `Body` has the inputs of a node by role and a method for each
primitive. The values can be numbers of expressions (`graph_passes/values.py`), arrays or shapes (`domains.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class Body(ABC):
    """The inputs of a node, and the primitives. Values have the type of the inputs."""

    def __init__(self, node: Any, roles: Sequence[str], inputs: Sequence[Any]) -> None:
        self.node, self.inputs = node, tuple(inputs)
        self._by_role = dict(zip(roles, inputs, strict=False))

    def __getitem__(self, role: str) -> Any:
        return self._by_role[role]

    def has(self, role: str) -> bool:
        return role in self._by_role

    def all(self, *roles: str) -> list[Any]:
        return [self._by_role[role] for role in roles]

    # --- operations made of primitives ---

    def dropped(self, x: Any) -> Any:
        """x times the node's stochastic-depth factors, if it has any."""
        return self.drop(x, self["factors"]) if self.has("factors") else x

    def total(self, first: Any) -> Any:
        """The sum of `first` and the node's second gradient, if it has one."""
        if not self.has("out_grad_2"):
            return first
        second, stride = self["out_grad_2"], self.node.get("grad_stride")
        return self.add(first, self.scatter(second, stride, first) if stride else second)

    def through_relu(self, gradient: Any, suffix: str = "") -> Any:
        """The gradient of ReLU's input; the mask is recomputed from the input of the preceding BatchNorm."""
        return self.gate(gradient, self.mask(self.normalised(self[f"saved{suffix}"], suffix)))

    def reduced(self, gradient: Any, suffix: str = "") -> list[Any]:
        """The sums of a BatchNorm's backward pass: the gradients of gamma and beta."""
        return self.norm_sums(gradient, *self.all(f"data{suffix}", f"saved{suffix}"))

    def with_sums(self, x: Any) -> list[Any]:
        """A tensor and its sums, for the BatchNorm that reads it."""
        return [x, self.sums(x)]

    def epilogue(self, y: Any, relu: bool) -> Any:
        """The convolution followed by the node's bias, addend and ReLU."""
        y = self.bias(y, self["bias"]) if self.has("bias") else y
        y = self.add(y, self["addend"]) if self.has("addend") else y
        return self.relu(y) if relu else y

    # --- single elements ---

    @abstractmethod
    def relu(self, x: Any) -> Any: ...

    @abstractmethod
    def add(self, one: Any, other: Any) -> Any: ...

    @abstractmethod
    def mask(self, x: Any) -> Any:
        """One bit per element: whether x is above 0."""

    @abstractmethod
    def gate(self, gradient: Any, mask: Any) -> Any:
        """A gradient masked by the bits of a ReLU."""

    @abstractmethod
    def drop(self, x: Any, factors: Any) -> Any:
        """The product with the factors in the node's row, one for each image."""

    @abstractmethod
    def scatter(self, compact: Any, stride: tuple[int, int], like: Any) -> Any:
        """Images with the shape of `like`, with the compact pixels where row and column are multiples of the stride,
        and 0 at all other pixels.
        """

    @abstractmethod
    def stored(self, x: Any) -> Any:
        """x rounded to the dtype of `data`, as later operators read it from memory."""

    # --- convolutions ---

    @abstractmethod
    def conv(self, data: Any, weight: Any, **changes: Any) -> Any:
        """A convolution. `changes`: attributes that differ from the node's."""

    @abstractmethod
    def bias(self, data: Any, bias: Any) -> Any: ...

    @abstractmethod
    def dgrad(self, gradient: Any, weight: Any) -> Any:
        """The gradient of a convolution's data, with the shape `data_shape` of the node."""

    @abstractmethod
    def wgrad(self, gradient: Any, data: Any) -> Any: ...

    # --- BatchNorm in training ---

    @abstractmethod
    def sums(self, x: Any) -> Any: ...

    @abstractmethod
    def statistics(self, suffix: str = "") -> list[Any]:
        """The tensor `saved` for the gradient, and the new running statistics, computed from the `sums` of `data`."""

    @abstractmethod
    def normalised(self, saved: Any, suffix: str = "") -> Any:
        """`data` normalised to mean 0 and variance 1, times gamma, plus beta."""

    @abstractmethod
    def norm_sums(self, gradient: Any, data: Any, saved: Any) -> list[Any]:
        """The gradients of gamma and beta."""

    @abstractmethod
    def norm_grad(self, gradient: Any, suffix: str = "") -> Any:
        """The gradient of `data`, from the gradient of the output of `normalised`."""

    @abstractmethod
    def max_of_3x3(self, x: Any) -> Any:
        """Maxima of 3x3 windows with stride 2 and padding 1, in NHWC: the stem's pooling."""

    # --- INT8 ---

    @abstractmethod
    def rescaled(self, sums: Any, multiplier: Any) -> Any:
        """Integer sums of a convolution, in the unit of its output."""

    @abstractmethod
    def add_rescaled(self, x: Any, addend: Any, ratio: float) -> Any:
        """The sum with an int8 addend, whose unit is `ratio` times the unit of x."""

    @abstractmethod
    def saturated(self, x: Any) -> Any:
        """The value as int8."""


    def batch_norm(self) -> list[Any]:
        """A BatchNorm that is not split into halves: output, mean and variance."""
        raise NotImplementedError

    def pooled(self, x: Any) -> list[Any]:
        """The maxima, and their positions in the windows."""
        raise NotImplementedError

    def unpooled(self, gradient: Any, winner: Any) -> Any:
        """A gradient, moved to the winners. If the winners come from a fused ReLU and pooling, the gradient is masked
        by this ReLU.
        """
        raise NotImplementedError

    def winner_above_0(self, winner: Any, pooled: Any) -> Any:
        """The winners of a fused ReLU and pooling: no winner if the maximum is 0."""
        raise NotImplementedError

    def at_winner(self, data: Any, winner: Any) -> Any:
        """The data at the winners."""
        raise NotImplementedError

    def data_of(self, at_winner: Any) -> Any:
        """The data from which `at_winner` took its values."""
        raise NotImplementedError

    def gate_at_winner(self, gradient: Any, winner: Any) -> Any:
        """A gradient, 0 where there is no winner."""
        raise NotImplementedError

    def primitive(self, inputs: Sequence[Any] | None = None) -> list[Any]:
        """The node itself as a primitive, with other inputs if they are given."""
        raise NotImplementedError

    def reserve(self, of: Any) -> Any:
        """The memory that a recurrent layer leaves for its gradient, in the format of the node's algorithm."""
        raise NotImplementedError

    def read_reserve(self, reserve: Any) -> Any:
        """The `reserve` of another layer, if that layer has the node's algorithm."""
        raise NotImplementedError
