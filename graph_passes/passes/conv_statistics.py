"""A convolution that leaves the sums of its output for the BatchNorm that reads it.

    before    x, weight -> Convolution `conv` -> y -> BatchNormStatistics -> sums
    after     x, weight -> ConvolutionStatistics `conv` -> y, sums
    or        x, weight -> Conv1x1Statistics or Conv3x3Statistics `conv` -> y, sums

cuDNN adds these sums up in a varying order, which its notes on plans do not say (cuDNN 9.19 on an H200: other bits in
each of 20 runs). So this is not for runs that are to be repeatable. The last two are our own kernels', whose order is
fixed, and whose sums are about the mean.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node
from graph_passes.operators import channel_axis
from graph_passes.passes.conv1x1 import own_form
from graph_passes.passes.conv3x3 import own_form_3x3


def conv_statistics(table: Candidates, sums: Candidate) -> Iterator[Node]:
    """Of BatchNormStatistics."""
    for convolution in with_statistics(table, sums):
        node = convolution.node
        fused = node.derive("ConvolutionStatistics", node.name, node.inputs)
        yield from (fused, *own_form(fused), *own_form_3x3(fused))


def with_statistics(table: Candidates, sums: Candidate) -> Iterator[Candidate]:
    """The convolution without bias over the channels of whose output the sums are. In groups there is none: cuDNN fuses
    nothing into these."""
    for convolution in table.makers(sums.input("data"), "Convolution"):
        if (convolution["no_bias"] and convolution["num_group"] == 1
                and sums["axis"] % 4 == channel_axis(convolution["layout"])):
            yield convolution
