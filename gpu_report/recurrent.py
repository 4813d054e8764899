"""Section recurrent: single recurrent layers, forward and backward and inference, by precision.

Sizes are those of DeepBench (rnn_problems.h, training) and of articles on GPUs. The data has as many features as the
layer has hidden units. Training computes the gradients of data, weights and initial states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

from gpu_report.figures import Section
from gpu_report.section import Bench, Sampler, Task
from graph_passes import VARIABLE, Graph, Node, Ref
from graph_passes.operators.rnn import GATES

TRAINING, INFERENCE = "forward and backward", "inference"
NAMES = {"lstm": "LSTM", "gru": "GRU", "rnn_relu": "RNN with ReLU"}


class Layer(NamedTuple):
    """A recurrent layer, and the size of the layer's input."""

    mode: str  # `mode` of MXNet's RNN operator
    hidden: int
    batch: int
    steps: int

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products of a forward pass."""
        return 2 * self.steps * self.batch * GATES[self.mode] * self.hidden * 2 * self.hidden

    def __str__(self) -> str:
        return f"hidden {self.hidden}, batch {self.batch}, {self.steps} steps"


LAYERS = (
    Layer("lstm", 1024, 128, 25), Layer("lstm", 2048, 128, 25), Layer("lstm", 4096, 128, 25),
    Layer("lstm", 128, 128, 32), Layer("lstm", 256, 128, 32), Layer("lstm", 512, 128, 32), Layer("lstm", 1024, 128, 32),
    Layer("rnn_relu", 1760, 16, 50), Layer("rnn_relu", 2560, 32, 50), Layer("gru", 2816, 32, 1500),
)
SMALL_LAYERS = tuple(layer for layer in LAYERS if layer.hidden <= 256)  # for a CPU


def layer_graph(mode: str, hidden: int, is_training: bool) -> Graph:
    """The graph of a layer. In training the graph also computes gradients; its input `head` is the gradient of the
    output.
    """
    names = ["data", "parameters", "state", *["state_cell"] * (mode == "lstm")]
    attrs = {"mode": mode, "state_size": hidden, "num_layers": 1}
    inputs = tuple(map(Ref, names))
    variables = [Node(VARIABLE, name) for name in names]
    if not is_training:
        return Graph([*variables, Node("RNN", "rnn", inputs, attrs)], [Ref("rnn")])
    forward = Node("RNNTrain", "rnn", inputs, attrs)
    backward = Node("RNNBackward", "rnn_backward", (Ref("head"), *inputs, Ref("rnn"), forward.output("reserve")), attrs)
    return Graph([*variables, Node(VARIABLE, "head"), forward, backward], [Ref("rnn"), *backward.refs()])


class Machine(Protocol):
    """A device on which layers are timed. `layer` raises UserError for a layer that the device cannot run."""

    precisions: tuple[str, ...]

    def layer(self, layer: Layer, use: str, precision: str) -> Sampler: ...

    def close(self) -> None: ...


def measure(bench: Bench) -> Section:
    """Time all layers. A note names each layer that the device lacks, and each layer for which no time was left."""
    module = bench.machine_module("recurrent")
    if module is None:
        return bench.found()
    with contextlib.closing(module.open_machine(bench.placement)) as machine:
        for task in _tasks(machine, LAYERS if bench.on_gpu else SMALL_LAYERS):
            bench.time(task)
    return bench.found()


def _tasks(machine: Machine, layers: Iterable[Layer]) -> Iterator[Task]:
    for layer in layers:
        for precision in machine.precisions:
            # the data gradient and the weight gradient each take as many products as the forward pass
            for use, passes in ((TRAINING, 3), (INFERENCE, 1)):
                yield Task(f"{NAMES[layer.mode]}, {use}", str(layer), precision, passes * layer.flops,
                           partial(machine.layer, layer, use, precision))
