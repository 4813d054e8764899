"""What runs a graph: `create_executor` makes one of the executors, all of which are used alike (`base.Executor`)."""

from graph_passes.executors.base import Executor, Metrics, create_executor

__all__ = ["Executor", "Metrics", "create_executor"]
