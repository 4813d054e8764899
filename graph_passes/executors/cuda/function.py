"""A graph as a function on the GPU, for single layers in benchmarks and tests. Nothing is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from graph_passes.choice import Choice, Price
from graph_passes.executors.cuda.builder import Builder
from graph_passes.executors.cuda.lowering import Persistent, lower_nodes
from graph_passes.executors.cuda.parameters import ParameterStore
from graph_passes.executors.cuda.prices import Prices
from graph_passes.executors.cuda.program import Buffer, run
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.graph import Graph, Ref
from graph_passes.passes import tensor_dtypes


class DeviceFunction:
    """A graph compiled as one CUDA graph. The graph's variables and outputs have their own memory, which the caller
    fills and reads. All other tensors are in the arena.

    Args: passes: produce the graph that runs, from this GPU's prices. shapes: the shapes of the graph's inputs; all
        other shapes are inferred. dtype: the network's type: "float16", "bfloat16" or "float32".

    Raises GraphError if a node cannot be lowered, or memory is short.
    """

    def __init__(self, passes: Callable[[Price], Graph], shapes: Mapping[str, Sequence[int]], dtype: str,
                 tools: Toolchain) -> None:
        self._tools = tools
        self._executable: Any = None
        # All persistent buffers except the data are empty: no operator of a function reads them.
        nothing = {field.name: Buffer(field.name, (0,), "uint8") for field in dataclasses.fields(Persistent)}
        persistent = Persistent(**nothing | {"data": self._placed("data", shapes["data"], dtype)})
        prices = Prices(shapes, ParameterStore((), {}, dtype), persistent, tools)
        self.graph = passes(prices)
        tools.planner.save()
        self.choices: list[Choice] = prices.choices
        sizes, dtypes = self.graph.infer_shapes(shapes), tensor_dtypes(self.graph)
        buffers = {Ref("data"): persistent.data}
        for ref in (*map(Ref, self.graph.variables), *self.graph.outputs):
            if ref not in buffers:
                buffers[ref] = self._placed(f"{ref.node}:{ref.output}", sizes[ref], dtypes[ref])
        self.variables = {name: buffers[Ref(name)] for name in self.graph.variables}
        self.outputs = [buffers[ref] for ref in self.graph.outputs]
        builder = Builder(sizes, dtypes, buffers, dtype, persistent, tools)
        lower_nodes(builder, self.graph)
        self._program = builder.program
        self._program.load()
        self._program.plan_memory()
        tools.arena.admit(self._program.arena_bytes, self._place)

    def __call__(self) -> None:
        """Run the function asynchronously."""
        self._tools.gpu.replay(self._executable)

    def close(self) -> None:
        """Wait for the GPU and free all memory."""
        self._tools.gpu.synchronize()
        self._tools.arena.dismiss(self._place)
        self._tools.gpu.destroy(self._executable)
        for buffer in {*self.variables.values(), *self.outputs}:
            self._tools.gpu.free(buffer.address)

    def _placed(self, name: str, shape: Sequence[int], dtype: str) -> Buffer:
        buffer = Buffer(name, tuple(shape), dtype, persistent=True)
        buffer.address = self._tools.gpu.allocate(buffer.num_bytes)
        return buffer

    def _place(self, arena: int) -> None:
        """Capture again after the arena has moved, because a CUDA graph contains addresses."""
        if self._executable is not None:
            self._tools.gpu.destroy(self._executable)
        self._program.place(arena)
        self._executable = self._tools.gpu.capture(partial(run, self._program.launches))
