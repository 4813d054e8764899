"""The gradient of a bias in front of a BatchNorm is 0, because BatchNorm subtracts the mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph_passes.graph import Graph, Node, Ref

_BACKWARD = ("BatchNormBackward", "BatchNormReluBackward", "BatchNormAddReluBackward")


def zero_bias_grad(graph: Graph, shapes: Mapping[str, Sequence[int]]) -> Graph:
    """Replace the sum of a gradient that is known to be 0. `shapes`: the shapes of the inputs.

        before    dy -> BatchNormBackward -> BiasGrad `b`
        after     Zeros `b`

    Without this pass, the gradient would be rounding noise instead of 0.
    """
    if not any(node.op == "BiasGrad" for node in graph):
        return graph
    sizes = graph.infer_shapes(shapes)

    def replace(node: Node) -> Node | None:
        source = graph[node.inputs[0].node] if node.op == "BiasGrad" else node
        if source.op not in _BACKWARD or node.inputs[0] != source.output("data_grad"):
            return None
        return Node("Zeros", node.name, (), {"shape": sizes[Ref(node.name)]})

    return graph.rewrite(replace)
