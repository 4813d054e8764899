"""Inference, compiled for each batch size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from graph_passes.choice import Price
from graph_passes.executors.cuda.compiled import CompiledGraph
from graph_passes.executors.cuda.lowering import Persistent
from graph_passes.executors.cuda.parameters import Store
from graph_passes.executors.cuda.program import Buffer
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.graph import Graph


class Inference:
    """The graph that `passes` produce, compiled for inference. It has its own parameters, in `store`, and the inputs
    and outputs of a `Network`.

    A batch may be smaller than the network's batch size: its images, labels and probabilities are then at the start of
    the buffers. The compiled graph is kept until images of another size come.
    """

    def __init__(self, passes: Callable[[Price], Graph], shapes: Mapping[str, tuple[int, ...]], store: Store,
                 tools: Toolchain) -> None:
        self._passes, self._shapes, self._store, self._tools = passes, dict(shapes), store, tools
        self._compiled: dict[int, CompiledGraph] = {}  # number of images -> compiled graph
        self.latest: CompiledGraph | None = None  # the latest graph that ran
        self.image_size = tuple(shapes["data"][1:3])

    def prepare(self, num_images: int, persistent: Persistent) -> None:
        """Compile the graph for `num_images` images of the present size in `persistent`, unless that is done already.
        """
        image_size = persistent.data.shape[1:3]
        if image_size != self.image_size:
            for compiled in self._compiled.values():
                compiled.close()
            self._compiled.clear()
            self.image_size = image_size
        if num_images not in self._compiled:
            self._compiled[num_images] = self._compile(num_images, persistent)

    def run(self, num_images: int, batch: int = 0) -> None:
        """Compute probabilities and metrics of `num_images` images, for which `prepare` was called. The images are the
        loaded batch, or the batch at the address `batch`. Asynchronous.
        """
        self.latest = self._compiled[num_images]
        self.latest.replay(batch=batch)

    def _compile(self, num_images: int, persistent: Persistent) -> CompiledGraph:
        def first(buffer: Buffer) -> Buffer:
            return Buffer(buffer.name, (num_images, *buffer.shape[1:]), buffer.dtype, buffer.address, persistent=True)

        channels = self._shapes["data"][3]
        shapes = {name: (num_images, *shape[1:]) for name, shape in self._shapes.items()}
        part = dataclasses.replace(persistent, data=first(persistent.data), label=first(persistent.label),
                                   probabilities=first(persistent.probabilities))
        compiled = CompiledGraph(self._passes, shapes | {"data": (num_images, *self.image_size, channels)}, self._store,
                                 part, self._tools)
        compiled.capture()
        return compiled
