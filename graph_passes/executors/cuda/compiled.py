"""A graph compiled for one size of batch: lowered, placed in the arena, captured as CUDA graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from graph_passes.choice import Choice, Price
from graph_passes.executors.cuda.capacity import too_little_memory
from graph_passes.executors.cuda.lowering import Persistent, lower
from graph_passes.executors.cuda.parameters import Store
from graph_passes.executors.cuda.prices import Prices
from graph_passes.executors.cuda.program import Buffer, Launch, run
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.graph import Graph

# bytes of a batch; copying fewer bytes takes the GPU no longer than an extra launch takes the host
LEAST_READ = 1 << 22


class CompiledGraph:
    """The compiled form of the graph that `passes` produce for inputs of these shapes. Parameters, inputs and outputs
    outlive this object. All other tensors are in the arena, where the next graph to run may overwrite them. The graph
    must be captured before it can run.

    `passes` are those of `graph_passes/pipeline.py`, which get their prices from this GPU. Raises GraphError if a node
    cannot be lowered, or memory is short.
    """

    def __init__(self, passes: Callable[[Price], Graph], input_shapes: Mapping[str, Sequence[int]],
                 store: Store, persistent: Persistent, tools: Toolchain) -> None:
        self._gpu, self._arena = tools.gpu, tools.arena
        self._segments: list[list[Any]] = []  # the CUDA graphs of each segment, and launches outside them
        self._cuts: tuple[int, ...] = ()
        self._data: Buffer = persistent.data
        self._readers: list[int] = []  # numbers of the launches that read the images and are outside the CUDA graphs
        self.image_size = tuple(input_shapes["data"][1:3])
        prices = Prices(input_shapes, store, persistent, tools)
        try:
            with tools.kernels.side_by_side():
                self.graph = passes(prices)
                self.lowering = lower(self.graph, self.graph.infer_shapes(input_shapes), store, persistent, tools)
                self.lowering.program.load()
        finally:  # measured times are saved, even if the user interrupts
            tools.convolutions.save()
            tools.planner.save()
        self.price = prices
        num_bytes, (free, total) = self.lowering.program.arena_bytes, self._gpu.memory()
        available = free + self._arena.num_bytes
        if num_bytes > available:
            data = tuple(input_shapes["data"])
            raise too_little_memory(data, num_bytes, 0, available, total, most=data[0])

    def capture(self, cuts: Sequence[int] = ()) -> None:
        """Capture the CUDA graphs of one segment, or of several, cut before the launches with the numbers `cuts`.
        Launches that read the images stay outside the graphs if all of them are our own kernels and the batch is large.
        These launches can then read another batch each time.
        """
        self._cuts = tuple(cuts)
        launches = self.lowering.program.launches
        readers = [number for number, launch in enumerate(launches) if self._data in launch.reads]
        if self._data.num_bytes >= LEAST_READ and not any(launches[number].by_library for number in readers):
            self._readers = readers
        self._arena.admit(self.lowering.program.arena_bytes, self._place)

    def _place(self, arena: int) -> None:
        """Capture again after the arena has moved, because a CUDA graph contains addresses."""
        self._destroy()
        self.lowering.program.place(arena)
        self._segments = [self._pieces(range(start, end)) for start, end in
                          itertools.pairwise([0, *self._cuts, len(self.lowering.program.launches)])]

    def _pieces(self, numbers: range) -> list[Any]:
        launches, pieces = self.lowering.program.launches, list[Any]()
        for is_reader, group in itertools.groupby(numbers, key=self._readers.__contains__):
            found = [launches[number] for number in group]
            pieces += found if is_reader else [self._gpu.capture(partial(run, found))]
        return pieces

    @property
    def choices(self) -> list[Choice]:
        """The kernels that had rivals, with the times of all candidates."""
        return self.price.choices

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def replay(self, segment: int = 0, batch: int = 0) -> None:
        """Run one segment, asynchronously. `batch`: the address of images to read in place of the input. If the kernels
        cannot read this address, the first segment copies the images.
        """
        loaded = self._data.address
        if batch and not self._readers:
            if segment == 0:
                self._gpu.copy(loaded, batch, self._data.num_bytes)
            batch = 0
        self._data.address = batch or loaded
        try:
            for piece in self._segments[segment]:
                if isinstance(piece, Launch):
                    piece.enqueue()
                else:
                    self._gpu.replay(piece)
        finally:
            self._data.address = loaded

    def close(self) -> None:
        """Wait for the GPU, and dismiss the graph from the arena."""
        self._gpu.synchronize()
        self._arena.dismiss(self._place)
        self._destroy()

    def _destroy(self) -> None:
        for piece in itertools.chain.from_iterable(self._segments):
            if not isinstance(piece, Launch):
                self._gpu.destroy(piece)
        self._segments.clear()
