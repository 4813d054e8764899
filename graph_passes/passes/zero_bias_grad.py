"""The gradient of a bias in front of a BatchNorm is 0, since BatchNorm subtracts the mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph_passes.graph import Graph, Node, Ref

_BACKWARD = ("BatchNormBackward", "BatchNormReluBackward", "BatchNormAddReluBackward")


def zero_bias_grad(graph: Graph, shapes: Mapping[str, Sequence[int]]) -> Graph:
    """Replace the sum of a gradient that is known to be 0. `shapes`: of the inputs.

        before    dy -> BatchNormBackward -> BiasGrad `b`
        after     Zeros `b`

    Without this pass, rounding leaves some noise in place of the 0.
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
