"""Inference: every BatchNorm that follows a convolution folded into it, a CUDA graph for each batch size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from graph_passes.executors.cuda.convolution import ConvolutionLibrary
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernels import KernelLibrary
from graph_passes.executors.cuda.lowering import Lowering, Persistent, parameters_of
from graph_passes.executors.cuda.parameters import ParameterStore, to_dtype
from graph_passes.executors.cuda.program import Buffer, run
from graph_passes.graph import Graph, Ref
from graph_passes.passes import fold_bn, fold_bn_params, precision


class Inference:
    """The folded network with weights of its own, on the inputs and outputs of a training step.

    A batch may be smaller than the step's: its images, labels and probabilities are the first ones of the buffers.
    """

    def __init__(self, graph: Graph, shapes: Mapping[str, tuple[int, ...]], dtype: str, persistent: Persistent,
                 gpu: Gpu, kernels: KernelLibrary, convolutions: ConvolutionLibrary) -> None:
        self._unfolded, self._graph, self._shapes = graph, precision(fold_bn(graph), dtype), dict(shapes)
        self._persistent, self._gpu, self._kernels, self._convolutions = persistent, gpu, kernels, convolutions
        inferred = self._graph.infer_shapes(shapes)
        statistics = {name: inferred[Ref(name)] for name in self._graph.aux}  # of what could not be folded
        parameters = parameters_of(self._graph, inferred, tuple(shapes))
        self._store = ParameterStore(parameters, statistics, dtype, trained=False)
        for array in self._store.arrays.values():
            array.place(gpu.allocate(max(array.num_bytes, 1)))
        self._captured: dict[int, Any] = {}  # number of images -> CUDA graph

    def set_params(self, params: Mapping[str, np.ndarray], aux: Mapping[str, np.ndarray]) -> None:
        """Fold on the host, in float64, and upload. Canonical arrays of the unfolded network."""
        folded = fold_bn_params(self._unfolded, params, aux)
        for name, parameter in self._store.parameters.items():
            target = self._store.value(name)
            self._gpu.upload(target.address, to_dtype(parameter.to_device(folded[name]), target.dtype))
        for name, buffer in self._store.statistics.slices.items():
            self._gpu.upload(buffer.address, np.asarray(aux[name], np.float32))

    def run(self, num_images: int) -> None:
        """Probabilities and metrics of the first `num_images` that are loaded. Asynchronous, but for the first time."""
        if num_images not in self._captured:
            self._captured[num_images] = self._capture(num_images)
        self._gpu.replay(self._captured[num_images])

    def _capture(self, num_images: int) -> Any:
        def first(buffer: Buffer) -> Buffer:
            return Buffer(buffer.name, (num_images, *buffer.shape[1:]), buffer.dtype, buffer.address, persistent=True)

        keep = self._persistent
        persistent = dataclasses.replace(keep, data=first(keep.data), label=first(keep.label),
                                         probabilities=first(keep.probabilities))
        shapes = self._graph.infer_shapes({name: (num_images, *shape[1:]) for name, shape in self._shapes.items()})
        lowering = Lowering(self._graph, shapes, self._store, persistent, self._gpu, self._kernels, self._convolutions)
        self._convolutions.save()
        for buffer in lowering.scratch:
            buffer.address = self._gpu.allocate(max(buffer.num_bytes, 1))
        lowering.program.place(self._gpu.allocate(max(lowering.program.arena_bytes, 1)))
        return self._gpu.capture(partial(run, lowering.program.launches))
