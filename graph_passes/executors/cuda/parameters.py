"""The memory of parameters, gradients and running statistics: a few flat arrays, of which each tensor is a slice.

With flat arrays the optimizer is one launch, and a bucket of gradients is one contiguous array for the all-reduce.
Tensors are in the order in which the backward pass finishes their gradients: the classifier first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from graph_passes import roles
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Graph, Ref
from graph_passes.operators import Shape, shown_name
from graph_passes.passes.precision import ITEM_BYTES

SLICE_ALIGNMENT = 64  # elements: 128 bytes in 16-bit types
_CUDA = Declarations("optimizer.cu")
MAX_SLOTS = _CUDA.value("MAX_SLOTS")  # most state arrays that an optimizer keeps for each parameter
VECTOR = _CUDA.value("VEC")  # numbers of channels and classes are padded to multiples of VECTOR for the tensor cores


def padded(size: int) -> int:
    """The next multiple of 8."""
    return -(-size // VECTOR) * VECTOR


def padded_channels(channels: int) -> int:
    """Padded channels of a convolution's input: 3 become 4, for which cuDNN has tensor-core kernels; other numbers stay
    unchanged.
    """
    return 4 if channels == 3 else channels


@dataclass(frozen=True)
class Parameter:
    """A learned tensor. `shape` is canonical (fp32, OHWI); `device_shape` is padded with zeros.

    `is_weight`: a weight of a convolution, the classifier, recurrent layers or an embedding. A weight has a copy in the
    network's dtype in addition to the fp32 master, a gradient in that dtype, and weight decay. Other parameters
    (BatchNorm's gamma and beta, biases) are fp32 throughout.
    """

    name: str
    shape: tuple[int, ...]
    device_shape: tuple[int, ...]
    is_weight: bool

    @property
    def size(self) -> int:
        return math.prod(self.device_shape)

    def to_device(self, array: np.ndarray, dtype: str = "float32") -> np.ndarray:
        """Convert a canonical array to the device's form: flat and padded."""
        canonical = self._aligned(array)
        padding = [(0, large - small) for small, large in zip(canonical.shape, self.device_shape, strict=True)]
        return np.pad(canonical.astype(dtype), padding).ravel()

    def to_canonical(self, flat: np.ndarray) -> np.ndarray:
        """Convert a flat array from the device to canonical form, in fp32."""
        array = np.asarray(flat, np.float32).reshape(self.device_shape)
        inner = tuple(slice(0, size) for size in self._aligned_shape)
        return array[inner].reshape(self.shape).copy()

    @property
    def _aligned_shape(self) -> tuple[int, ...]:
        """The canonical shape with the device's number of dimensions: a classifier's (K, C) becomes (K, 1, 1, C)."""
        if len(self.shape) == len(self.device_shape):
            return self.shape
        return (self.shape[0], *(1,) * (len(self.device_shape) - len(self.shape)), *self.shape[1:])

    def _aligned(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array).reshape(self._aligned_shape)


def parameters_of(graph: Graph, shapes: Mapping[Ref, Shape], inputs: tuple[str, ...]) -> list[Parameter]:
    """Every parameter of a forward graph, parameters of the last layer first. This is the order in which the gradients
    are ready.
    """
    uses, weights, first = roles.uses(graph), roles.weights(graph), roles.first_weights(graph)
    parameters: dict[str, Parameter] = {}
    for node in reversed(list(graph)):
        for ref in node.inputs:
            name = ref.node
            if not graph[name].is_variable or name in graph.aux or name in inputs or name in parameters:
                continue
            shape, use = tuple(shapes[ref]), uses[name]
            if name not in weights:
                device_shape: tuple[int, ...] = (*shape[:-1], padded(shape[-1]))
            elif any(reader.op == "FullyConnected" for reader in graph.consumers[ref]):
                device_shape = (padded(shape[0]), 1, 1, padded(shape[1]))
            elif shown_name(use.node.op) == "FullyConnected":  # also covers FullyConnected in INT8
                device_shape = (padded(shape[0]), 1, 1, shape[1])
            elif use.node.op == "Convolution":
                device_shape = _weight_shape(shape, use.node["num_group"], name in first)
            elif use.node.get("num_group") == 1:
                device_shape = (*shape[:3], padded_channels(shape[3]))
            else:
                device_shape = shape
            parameters[name] = Parameter(name, shape, device_shape, name in weights)
    return list(parameters.values())


def _weight_shape(shape: Shape, groups: int, reads_images: bool) -> Shape:
    """The padded shape of a convolution's weight (K, KH, KW, C / groups)."""
    filters, *size, channels = shape
    if groups == 1:
        return padded(filters), *size, padded_channels(channels) if reads_images else padded(channels)
    return (padded(filters) if is_depthwise(shape, groups) else filters), *size, channels


def is_depthwise(weight: Shape, groups: int) -> bool:
    """Whether a convolution with a weight of this shape has a filter for each channel."""
    return weight[0] == groups and weight[-1] == 1


class FlatArray:
    """One flat array of device memory, cut into named slices."""

    def __init__(self, dtype: str, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        self.dtype = dtype
        self.slices: dict[str, Buffer] = {}
        self.starts: dict[str, int] = {}  # start of each slice, in elements
        self.address = 0
        self.size = 0
        for name, shape in tensors:
            self.starts[name] = self.size
            self.slices[name] = Buffer(name, shape, dtype, persistent=True)
            self.size += -(-math.prod(shape) // SLICE_ALIGNMENT) * SLICE_ALIGNMENT

    @property
    def num_bytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]

    def place(self, address: int) -> None:
        self.address = address
        for name, buffer in self.slices.items():
            buffer.address = address + self.starts[name] * ITEM_BYTES[self.dtype]


class ParameterStore:
    """All state of a network that outlives a step. `dtype`: the type of the network's tensors.

    `wire_dtype`: the type in which gradients are averaged over several GPUs. If it differs from `dtype`, the gradients
    of the weights are copied to `wire_gradients`, and the optimizer reads the copies. `frozen` parameters and running
    statistics come last and have no gradients and no optimizer state. `folded`: the store of the folded parameters that
    replace some parameters in the network (`folding.py`).
    """

    def __init__(self, parameters: Iterable[Parameter], statistics: Mapping[str, tuple[int, ...]], dtype: str,
                 wire_dtype: str | None = None, frozen: Collection[str] = (),
                 folded: FoldedStore | None = None) -> None:
        ordered = sorted(parameters, key=lambda parameter: parameter.name in frozen)
        self.parameters = {parameter.name: parameter for parameter in ordered}
        self.trained = [parameter for parameter in ordered if parameter.name not in frozen]
        self.dtype, self.folded = dtype, folded
        everything, trained = _shapes(ordered), _shapes(self.trained)
        weights = _shapes(p for p in self.trained if p.is_weight)
        self.master = FlatArray("float32", everything)
        # Optimizer state. Every optimizer has a first array; the second has memory only if the optimizer needs it.
        self.states = [FlatArray("float32", trained) for _ in range(MAX_SLOTS)]
        self.weight_gradients = FlatArray(dtype, weights)
        self.other_gradients = FlatArray("float32", _shapes(p for p in self.trained if not p.is_weight))
        self.wire_gradients = FlatArray(wire_dtype or dtype, weights if wire_dtype not in (None, dtype) else ())
        in_order = sorted(statistics.items(), key=lambda item: item[0] in frozen)
        self.statistics = FlatArray("float32", in_order)
        self.copies = FlatArray(dtype, _shapes(p for p in ordered if p.is_weight) if dtype != "float32" else ())
        # Moving averages, which have memory only if an optimizer keeps them. Frozen tensors come last, so these arrays
        # have the layout of the first parts of `master` and `statistics`.
        self.ema = FlatArray("float32", trained)
        self.ema_statistics = FlatArray("float32", [item for item in in_order if item[0] not in frozen])

    @property
    def arrays(self) -> dict[str, FlatArray]:
        return {"master": self.master, "state 1": self.states[0], "weight_gradients": self.weight_gradients,
                "other_gradients": self.other_gradients, "wire_gradients": self.wire_gradients,
                "statistics": self.statistics, "copies": self.copies}

    def value(self, name: str) -> Buffer:
        """A parameter in the network's dtype: the copy if one exists, otherwise the fp32 master."""
        return self.copies.slices.get(name) or self.master.slices[name]

    @property
    def values(self) -> dict[str, Buffer]:
        """The buffers that the network computes with, by variable."""
        return {name: self.value(name) for name in self.parameters} | (self.folded.values if self.folded else {})

    @property
    def gradients(self) -> dict[str, Buffer]:
        """The gradients that the backward pass computes."""
        return {**self.weight_gradients.slices, **self.other_gradients.slices}

    @property
    def reduced_gradients(self) -> dict[str, Buffer]:
        """The gradients that the optimizer reads."""
        return {**self.gradients, **self.wire_gradients.slices}


class FoldedStore:
    """The parameters of a folded graph, in the network's dtype (biases in fp32), and the running statistics of
    BatchNorms that could not be folded."""

    def __init__(self, parameters: Iterable[Parameter], statistics: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        self.parameters = {parameter.name: parameter for parameter in parameters}
        self.dtype = dtype
        self.weights = FlatArray(dtype, _shapes(p for p in self.parameters.values() if p.is_weight))
        self.others = FlatArray("float32", _shapes(p for p in self.parameters.values() if not p.is_weight))
        self.statistics = FlatArray("float32", statistics.items())
        self.gradients: dict[str, Buffer] = {}

    @property
    def arrays(self) -> dict[str, FlatArray]:
        return {"weights": self.weights, "others": self.others, "statistics": self.statistics}

    @property
    def values(self) -> dict[str, Buffer]:
        """The buffers that the network computes with, by variable."""
        return {**self.weights.slices, **self.others.slices}


class QuantisedStore:
    """The parameters of a graph in INT8, each in its own type, and the running statistics of BatchNorms that could not
    be folded. `dtypes`: the types of the parameters by name; `dtype`: the type of layers that stay in floats.
    """

    def __init__(self, parameters: Iterable[Parameter], dtypes: Mapping[str, str],
                 statistics: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        self.parameters = {parameter.name: parameter for parameter in parameters}
        self.dtypes, self.dtype = dtypes, dtype
        self._typed = {each: FlatArray(each, _shapes(p for p in self.parameters.values() if dtypes[p.name] == each))
                       for each in sorted({dtypes[name] for name in self.parameters})}
        self.statistics = FlatArray("float32", statistics.items())
        self.gradients: dict[str, Buffer] = {}

    @property
    def arrays(self) -> dict[str, FlatArray]:
        return {**self._typed, "statistics": self.statistics}

    @property
    def values(self) -> dict[str, Buffer]:
        """The buffers that the network computes with, by variable."""
        return {name: buffer for array in self._typed.values() for name, buffer in array.slices.items()}


Store = ParameterStore | FoldedStore | QuantisedStore  # stores that a graph can run on


def _shapes(parameters: Iterable[Parameter]) -> list[tuple[str, tuple[int, ...]]]:
    return [(parameter.name, parameter.device_shape) for parameter in parameters]
