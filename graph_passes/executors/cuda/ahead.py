"""Our kernels for a graph, compiled before it is: NVRTC takes up to two seconds for one, and ResNet-50's training step
asks for 60 of them, one after the other, as its passes ask for the fastest way here and the next one there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from graph_passes.errors import GraphError
from graph_passes.executors.cuda.choices import Choices
from graph_passes.executors.cuda.lowering import Persistent, lower
from graph_passes.executors.cuda.parameters import Store
from graph_passes.executors.cuda.planner import Decision, Planner, Way
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.graph import Graph
from graph_passes.passes import Choose


def begin_kernels(passes: Callable[[Choose], Graph], input_shapes: Mapping[str, Sequence[int]], store: Store,
                  persistent: Persistent, tools: Toolchain) -> None:
    """Have `tools.kernels` begin the kernels of all ways in which a graph may be computed, as far as they can be told
    without the GPU: the arguments are those of a `CompiledGraph`, which is made here of nothing else than kernels'
    names."""
    plan = SimpleNamespace(workspace_bytes=0, reserve_bytes=0, forward=None, backward=None)  # of cuDNN
    library: Any = SimpleNamespace(get=tools.kernels.begin, plan=lambda problem: plan)
    planner: Any = _AllWays(tools.planner.deterministic)
    names = replace(tools, kernels=library, convolutions=library, recurrent=library, planner=planner)
    with contextlib.suppress(GraphError):  # which is told where the graph is compiled
        graph = passes(Choices(input_shapes, store, persistent, names))
        lower(graph, graph.infer_shapes(input_shapes), store, persistent, names)


class _AllWays:
    """In place of the planner: has every way lowered, and takes that of the fewest launches, which mostly is the
    fastest."""

    first = staticmethod(Planner.first)

    def __init__(self, deterministic: bool) -> None:
        self.deterministic = deterministic

    def fastest(self, node: str, problem: str, ways: Mapping[str, Way]) -> Decision:
        launches = {}
        for name, way in ways.items():
            with contextlib.suppress(GraphError):
                launches[name] = float(len(way().launches))
        if not launches:
            raise GraphError(problem)
        return Decision(node, problem, launches)
