"""Lowering: from a graph to launches on buffers, with one independent function per operator.

The graph comes from `graph_passes/pipeline.py`: NHWC, fused, and for training with its backward pass. Nodes are lowered
in the graph's order, which is the order of the launches.

Each function takes a `Builder` and a node. The function for an operator is in the file of the kernel that it launches
(`kernels/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graph_passes import roles
from graph_passes.executors.cuda.builder import Builder, Persistent, no_lowering, require, require_whole_vectors
from graph_passes.executors.cuda.capacity import check_sizes
from graph_passes.executors.cuda.kernels import LAUNCHES
from graph_passes.executors.cuda.parameters import Store
from graph_passes.executors.cuda.program import Buffer, Program
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import BATCH_NORMS, LOSSES, OPERATORS, Shape
from graph_passes.operators.dropout import SEED
from graph_passes.passes import output_names, tensor_dtypes

__all__ = ["LoweredGraph", "Persistent", "bound_buffers", "check_operators", "lower", "lower_nodes"]


def check_operators(graph: Graph) -> None:
    """Raise GraphError for the first node that cannot be lowered: an unknown operator, or an operator that is not in
    NHWC.
    """
    unknown = [node for node in graph if not node.is_variable and node.op not in LAUNCHES]
    if unknown:
        raise no_lowering(unknown[0])
    for node in graph:
        is_nchw = ((node.op in ("Convolution", "Pooling") and node["layout"] == "NCHW")
                   or (node.op in BATCH_NORMS and node["axis"] not in (3, -1)))
        require(not is_nchw, node, "is not NHWC: run passes.layout(graph, 'NHWC', inputs=['data']) first")


@dataclass(frozen=True)
class LoweredGraph:
    """The result of `lower`."""

    program: Program
    ready: dict[str, int]  # name of a parameter -> number of launches after which its gradient is final
    buffers: Mapping[Ref, Buffer]  # buffer of each tensor


def lower(graph: Graph, shapes: Mapping[Ref, Shape], store: Store, persistent: Persistent,
          tools: Toolchain) -> LoweredGraph:
    """Lower a graph. `shapes`: the shapes of all tensors of the graph. Raises GraphError, naming the node, for an
    operator without a lowering or a tensor with too many elements.
    """
    check_operators(graph)
    check_sizes(shapes)
    builder = Builder(shapes, tensor_dtypes(graph), bound_buffers(graph, store, persistent), store.dtype, persistent,
                      tools)
    lower_nodes(builder, graph)
    if "output_names" not in graph.attrs and graph[graph.outputs[0].node].op not in LOSSES:
        hand_out(builder, graph[graph.outputs[0].node])
    program = builder.program
    program.plan_memory()
    ready = {name: number for number, launch in enumerate(program.launches, start=1)
             for name, gradient in store.gradients.items() if gradient in launch.writes}
    return LoweredGraph(program, ready, builder.buffers)


def lower_nodes(builder: Builder, nodes: Graph | list[Node]) -> None:
    """Emit the launches of the nodes, in order."""
    for node in nodes:
        if node.is_variable:
            continue
        if node.op not in LAUNCHES:
            raise no_lowering(node)
        rule = LAUNCHES[node.op]
        if OPERATORS[node.op].fused and not hasattr(rule, "takes_any_channels"):
            require_whole_vectors(builder, node)
        rule(builder, node)


def hand_out(builder: Builder, node: Node) -> None:
    """Copy the tensor that inference returns, as float32, to the buffer of the probabilities."""
    builder.convert(node, builder.dense(Ref(node.name)), builder.persistent.probabilities)


def bound_buffers(graph: Graph, store: Store, persistent: Persistent) -> dict[Ref, Buffer]:
    """Buffers of the tensors that have an address already: data, parameters, running statistics, and their gradients.
    Also includes the buffers of reordered images, which have the padding channel of the data.
    """
    buffers = {Ref("data"): persistent.data, Ref(SEED): persistent.seed,
               **{Ref(name): buffer for name, buffer in store.values.items()},
               **{Ref(name): buffer for name, buffer in store.statistics.slices.items()}}
    data = persistent.data
    buffers |= {ref: Buffer(ref.node, data.shape, data.dtype) for ref in roles.images(graph) - {Ref("data")}}
    if "output_names" not in graph.attrs:
        return buffers
    for name, ref in output_names(graph).items():
        if name.endswith("_grad"):
            buffers[ref] = store.gradients[name.removesuffix("_grad")]
    for node in graph:
        if node.op == "GroupMean":  # GroupMean works in place
            buffers |= {ref: buffers[mean] for ref, mean in zip(node.inputs, node.refs(), strict=True)
                        if mean in buffers}
    return buffers
