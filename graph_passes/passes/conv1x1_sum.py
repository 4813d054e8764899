"""The last convolution of a residual block in inference, and that of its shortcut, by one kernel of our own.

    before    x, weight, bias -> Convolution -> s;  y, weight_2, bias_2, s -> ConvolutionAddRelu `r`
    after     x, weight, bias, y, weight_2, bias_2 -> Conv1x1SumRelu `r`

In 16-bit types. One of the two, the first in the new node, may have stride 2. Their sum is one product over the
channels of both: s is neither written nor read, nor is it rounded.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node
from graph_passes.passes.conv1x1 import is_product


def conv1x1_sum(table: Candidates, last: Candidate) -> Iterator[Node]:
    """Of ConvolutionAddRelu."""
    for addend in table.makers(last.input("addend"), "Convolution"):
        if addend["no_bias"]:
            continue
        first, second = (last.node, addend.node) if is_product(addend.node) else (addend.node, last.node)
        if is_product(second) and (is_product(first) or is_product(first, stride=(2, 2))):
            yield first.derive("Conv1x1SumRelu", last.node.name, (*first.inputs[:3], *second.inputs[:3]))
