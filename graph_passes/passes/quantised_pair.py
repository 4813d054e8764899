"""The last convolution of a residual block in INT8, and the first of the next block, by one kernel of our own.

    before    x, weight, multiplier, bias, shortcut -> QuantisedConvolution `r` -> y
              y, weight_2, multiplier_2, bias_2 -> QuantisedConvolution -> z
    after     x, weight, multiplier, bias, shortcut, weight_2, multiplier_2, bias_2
              -> QuantisedConvolutionPair `r` -> y, z

Both with ReLU. Likewise a QuantisedConvolutionSum begins a QuantisedConvolutionSumPair. y is written, for the next sum
reads it too, but z is made of what is still on the chip.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node
from graph_passes.passes.quantised_sum import is_product


def quantised_pair(table: Candidates, first: Candidate) -> Iterator[Node]:
    """Of QuantisedConvolution and QuantisedConvolutionSum."""
    if not _begins(first.node):
        return
    output = first.output("output")
    for second in table.readers(output, "QuantisedConvolution"):
        if second.input("data") == output and _is_rectified(second.node) and second["no_addend"]:
            inputs = (*first.node.inputs, *second.node.inputs[1:])
            yield first.node.derive(f"{first.op}Pair", first.node.name, inputs, num_filter_2=second["num_filter"],
                                    scale_2=second["scale"])


def _begins(first: Node) -> bool:
    if first.op == "QuantisedConvolutionSum":
        return bool(first["relu"])
    return _is_rectified(first) and not first["no_addend"]


def _is_rectified(node: Node) -> bool:
    return is_product(node) and bool(node["relu"])
