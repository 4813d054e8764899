"""The gradient of the weights of 3x3 convolutions, by a kernel of our own.

    before    dy, data -> ConvolutionWgrad `dw`
    after     dy, data -> Conv3x3Wgrad `dw`

For stride and padding of 1 over multiples of 64 channels, in 16-bit types and NHWC; the kernel is for GPUs of the
Hopper generation.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node
from graph_passes.passes.conv3x3 import is_3x3

CHANNELS = 64  # of the data and of the output that a block works on: its part of the gradient fits into registers


def conv3x3_wgrad(table: Candidates, wgrad: Candidate) -> Iterator[Node]:
    """Of ConvolutionWgrad."""
    data = table.shapes.get(wgrad.input("data"))
    if is_3x3(wgrad.node) and data and not wgrad["num_filter"] % CHANNELS and not data[3] % CHANNELS:
        yield wgrad.node.replace(op="Conv3x3Wgrad")
