"""Executors run graphs. `create_executor` makes an executor; all executors have the interface `base.Executor`.

    executor = create_executor("mxnet", graph, {"data": (32, 64, 64, 3), "softmax_label": (32,)})
    executor.set_params(params, aux)
    executor.forward_backward(data, label)         # gradients in executor.grads
    print(executor.read_metrics())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graph_passes.errors import GraphError
from graph_passes.executors.base import Box, Draws, Executor, Metrics
from graph_passes.graph import Graph

__all__ = ["Box", "Draws", "Executor", "Metrics", "create_executor"]


def create_executor(
    name: str, graph: Graph, shapes: Mapping[str, Sequence[int]], device: str = "cpu(0)", **options: Any
) -> Executor:
    """An executor of a training graph for input shapes such as {"data": (32, 224, 224, 3), "softmax_label": (32,)}.

    name     "mxnet": any CPU, and GPUs that stock MXNet supports; "cuda": NVIDIA GPUs, compiled; "reference": NumPy
    device   "cpu(0)" or "gpu(1)"
    options  options of the executor's class

    Raises GraphError for an unknown name or device, and for a graph that the executor cannot run.
    """
    # each executor is imported at its first use, because MXNet and the CUDA libraries take long to load
    if name == "mxnet":
        from graph_passes.executors.mxnet import MXNetExecutor

        return MXNetExecutor(graph, shapes, device, **options)
    if name == "reference":
        from graph_passes.executors.reference import ReferenceExecutor

        return ReferenceExecutor(graph, shapes, device, **options)
    if name == "cuda":
        from graph_passes.executors.cuda.executor import CudaExecutor

        return CudaExecutor(graph, shapes, device, **options)
    raise GraphError(f"there is no executor '{name}': choose mxnet, cuda or reference")
