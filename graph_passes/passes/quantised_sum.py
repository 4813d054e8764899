"""The last convolution of a residual block in INT8, and that of its projection shortcut, by one kernel of our own.

    before    x, weight, multiplier, bias -> QuantisedConvolution -> s
              y, weight_2, multiplier_2, bias_2, s -> QuantisedConvolution `r`
    after     x, weight, multiplier, bias, y, weight_2, multiplier_2, bias_2 -> QuantisedConvolutionSum `r`

The integers of s are the same, but neither written nor read.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node
from graph_passes.operators import window
from graph_passes.passes.quantised_way import STREAMS

STRIDES = ((1, 1), (2, 2))  # of the shortcut


def quantised_sum(table: Candidates, last: Candidate) -> Iterator[Node]:
    """Of QuantisedConvolution."""
    if last["way"] or last["no_addend"] or not is_product(last.node):
        return
    for shortcut in table.makers(last.input("addend"), "QuantisedConvolution"):
        if not shortcut["way"] and _is_shortcut(shortcut.node):
            inputs = (*shortcut.node.inputs, *last.node.inputs[:4])
            fused = shortcut.node.derive("QuantisedConvolutionSum", last.node.name, inputs, scale=last["scale"],
                                         addend_scale=last["addend_scale"], relu=last["relu"])
            yield from (fused.with_attrs(way=way) for way in STREAMS)


def _is_shortcut(node: Node) -> bool:
    return bool(any(is_product(node, stride) for stride in STRIDES) and node["no_addend"] and not node["relu"])


def is_product(node: Node, stride: tuple[int, int] = (1, 1)) -> bool:
    """Is it a convolution from int8 to int8 that is a product of matrices?"""
    return (node.op == "QuantisedConvolution" and window(node) == ((1, 1), stride, (0, 0), (1, 1))
            and node["layout"] == "NHWC" and node["num_group"] == 1 and node["dtype"] == "int8")
