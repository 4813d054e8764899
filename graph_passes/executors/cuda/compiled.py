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

LEAST_READ = 1 << 22  # bytes of a batch: to copy less takes the GPU no longer than one more launch takes the host


class CompiledGraph:
    """The graph that `passes` give for inputs of these shapes, on parameters, inputs and outputs that outlive it. All
    else that it writes lies in the arena, where the next that runs may overwrite it. To be run, it must be captured.

    `passes` are those of `graph_passes/pipeline.py`, which ask this GPU for prices. Raises GraphError
    for what cannot be lowered, and where memory does not suffice.
    """

    def __init__(self, passes: Callable[[Price], Graph], input_shapes: Mapping[str, Sequence[int]],
                 store: Store, persistent: Persistent, tools: Toolchain) -> None:
        self._gpu, self._arena = tools.gpu, tools.arena
        self._segments: list[list[Any]] = []  # of each its CUDA graphs, and launches that are in none
        self._cuts: tuple[int, ...] = ()
        self._data: Buffer = persistent.data
        self._readers: list[int] = []  # numbers of the launches that read the images and are in no CUDA graph
        self.image_size = tuple(input_shapes["data"][1:3])
        prices = Prices(input_shapes, store, persistent, tools)
        try:
            with tools.kernels.side_by_side():
                self.graph = passes(prices)
                self.lowering = lower(self.graph, self.graph.infer_shapes(input_shapes), store, persistent, tools)
                self.lowering.program.load()
        finally:  # what has been timed is kept, also if the user interrupts it
            tools.convolutions.save()
            tools.planner.save()
        self.price = prices
        num_bytes, (free, total) = self.lowering.program.arena_bytes, self._gpu.memory()
        available = free + self._arena.num_bytes
        if num_bytes > available:
            data = tuple(input_shapes["data"])
            raise too_little_memory(data, num_bytes, 0, available, total, most=data[0])

    def capture(self, cuts: Sequence[int] = ()) -> None:
        """Make the CUDA graphs of one segment, or of several that the launches are cut into, before those with numbers
        `cuts`. What reads the images is left out of them if all of it are kernels of ours, and the images are many, so
        that it can read another batch each time."""
        self._cuts = tuple(cuts)
        launches = self.lowering.program.launches
        readers = [number for number, launch in enumerate(launches) if self._data in launch.reads]
        if self._data.num_bytes >= LEAST_READ and not any(launches[number].by_library for number in readers):
            self._readers = readers
        self._arena.admit(self.lowering.program.arena_bytes, self._place)

    def _place(self, arena: int) -> None:
        """Addresses are part of a CUDA graph, so those made for another place are made anew."""
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
        """Which kernels were taken where there was something to choose, and the times of all that could be had."""
        return self.price.choices

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def replay(self, segment: int = 0, batch: int = 0) -> None:
        """Run one of the segments, asynchronous. `batch`: the address of images that take the place of those in the
        input; where they cannot be read as they lie, the first segment copies them there."""
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
        """Wait for the GPU and leave the arena."""
        self._gpu.synchronize()
        self._arena.dismiss(self._place)
        self._destroy()

    def _destroy(self) -> None:
        for piece in itertools.chain.from_iterable(self._segments):
            if not isinstance(piece, Launch):
                self._gpu.destroy(piece)
        self._segments.clear()
