"""The stem in INT8: the first convolution with its max pooling, by a kernel of our own.

    before    squares, weight, multiplier, bias -> QuantisedConvolution -> QuantisedPooling `pool`
    after     squares, weight, multiplier, bias -> QuantisedStemPool `pool`

The first convolution is one of squares. The largest tensor of the network is not written; maxima of integers are the
same integers.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node
from graph_passes.operators import window
from graph_passes.passes.stem import FILTERS
from graph_passes.passes.stem_pool import is_stems

WINDOW = ((4, 4), (1, 1), (0, 0), (1, 1))  # of 7x7 with stride 2 and padding 3, in squares


def quantised_stem_pool(table: Candidates, pooling: Candidate) -> Iterator[Node]:
    """Of QuantisedPooling."""
    if not is_stems(pooling.node, "QuantisedPooling"):
        return
    for convolution in table.makers(pooling.node.inputs[0], "QuantisedConvolution"):
        if table.makers(convolution.input("data"), "QuantiseSquares") and _fits(convolution.node):
            yield convolution.node.derive("QuantisedStemPool", pooling.node.name, convolution.node.inputs)


def _fits(convolution: Node) -> bool:
    return (window(convolution) == WINDOW and convolution["num_filter"] == FILTERS and convolution["num_group"] == 1
            and convolution["no_addend"] and convolution["layout"] == "NHWC" and convolution["dtype"] == "int8")
