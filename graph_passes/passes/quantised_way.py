"""By which kernel a GPU computes each convolution in INT8."""

from __future__ import annotations

from graph_passes.graph import Graph
from graph_passes.passes.choice import Choose

# Our own on Hopper's tensor cores, by rows / 64 and columns of what a block makes; cuDNN's; one for all shapes and GPUs.
TILES = {f"tile {groups}x{columns}": (groups, columns)
         for groups, columns in ((2, 64), (2, 128), (4, 128), (2, 256))}
DIRECT = "direct"
WAYS = (*TILES, DIRECT)


def quantised_way(graph: Graph, choose: Choose) -> Graph:
    """Let each convolution in INT8 be computed by the kernel that is the fastest for its shape.

        before    x, weight, multiplier, bias -> QuantisedConvolution `y`
        after     x, weight, multiplier, bias -> QuantisedConvolution `y` (way="tile 2x128")

    Each gives the same bits.
    """
    return graph.rewrite(lambda node: node.with_attrs(
        way=choose(graph, node, {way: [node.with_attrs(way=way)] for way in WAYS})
    ) if node.op == "QuantisedConvolution" else None)
