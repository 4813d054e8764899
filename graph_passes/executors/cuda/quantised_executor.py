"""The cuda executor's inference in INT8, on MXNet's GPU arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.executors.base import NO_DRAWS, Draws
from graph_passes.executors.cuda.on_mxnet import OnMXNet
from graph_passes.executors.cuda.quantised import QuantisedNetwork
from graph_passes.graph import Graph
from graph_passes.passes.quantise import Kept, Scales


class QuantisedCudaExecutor(OnMXNet):
    """Inference in INT8: the integers of `executors.reference.QuantisedExecutor`, to the bit; what stays in floats is
    float16.

    Args:
        graph, shapes, device: as for every executor.
        scales, kept: those of `passes/quantise.py`.
        params: by `quantise_params`.
        deterministic: no clock decides which kernels compute what stays in floats.
    """

    def __init__(self, graph: Graph, shapes: Mapping[str, Sequence[int]], scales: Scales, kept: Kept,
                 params: Mapping[str, np.ndarray], device: str = "gpu(0)", deterministic: bool = False) -> None:
        super().__init__(graph, shapes, device)
        self.params, self.aux, self.grads = {}, {}, {}
        self._step = QuantisedNetwork(graph, self.input_shapes, scales, kept, params, deterministic,
                                      self._context.device_id, self._allocate)
        self.gpu_bus_id = self._step.gpu.device.pci_bus_id

    def forward_backward(self, data: Any, label: Any, accumulate: bool = False, draws: Draws = NO_DRAWS) -> None:
        raise GraphError("a network in INT8 cannot be trained: train it in float16 or float32, and quantise it again")
