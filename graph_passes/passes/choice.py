"""How a pass asks which of several ways to compute the same it shall take, where that depends on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from graph_passes.graph import Graph, Node

# Name of a way -> the nodes that compute it, in order. They read tensors of the graph or of each other.
Ways = Mapping[str, Sequence[Node]]


class Choose(Protocol):
    """Answers with the name of one of the ways in which `node` of `graph`, and what is fused with it, may be computed.

    The first of the ways is that of runs which are to be repeatable, where no clock may decide: it sums in a fixed
    order wherever it is taken. On a GPU the planner times the ways (`executors/cuda/planner.py`).
    """

    def __call__(self, graph: Graph, node: Node, ways: Ways) -> str: ...


def fused_way(graph: Graph, node: Node, ways: Ways) -> str:
    """Where no device can be asked: the way of the fewest nodes."""
    return min(ways, key=lambda way: len(ways[way]))


def first_way(graph: Graph, node: Node, ways: Ways) -> str:
    """The first way, without a look at the device."""
    return next(iter(ways))
