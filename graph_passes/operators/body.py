"""What a body is written with. The body of an operator says in primitives what the operator computes:

    def body(b: Body) -> list[Any]:                                # of ConvolutionAddRelu
        return [b.relu(b.add(b.bias(b.conv(b["data"], b["weight"]), b["bias"]), b["addend"]))]

It is a function from a `Body`, which has the inputs of a node by their roles and a method for each primitive, to the
outputs. What it works on is the `Body`'s matter: numbers of expressions (`graph_passes/values.py`), arrays or shapes
(`domains.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class Body(ABC):
    """The inputs of a node, and the primitives. A value is whatever the inputs are."""

    def __init__(self, node: Any, roles: Sequence[str], inputs: Sequence[Any]) -> None:
        self.node, self.inputs = node, tuple(inputs)
        self._by_role = dict(zip(roles, inputs, strict=False))

    def __getitem__(self, role: str) -> Any:
        return self._by_role[role]

    def has(self, role: str) -> bool:
        return role in self._by_role

    def all(self, *roles: str) -> list[Any]:
        return [self._by_role[role] for role in roles]

    # --- what is made of primitives ---

    def dropped(self, x: Any) -> Any:
        """x with some images dropped, where the node has factors for them."""
        return self.drop(x, self["factors"]) if self.has("factors") else x

    def total(self, first: Any) -> Any:
        """The sum of the gradients that the node adds."""
        if not self.has("out_grad_2"):
            return first
        second, stride = self["out_grad_2"], self.node.get("grad_stride")
        return self.add(first, self.scatter(second, stride, first) if stride else second)

    def through_relu(self, gradient: Any, suffix: str = "") -> Any:
        """The gradient of what ReLU reads, made again of what the BatchNorm before it reads."""
        return self.gate(gradient, self.mask(self.normalised(self[f"saved{suffix}"], suffix)))

    def reduced(self, gradient: Any, suffix: str = "") -> list[Any]:
        """The sums of a BatchNorm's backward pass: the gradients of gamma and beta."""
        return self.norm_sums(gradient, *self.all(f"data{suffix}", f"saved{suffix}"))

    def with_sums(self, x: Any) -> list[Any]:
        """A tensor, and its sums for the BatchNorm that reads it."""
        return [x, self.sums(x)]

    def ended(self, y: Any, relu: bool) -> Any:
        """A convolution with the bias, the addend and the ReLU that the node has."""
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
        """Where x is above 0, which is where its ReLU is: bits."""

    @abstractmethod
    def gate(self, gradient: Any, mask: Any) -> Any:
        """A gradient where a ReLU let it through."""

    @abstractmethod
    def drop(self, x: Any, factors: Any) -> Any:
        """The product with the factors of the node's row, one for each image."""

    @abstractmethod
    def scatter(self, compact: Any, stride: tuple[int, int], like: Any) -> Any:
        """Images of the shape of `like`, of which these are the pixels whose row and column are multiples of the
        stride; 0 elsewhere."""

    @abstractmethod
    def stored(self, x: Any) -> Any:
        """x in the dtype of `data`, as it is written, where what comes after it reads it so."""

    # --- convolutions ---

    @abstractmethod
    def conv(self, data: Any, weight: Any, **changes: Any) -> Any:
        """`changes`: attributes that are not the node's."""

    @abstractmethod
    def bias(self, data: Any, bias: Any) -> Any: ...

    @abstractmethod
    def dgrad(self, gradient: Any, weight: Any) -> Any:
        """The gradient of a convolution's data, of the node's `data_shape`."""

    @abstractmethod
    def wgrad(self, gradient: Any, data: Any) -> Any: ...

    # --- BatchNorm in training ---

    @abstractmethod
    def sums(self, x: Any) -> Any: ...

    @abstractmethod
    def statistics(self, suffix: str = "") -> list[Any]:
        """What the gradient needs (`saved`), and the new running statistics: of `data`, from its `sums`."""

    @abstractmethod
    def normalised(self, saved: Any, suffix: str = "") -> Any:
        """`data` with mean 0 and variance 1, times gamma and with beta."""

    @abstractmethod
    def norm_sums(self, gradient: Any, data: Any, saved: Any) -> list[Any]:
        """The gradients of gamma and beta."""

    @abstractmethod
    def norm_grad(self, gradient: Any, suffix: str = "") -> Any:
        """The gradient of `data`, from that of what `normalised` gives."""

    @abstractmethod
    def max_of_3x3(self, x: Any) -> Any:
        """Maxima with stride 2 and padding 1, in NHWC: the stem's pooling."""

    # --- INT8 ---

    @abstractmethod
    def rescaled(self, sums: Any, multiplier: Any) -> Any:
        """Integer sums of a convolution in the unit of its output."""

    @abstractmethod
    def add_rescaled(self, x: Any, addend: Any, ratio: float) -> Any:
        """The sum with an addend in int8, whose unit is `ratio` of x's."""

    @abstractmethod
    def saturated(self, x: Any) -> Any:
        """As int8."""

    # --- for value numbering alone: operators of which these are a part describe shapes and NumPy by hand ---

    def batch_norm(self) -> list[Any]:
        """A BatchNorm that is not in its halves: output, mean and variance."""
        raise NotImplementedError

    def pooled(self, x: Any) -> list[Any]:
        """The maxima, and where they are in their windows."""
        raise NotImplementedError

    def unpooled(self, gradient: Any, winner: Any) -> Any:
        """A gradient at the winners; where these are of a ReLU with its pooling, through that ReLU."""
        raise NotImplementedError

    def winner_above_0(self, winner: Any, pooled: Any) -> Any:
        """Of a ReLU with its pooling: nobody where the maximum is 0."""
        raise NotImplementedError

    def at_winner(self, data: Any, winner: Any) -> Any:
        """The data where the maxima are."""
        raise NotImplementedError

    def data_of(self, at_winner: Any) -> Any:
        """What `at_winner` has taken its values from."""
        raise NotImplementedError

    def gate_at_winner(self, gradient: Any, winner: Any) -> Any:
        """A gradient where there is a winner."""
        raise NotImplementedError

    def primitive(self, inputs: Sequence[Any] | None = None) -> list[Any]:
        """The node as a primitive of its own, of these inputs instead of its own if they are given."""
        raise NotImplementedError

    def reserve(self, of: Any) -> Any:
        """What a recurrent layer leaves for its gradient, in the form of the node's algorithm."""
        raise NotImplementedError

    def read_reserve(self, reserve: Any) -> Any:
        """That as another layer left it, if its algorithm is the node's."""
        raise NotImplementedError
