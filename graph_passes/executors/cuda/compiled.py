"""A graph compiled for one size of batch: lowered, placed in the arena, captured as CUDA graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from graph_passes.executors.cuda.capacity import too_little_memory
from graph_passes.executors.cuda.choices import Choices
from graph_passes.executors.cuda.lowering import Persistent, lower
from graph_passes.executors.cuda.parameters import Store
from graph_passes.executors.cuda.program import Buffer, Launch, run
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.graph import Graph
from graph_passes.passes import Choose

LEAST_READ = 1 << 22  # bytes of a batch: to copy less takes the GPU no longer than one more launch takes the host


class CompiledGraph:
    """The graph that `passes` give for inputs of these shapes, on parameters, inputs and outputs that outlive it. All
    else that it writes lies in the arena, where the next that runs may overwrite it. To be run, it must be captured.

    `passes` are those of `graph_passes/pipeline.py`, which ask this GPU where there are several ways. Raises GraphError
    for what cannot be lowered, and where memory does not suffice.
    """

    def __init__(self, passes: Callable[[Choose], Graph], input_shapes: Mapping[str, Sequence[int]],
                 store: Store, persistent: Persistent, tools: Toolchain) -> None:
        self._gpu, self._arena = tools.gpu, tools.arena
        self._segments: list[Any] = []
        self._cuts: tuple[int, ...] = ()
        self._data: Buffer = persistent.data
        self._reader: Launch | None = None  # of the images, that is in no CUDA graph
        self.image_size = tuple(input_shapes["data"][1:3])
        choices = Choices(input_shapes, store, persistent, tools)
        try:
            self.graph = passes(choices)
            self.lowering = lower(self.graph, self.graph.infer_shapes(input_shapes), store, persistent, tools)
        finally:  # what has been timed is kept, also if the user interrupts it
            tools.convolutions.save()
            tools.planner.save()
        self.choices = choices
        num_bytes, (free, total) = self.lowering.program.arena_bytes, self._gpu.memory()
        available = free + self._arena.num_bytes
        if num_bytes > available:
            data = tuple(input_shapes["data"])
            raise too_little_memory(data, num_bytes, 0, available, total, most=data[0])

    def capture(self, cuts: Sequence[int] = (), from_batches: bool = False) -> None:
        """Make the CUDA graphs: one, or several that the launches are cut into, before those with numbers `cuts`.
        `from_batches`: if a kernel of ours that comes first is all that reads the images, and they are many, it is left
        out, so that it can read another batch each time."""
        self._cuts = tuple(cuts)
        launches = self.lowering.program.launches
        readers = [launch for launch in launches if self._data in launch.reads]
        if from_batches and readers == launches[:1] and self._data.num_bytes >= LEAST_READ:
            self._reader = None if readers[0].by_library else readers[0]
        self._arena.admit(self.lowering.program.arena_bytes, self._place)

    def _place(self, arena: int) -> None:
        """Addresses are part of a CUDA graph, so those made for another place are made anew."""
        self._destroy()
        self.lowering.program.place(arena)
        launches = self.lowering.program.launches
        ends = [1 if self._reader else 0, *self._cuts, len(launches)]
        self._segments = [self._gpu.capture(partial(run, launches[start:end]))
                          for start, end in itertools.pairwise(ends)]

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def replay(self, segment: int = 0, batch: int = 0) -> None:
        """Launch one of the CUDA graphs, asynchronous. `batch`: the address of images that take the place of those in
        the input, which are read where they lie if the graphs are `from_batches`."""
        loaded = self._data.address
        if self._reader:
            self._data.address = batch or loaded
            self._reader.enqueue()
            self._data.address = loaded
        elif batch:
            self._gpu.copy(loaded, batch, self._data.num_bytes)
        self._gpu.replay(self._segments[segment])

    def close(self) -> None:
        """Wait for the GPU and leave the arena."""
        self._gpu.synchronize()
        self._arena.dismiss(self._place)
        self._destroy()

    def _destroy(self) -> None:
        for segment in self._segments:
            self._gpu.destroy(segment)
        self._segments.clear()
