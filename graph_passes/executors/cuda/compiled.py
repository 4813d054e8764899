"""A graph compiled for one size of batch: lowered, with the memory that it works in, captured as CUDA graphs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from graph_passes.executors.cuda.capacity import too_little_memory
from graph_passes.executors.cuda.convolution import ConvolutionLibrary
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernels import KernelLibrary
from graph_passes.executors.cuda.lowering import Lowering, Persistent
from graph_passes.executors.cuda.parameters import ParameterStore
from graph_passes.executors.cuda.planner import Planner
from graph_passes.executors.cuda.program import run
from graph_passes.executors.cuda.statistics_group import StatisticsGroup
from graph_passes.graph import Graph


class CompiledGraph:
    """`graph` for the shapes of its inputs, on parameters, inputs and outputs that outlive it.

    Raises GraphError for what cannot be lowered, and where memory does not suffice.
    """

    def __init__(self, graph: Graph, input_shapes: Mapping[str, Sequence[int]], store: ParameterStore,
                 persistent: Persistent, gpu: Gpu, kernels: KernelLibrary, convolutions: ConvolutionLibrary,
                 planner: Planner, group: StatisticsGroup | None = None) -> None:
        self._gpu = gpu
        self._memory: list[int] = []
        self._segments: list[Any] = []
        self.image_size = tuple(input_shapes["data"][1:3])
        self.lowering = Lowering(graph, graph.infer_shapes(input_shapes), store, persistent, gpu, kernels, convolutions,
                                 planner, group)
        convolutions.save()
        planner.save()
        for buffer in self.lowering.scratch:
            buffer.address = self._allocate(buffer.num_bytes)
        arena_bytes, (free, total) = self.lowering.program.arena_bytes, gpu.memory()
        if arena_bytes > free:
            raise too_little_memory(tuple(input_shapes["data"]), arena_bytes, 0, free, total)
        self.lowering.program.place(self._allocate(arena_bytes))

    def _allocate(self, num_bytes: int) -> int:
        self._memory.append(self._gpu.allocate(num_bytes))
        return self._memory[-1]

    def capture(self, cuts: Sequence[int] = ()) -> None:
        """Make the CUDA graphs: one, or several that the launches are cut into, before those with numbers `cuts`."""
        launches = self.lowering.program.launches
        ends = [0, *cuts, len(launches)]
        self._segments = [self._gpu.capture(partial(run, launches[start:end]))
                          for start, end in itertools.pairwise(ends)]

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def replay(self, segment: int = 0) -> None:
        """Launch one of the CUDA graphs, asynchronous."""
        self._gpu.replay(self._segments[segment])

    def close(self) -> None:
        """Wait for the GPU and give the memory back."""
        self._gpu.synchronize()
        for segment in self._segments:
            self._gpu.destroy(segment)
        for address in self._memory:
            self._gpu.free(address)
        self._segments.clear()
        self._memory.clear()
