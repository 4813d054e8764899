"""The graph of a network, passes that rewrite it, and executors that run it."""

from graph_passes import operators_backward  # noqa: F401  adds its rows to the operator table
from graph_passes.errors import GraphError
from graph_passes.graph import VARIABLE, Graph, Node, Ref

__all__ = ["VARIABLE", "Graph", "GraphError", "Node", "Ref"]
