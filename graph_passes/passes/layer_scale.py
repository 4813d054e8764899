"""Write the product of images with one trained factor for each channel as one operator."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref


def layer_scale(graph: Graph) -> Graph:
    """Replace a product with a variable that a Reshape has brought to (1, 1, 1, C), in NHWC.

        before    gamma -> Reshape(1, 1, 1, -1);  x, factors -> broadcast_mul `scale`
        after     x, gamma -> ScaleChannels `scale`

    The factors and their gradient then stay in fp32, as BatchNorm's parameters and gradients do.
    """

    def fuse(node: Node) -> Node | None:
        if node.op != "broadcast_mul":
            return None
        for x, factors in (node.inputs, reversed(node.inputs)):
            reshape = graph[factors.node]
            if (reshape.op == "Reshape" and reshape["shape"] == (1, 1, 1, -1)
                    and graph[reshape.inputs[0].node].is_variable and graph.sole_reader(reshape.inputs[0], "Reshape")
                    and graph.sole_reader(Ref(reshape.name), "broadcast_mul")):
                return Node("ScaleChannels", node.name, (x, reshape.inputs[0]))
        return None

    return graph.rewrite(fuse)
