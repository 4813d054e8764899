"""A network: its name, its Symbol, and its initial values."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from graph_passes import Graph, Node, Ref, roles
from graph_passes.roles import Use
from train.errors import TrainError

Symbol = Any  # mx.sym.Symbol; MXNet has no type stubs
Arrays = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Network:
    """A network for training.

    `symbol` has the inputs `data` (N, H, W, C), with C = 3, or 4 if the loader pads a zero channel, and `softmax_label`
    (N,), class indices. Its output is class probabilities (N, num_classes). Its gradient is the gradient of the mean
    cross entropy over the batch; the target is 1 - label_smoothing for the right class and label_smoothing /
    (num_classes - 1) for each other class.
    """

    name: str
    num_classes: int
    symbol: Symbol
    # height and width in pixels; if shapes of parameters depend on the size of the images, they are the shapes for this
    # size
    image_size: int = 224

    def __str__(self) -> str:
        return f"{self.name} with {self.num_classes} classes"

    @cached_property
    def graph(self) -> Graph:
        """The Symbol as a graph for our passes and executors. A Dropout's mask is not an output of that graph, because
        MXNet hides the mask."""
        return Graph.from_json(self.symbol.tojson()).rewrite(
            lambda node: node.replace(num_outputs=0) if node.op == "Dropout" else None)

    @property
    def classifier(self) -> tuple[str, ...]:
        """Names of the classifier's weight, and of its bias if it has one. Weight and bias have a row or a value for
        each class.
        """
        return tuple(ref.node for ref in roles.classifier(self.graph).inputs[1:])

    @cached_property
    def has_one_size(self) -> bool:
        """Whether images must have `image_size` pixels, because the shapes of parameters depend on it."""
        return value_shapes(self.graph, size=self.image_size) != value_shapes(self.graph, size=self.image_size + 64)

    def check_image_size(self, size: int) -> None:
        """Raise TrainError for images of a size, in pixels, that the network cannot read."""
        if size != self.image_size and self.has_one_size:
            raise TrainError(f"{self.name} reads images of {self.image_size} pixels only, since the shapes of its "
                             f"parameters depend on their size, and this run has images of {size}: give --image-size "
                             f"{self.image_size}, and leave out options for other sizes")

    def shapes(self, channels: int = 3) -> tuple[Shapes, Shapes]:
        """Shapes of the parameters and of the running statistics, canonical, by name."""
        return value_shapes(self.graph, channels, self.image_size)

    def initial_values(self, seed: int, channels: int = 3, zero_init_residual: bool = True) -> tuple[Arrays, Arrays]:
        """Initial parameters and running statistics, canonical, by `init_params`."""
        return init_params(self.symbol, seed, channels, zero_init_residual, self.image_size)


def init_params(symbol: Symbol, seed: int, channels: int = 3, zero_init_residual: bool = True,
                image_size: int = 224) -> tuple[Arrays, Arrays]:
    """Initial (params, aux) of a network, canonical: fp32, convolution weights OHWI.

    Convolutions: normal with variance 2 / fan_out (He et al., arXiv:1502.01852). Classifier and fully connected layers:
    normal with standard deviation 0.01. Biases: 0. Slopes of PReLU: 0.25, as in the paper of He et al. BatchNorm: beta
    0, gamma 1; with `zero_init_residual`, gamma is 0 in the last BatchNorm of each residual branch, so that a block
    starts as its shortcut (classifier and gamma: Goyal et al., arXiv:1706.02677, section 5.1). A variable with MXNet's
    initialiser Normal or Constant (`blocks.normal`, `blocks.constant`) uses this initialiser instead. Each array
    depends only on the seed and the array's name. The weights of a fourth, padded input channel are 0 and get no
    gradient.
    """
    graph = Graph.from_json(symbol.tojson())
    shapes, aux_shapes = value_shapes(graph, channels, image_size)
    classifier, uses, first = roles.classifier(graph), roles.uses(graph), roles.first_weights(graph)
    zero_gammas = roles.branch_gammas(graph) if zero_init_residual else frozenset()

    params: Arrays = {}
    for name, shape in shapes.items():
        kind, given = _initialiser(graph[name])
        if kind == "constant":
            params[name] = np.full(shape, given["value"], np.float32)
        elif uses[name].input == "weight":
            deviation = (np.float32(given["sigma"]) if kind == "normal"
                         else _deviation(uses[name].node, shape, classifier))
            drawn = (*shape[:3], min(shape[3], 3)) if name in first else shape
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            params[name] = np.zeros(shape, np.float32)
            params[name][..., : drawn[-1]] = rng.standard_normal(drawn, np.float32) * deviation
        else:
            params[name] = np.full(shape, 0 if name in zero_gammas else _constant(uses[name]), np.float32)
    aux = {name: np.full(shape, float(uses[name].input == "moving_var"), np.float32)
           for name, shape in aux_shapes.items()}
    return params, aux


def value_shapes(graph: Graph, channels: int = 3, size: int = 224) -> tuple[Shapes, Shapes]:
    """Shapes of a network's parameters and running statistics, canonical, by name, for images of `size` pixels."""
    shapes = graph.infer_shapes({"data": (1, size, size, channels), "softmax_label": (1,)})
    params = {name: shapes[Ref(name)] for name in graph.arguments if name not in ("data", "softmax_label")}
    return params, {name: shapes[Ref(name)] for name in graph.aux}


def _initialiser(variable: Node) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of a variable's MXNet initialiser; the name is "" if there is none. Gluon may store
    only a name.
    """
    text = variable.attrs.get("__init__", "")
    kind, arguments = json.loads(text) if text.startswith("[") else (text, {})
    return kind, arguments


def _constant(use: Use) -> float:
    """The initial value of a bias, a beta or a gamma."""
    if use.node.op == "LeakyReLU":
        return 0.25
    return float(use.input == "gamma")


def _deviation(node: Node, shape: tuple[int, ...], classifier: Node) -> np.float32:
    """The standard deviation of a weight's initial values."""
    if node.op != "Convolution" or node == classifier:
        return np.float32(0.01)
    filters, height, width, _ = shape  # fan_out does not depend on groups, as in torchvision
    return np.float32(np.sqrt(2.0 / (filters * height * width)))
