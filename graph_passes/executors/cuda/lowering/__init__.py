"""From a graph to launches on buffers: one rule per operator.

The graph is NHWC and fused (passes `layout`, `bn_relu`, `bn_add_relu`); for training it holds the backward pass too
(`gradient`, `gradient_add`), and `precision` has marked its tensors. Nodes are lowered in the graph's order, which is
the order of the launches.

A rule is a function of a `Builder` and a node. `builder.py` is what all rules share; each of the other modules has one
family of operators, with what it must know of the kernels that it launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from graph_passes.executors.cuda.lowering import (
    batch_norm,
    batch_norm_backward,
    convolution,
    elementwise,
    pooling,
    softmax,
)
from graph_passes.executors.cuda.lowering.builder import Builder, Persistent, no_lowering, require
from graph_passes.executors.cuda.parameters import ParameterStore
from graph_passes.executors.cuda.planner import Decision
from graph_passes.executors.cuda.program import Buffer, Program
from graph_passes.executors.cuda.statistics_group import StatisticsGroup
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import BATCH_NORMS, Shape

__all__ = ["LoweredGraph", "Persistent", "check_operators", "lower"]

RULES: Mapping[str, Callable[[Builder, Node], None]] = {
    "Convolution": convolution.forward,
    "ConvolutionWgrad": convolution.wgrad,
    "ConvolutionDgrad": convolution.dgrad,
    "FullyConnected": convolution.classifier,
    "FullyConnectedWgrad": convolution.wgrad,
    "FullyConnectedDgrad": convolution.dgrad,
    "relu": convolution.epilogue,
    "Activation": convolution.epilogue,
    "AddRelu": convolution.epilogue,
    "BatchNorm": batch_norm.forward,
    "BatchNormRelu": batch_norm.forward,
    "BatchNormAddRelu": batch_norm.forward,
    "BatchNormTrain": batch_norm.forward,
    "BatchNormReluTrain": batch_norm.forward,
    "BatchNormAddReluTrain": batch_norm.forward,
    "BatchNormBackward": batch_norm_backward.backward,
    "BatchNormReluBackward": batch_norm_backward.backward,
    "BatchNormAddReluBackward": batch_norm_backward.backward,
    "Pooling": pooling.forward,
    "MaxPoolingTrain": pooling.forward,
    "MaxPoolingBackward": pooling.max_backward,
    "AvgPoolingBackward": pooling.average_backward,
    "Flatten": elementwise.flatten,
    "FlattenBackward": elementwise.flatten_backward,
    "elemwise_add": elementwise.add,
    "SoftmaxOutput": softmax.softmax,
    "SoftmaxCrossEntropy": softmax.softmax,
    "BiasGrad": softmax.bias_gradient,
}


def check_operators(graph: Graph) -> None:
    """Raise GraphError for the first node of a network that can have no lowering: another operator, or not NHWC."""
    unknown = [node for node in graph if not node.is_variable and node.op not in RULES]
    if unknown:  # a transpose may be there only because of the operator that the layout pass does not know
        raise no_lowering(next((node for node in unknown if node.op != "transpose"), unknown[0]))
    for node in graph:
        is_nchw = ((node.op in ("Convolution", "Pooling") and node["layout"] == "NCHW")
                   or (node.op in BATCH_NORMS and node["axis"] not in (3, -1)))
        require(not is_nchw, node, "is not NHWC: run passes.layout(graph, 'NHWC', inputs=['data']) first")


@dataclass(frozen=True)
class LoweredGraph:
    """What `lower` makes of a graph."""

    program: Program
    ready: dict[str, int]  # name of a parameter -> after how many launches its gradient is final
    decisions: list[Decision]  # where a part of the graph could be computed in several ways
    buffers: Mapping[Ref, Buffer]  # where the tensors lie that exist on the device; what is fused away has none


def lower(graph: Graph, shapes: Mapping[Ref, Shape], store: ParameterStore, persistent: Persistent, tools: Toolchain,
          group: StatisticsGroup | None = None) -> LoweredGraph:
    """One pass over the graph. `shapes`: of all its tensors. `group`: the GPUs that BatchNorm's statistics are shared
    with. Raises GraphError, with the name of the node, for what has no lowering."""
    builder = Builder(graph, shapes, store, persistent, tools, group)
    for node in graph:
        if node.is_variable or node.name in builder.fusions.done:
            continue
        if node.op not in RULES:
            raise no_lowering(node)
        RULES[node.op](builder, node)
    program = builder.program
    program.plan_memory()
    ready = {name: number for number, launch in enumerate(program.launches, start=1)
             for name, gradient in store.gradients.items() if gradient in launch.writes}
    return LoweredGraph(program, ready, builder.decisions, builder.buffers)
