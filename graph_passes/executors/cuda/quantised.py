"""Inference in INT8 on one GPU, without MXNet: a network that `passes/quantise.py` has quantised."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from graph_passes import pipeline
from graph_passes.choice import Price, plain
from graph_passes.errors import GraphError
from graph_passes.executors.cuda.inference import Inference
from graph_passes.executors.cuda.network import Network
from graph_passes.executors.cuda.options import StepOptions
from graph_passes.executors.cuda.parameters import QuantisedStore, parameters_of
from graph_passes.graph import Graph, Ref
from graph_passes.passes import tensor_dtypes
from graph_passes.passes.quantise import Kept, Scales
from graph_passes.passes.quantise_squares import quantise_squares_params

FLOATS = "float16"  # type of all tensors that are not in INT8: inputs, layers that stay in floats, scores


class Quantisation(NamedTuple):
    """The quantisation of a network: `scales` and `kept` of `passes/quantise.py`, `params` by `quantise_params`."""

    scales: Scales
    kept: Kept
    params: Mapping[str, np.ndarray]


class QuantisedNetwork(Network):
    """Runs a network in INT8. The integers are exactly those of `executors.reference.QuantisedExecutor`; layers that
    stay in floats use float16.

    Args: graph, shapes: the network and the shapes of its inputs, as for `TrainingStep`. scales, kept, params: the
        fields of `Quantisation`. deterministic, device_id, cache_folder: as for `TrainingStep`.

    Raises GraphError for an operator without a lowering, a parameter of another shape, and the errors of `Gpu`.
    """

    def __init__(self, graph: Graph, shapes: Mapping[str, tuple[int, ...]], scales: Scales, kept: Kept,
                 params: Mapping[str, np.ndarray], deterministic: bool = False, device_id: int = 0,
                 cache_folder: Path | None = None) -> None:
        super().__init__(graph, shapes, StepOptions(FLOATS, deterministic=deterministic), device_id, cache_folder)
        quantised = pipeline.run(pipeline.quantised_passes(FLOATS, scales, kept), graph)
        self.store = _store(self._passes(scales, kept, plain), shapes)
        for array in self.store.arrays.values():
            array.place(self.gpu.allocate(array.num_bytes))
        self._upload(quantise_squares_params(quantised, params))
        self._make_persistent(shapes["data"], quantised.infer_shapes(shapes)[graph.outputs[0]])
        passes = partial(self._passes, scales, kept)
        self._inference = Inference(passes, self._shapes, self.store, self._tools)

    def _passes(self, scales: Scales, kept: Kept, price: Price) -> Graph:
        return pipeline.run(pipeline.gpu_quantised_passes(FLOATS, scales, kept, price), self._graph)

    def _upload(self, params: Mapping[str, np.ndarray]) -> None:
        values = self.store.values
        for name, parameter in self.store.parameters.items():
            if name not in params or params[name].shape != parameter.shape:
                given = f"has the shape {params[name].shape}" if name in params else "is missing"
                raise GraphError(f"'{name}' {given}: the network in INT8 needs {parameter.shape}")
            self.gpu.upload(values[name].address, parameter.to_device(params[name], self.store.dtypes[name]))
        for name, buffer in self.store.statistics.slices.items():
            self.gpu.upload(buffer.address, np.asarray(params[name], np.float32))

    def _ready_inference(self) -> Inference:
        assert self._inference
        return self._inference


def _store(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> QuantisedStore:
    """Memory for the parameters of a graph in INT8."""
    inferred, dtypes = graph.infer_shapes(shapes), tensor_dtypes(graph)
    parameters = parameters_of(graph, inferred, tuple(shapes))
    return QuantisedStore(parameters, {each.name: dtypes[Ref(each.name)] for each in parameters},
                          {name: inferred[Ref(name)] for name in graph.aux}, FLOATS)
