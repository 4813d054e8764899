"""The last convolution of a residual block in inference, and the first of the next block, by one kernel of our own.

    before    x, weight, bias, shortcut -> ConvolutionAddRelu `r` -> y;  y, weight_2, bias_2 -> ConvolutionRelu -> z
    after     x, weight, bias, shortcut, weight_2, bias_2 -> Conv1x1Pair `r` -> y, z

In 16-bit types. y is written, for the next sum reads it too, but z is made of what is still on the chip.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node
from graph_passes.passes.conv1x1 import is_product


def conv1x1_pair(table: Candidates, first: Candidate) -> Iterator[Node]:
    """Of ConvolutionAddRelu."""
    output = first.output("output")
    for second in table.readers(output, "ConvolutionRelu"):
        if second.input("data") == output and is_product(first.node) and is_product(second.node):
            inputs = (*first.node.inputs, *second.node.inputs[1:])
            yield first.node.derive("Conv1x1Pair", first.node.name, inputs, num_filter_2=second["num_filter"])
