"""Inference: every BatchNorm that follows a convolution folded into it, compiled for each batch size."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from graph_passes import pipeline
from graph_passes.executors.cuda.compiled import CompiledGraph
from graph_passes.executors.cuda.kernels import count, instance
from graph_passes.executors.cuda.lowering import Persistent
from graph_passes.executors.cuda.parameters import ParameterStore, parameters_of
from graph_passes.executors.cuda.program import Buffer
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.graph import Graph, Ref
from graph_passes.passes import fold_bn, foldings


class Inference:
    """The folded network with weights of its own, on the inputs and outputs of a training step.

    A batch may be smaller than the step's: its images, labels and probabilities are the first ones of the buffers. What
    was compiled for one image size is kept until images of another one come.
    """

    def __init__(self, graph: Graph, shapes: Mapping[str, tuple[int, ...]], dtype: str, tools: Toolchain) -> None:
        self._graph, self._dtype, self._shapes = graph, dtype, dict(shapes)
        self._tools, self._gpu, self._kernels = tools, tools.gpu, tools.kernels
        folded = fold_bn(graph)
        inferred = folded.infer_shapes(shapes)
        statistics = {name: inferred[Ref(name)] for name in folded.aux}  # of what could not be folded
        parameters = parameters_of(folded, inferred, tuple(shapes))
        self._store = ParameterStore(parameters, statistics, dtype, trained=False)
        for array in self._store.arrays.values():
            array.place(self._gpu.allocate(max(array.num_bytes, 1)))
        self._kernel = instance("fold_batch_norm", dtype)
        self._folding: Any = None  # a CUDA graph
        self._compiled: dict[int, CompiledGraph] = {}  # by number of images
        self.image_size = tuple(shapes["data"][1:3])

    def fold(self, trained: ParameterStore) -> None:
        """Take over the parameters and running statistics of the training step. Asynchronous."""
        if self._folding is None:
            self._kernels.get("elementwise.cu", self._kernel)  # compiled before capturing
            self._folding = self._gpu.capture(partial(self._enqueue_fold, trained))
        self._gpu.replay(self._folding)

    def _enqueue_fold(self, trained: ParameterStore) -> None:
        own, kernel = self._store, self._kernels.get("elementwise.cu", self._kernel)
        left = dict.fromkeys(own.parameters)
        for norm, convolution, bias in foldings(self._graph):
            gamma, beta, mean, var = (ref.node for ref in norm.inputs[1:5])
            weight = convolution.inputs[1].node
            source = trained.master.slices[weight]
            filters = source.shape[0]
            own_bias = trained.master.slices.get(bias)  # of the convolution
            kernel.launch((filters, 1, 1), (256, 1, 1), source.address, own_bias.address if own_bias else 0,
                          trained.master.slices[gamma].address, trained.master.slices[beta].address,
                          trained.statistics.slices[mean].address, trained.statistics.slices[var].address,
                          own.value(weight).address, own.value(bias).address,
                          ctypes.c_float(norm["eps"]), count(math.prod(source.shape[1:])))
            del left[weight], left[bias]
        for name in left:
            self._gpu.copy(own.value(name).address, trained.value(name).address, own.value(name).num_bytes)
        for name, buffer in own.statistics.slices.items():
            self._gpu.copy(buffer.address, trained.statistics.slices[name].address, buffer.num_bytes)

    def run(self, num_images: int, persistent: Persistent) -> None:
        """Probabilities and metrics of the first `num_images` images in `persistent`. Asynchronous, but for the first
        time that images are so many or so large."""
        image_size = persistent.data.shape[1:3]
        if image_size != self.image_size:
            for compiled in self._compiled.values():
                compiled.close()
            self._compiled.clear()
            self.image_size = image_size
        if num_images not in self._compiled:
            self._compiled[num_images] = self._compile(num_images, persistent)
        self._compiled[num_images].replay()

    def _compile(self, num_images: int, persistent: Persistent) -> CompiledGraph:
        def first(buffer: Buffer) -> Buffer:
            return Buffer(buffer.name, (num_images, *buffer.shape[1:]), buffer.dtype, buffer.address, persistent=True)

        channels = self._shapes["data"][3]
        shapes = {name: (num_images, *shape[1:]) for name, shape in self._shapes.items()}
        part = dataclasses.replace(persistent, data=first(persistent.data), label=first(persistent.label),
                                   probabilities=first(persistent.probabilities))
        compiled = CompiledGraph(partial(pipeline.inference, self._graph, self._dtype),
                                 shapes | {"data": (num_images, *self.image_size, channels)}, self._store, part,
                                 self._tools)
        compiled.capture()
        return compiled
