"""By which kernel a GPU computes each convolution in INT8.

    before    x, weight, multiplier, bias -> QuantisedConvolution `y`
    after     x, weight, multiplier, bias -> QuantisedConvolution `y` (way="tile 2x128")

Each gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node

# On tensor cores: by rows / 64 and columns of what a block makes.
TILES = {f"tile {groups}x{columns}": (groups, columns)
         for groups, columns in ((2, 128), (2, 64), (4, 128), (2, 256), (1, 128))}
# Of 1x1 convolutions that are bound by memory: by the teams of a block and the columns that it makes.
STREAMS = {f"stream {teams}x{columns}": (teams, columns) for teams, columns in ((2, 128), (2, 256), (4, 128))}
TAPS = "taps"  # of 3x3 and 1x1 convolutions at stride 1 over 64 channels or more
SQUARES = "squares"  # of the first convolution (passes/quantise_squares.py), and of windows over few channels
DIRECT = "direct"  # for all shapes and GPUs, and far slower: taken where no other is for this shape, or this GPU
WAYS = (TAPS, SQUARES, *TILES, *STREAMS, DIRECT)


def quantised_way(table: Candidates, convolution: Candidate) -> Iterator[Node]:
    """Of QuantisedConvolution."""
    for way in WAYS:
        yield convolution.node.with_attrs(way=way)
