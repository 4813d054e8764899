"""By which kernel a GPU computes each convolution in INT8."""

from __future__ import annotations

from graph_passes.errors import GraphError, TransientError
from graph_passes.graph import Graph, Node
from graph_passes.passes.choice import Choose

# On tensor cores: by rows / 64 and columns of what a block makes.
TILES = {f"tile {groups}x{columns}": (groups, columns)
         for groups, columns in ((2, 128), (2, 64), (4, 128), (2, 256), (1, 128))}
# Of 1x1 convolutions that are bound by memory: by the teams of a block and the columns that it makes.
STREAMS = {f"stream {teams}x{columns}": (teams, columns) for teams, columns in ((2, 128), (2, 256), (4, 128))}
TAPS = "taps"  # of 3x3 and 1x1 convolutions at stride 1 over 64 channels or more
SQUARES = "squares"  # of the first convolution (passes/quantise_squares.py), and of windows over few channels
DIRECT = "direct"  # for all shapes and GPUs


def quantised_way(graph: Graph, choose: Choose) -> Graph:
    """Let each convolution in INT8 be computed by the kernel that is the fastest for its shape.

        before    x, weight, multiplier, bias -> QuantisedConvolution `y`
        after     x, weight, multiplier, bias -> QuantisedConvolution `y` (way="tile 2x128")

    Each gives the same bits.
    """
    return graph.rewrite(lambda node: node.with_attrs(way=_way(graph, node, choose))
                         if node.op == "QuantisedConvolution" else None)


def _way(graph: Graph, node: Node, choose: Choose) -> str:
    try:
        return choose(graph, node, {way: [node.with_attrs(way=way)] for way in (TAPS, SQUARES, *TILES, *STREAMS)})
    except TransientError:
        raise
    except GraphError:  # no tile is for this shape, or this GPU: never one of several ways, as it is far slower
        return DIRECT
