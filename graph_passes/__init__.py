"""The graph of a network, passes that rewrite it, and executors that run it."""

from graph_passes.errors import GraphError
from graph_passes.graph import VARIABLE, Graph, Node
from graph_passes.operators import Ref

__all__ = ["VARIABLE", "Graph", "GraphError", "Node", "Ref"]
