"""Inference: every BatchNorm that follows a convolution folded into it, compiled for each batch size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial

from graph_passes import pipeline
from graph_passes.executors.cuda.compiled import CompiledGraph
from graph_passes.executors.cuda.folding import Folded
from graph_passes.executors.cuda.lowering import Persistent
from graph_passes.executors.cuda.parameters import ParameterStore
from graph_passes.executors.cuda.program import Buffer
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.graph import Graph


class Inference:
    """The folded network with weights of its own, on the inputs and outputs of a training step.

    A batch may be smaller than the step's: its images, labels and probabilities are the first ones of the buffers. What
    was compiled for one image size is kept until images of another one come.
    """

    def __init__(self, graph: Graph, shapes: Mapping[str, tuple[int, ...]], dtype: str, tools: Toolchain) -> None:
        self._graph, self._dtype, self._shapes = graph, dtype, dict(shapes)
        self._tools = tools
        self._folded = Folded(graph, shapes, dtype, tools)
        self._compiled: dict[int, CompiledGraph] = {}  # by number of images
        self.image_size = tuple(shapes["data"][1:3])

    def fold(self, trained: ParameterStore) -> None:
        """Take over the parameters and running statistics of the training step. Asynchronous."""
        self._folded.fold(trained)

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
                                 shapes | {"data": (num_images, *self.image_size, channels)}, self._folded.store,
                                 part,
                                 self._tools)
        compiled.capture()
        return compiled
