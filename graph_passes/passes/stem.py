"""ResNet's first convolution in 16-bit types: kernels of our own, with what reads its output.

    before    image, weight -> Convolution `conv` -> x -> BatchNormStatistics -> sums
    after     image, weight -> StemConvolution `conv` -> x, sums

    before    dy, winner, x -> BatchNormPoolBackwardApply -> dx;  dx, image -> ConvolutionWgrad `dw`
    after     dy, winner, x, image -> StemWgrad `dw`

For 7x7 with stride 2 from 3 or 4 channels to 64, in NHWC. cuDNN has no statistics for 4 channels and, in bfloat16, no
fast engine either. The gradient of the network's largest tensor is not written.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node
from graph_passes.operators import Shape, window
from graph_passes.passes.conv_statistics import with_statistics

FILTERS, SIZE = 64, 7
WINDOW = ((SIZE, SIZE), (2, 2), (3, 3), (1, 1))  # kernel, stride, pad, dilation
CHANNELS = (3, 4)  # of the images; three are padded to four


def stem(table: Candidates, sums: Candidate) -> Iterator[Node]:
    """Of BatchNormStatistics: with the convolution before it."""
    for convolution in with_statistics(table, sums):
        if _fits(convolution, table.shapes.get(convolution.node.inputs[0])):
            fused = convolution.node.derive("StemConvolution", convolution.node.name, convolution.node.inputs)
            yield from (fused, fused.with_attrs(way="stem_forward"))


def stem_wgrad(table: Candidates, wgrad: Candidate) -> Iterator[Node]:
    """Of ConvolutionWgrad: with what makes the gradient of the output."""
    image = wgrad.input("data")
    if not _fits(wgrad, table.shapes.get(image)):
        return
    for before in table.makers(wgrad.input("out_grad"), "BatchNormPoolBackwardApply"):
        fused = before.node.derive("StemWgrad", wgrad.node.name, (*before.node.inputs, image), **wgrad.node.attrs)
        yield from (fused, fused.with_attrs(way="stem_weights"))


def _fits(convolution: Candidate, data: Shape | None) -> bool:
    node = convolution.node
    return (data is not None and window(node) == WINDOW and node["num_filter"] == FILTERS and data[3] in CHANNELS
            and data[2] % 2 == 0 and node["layout"] == "NHWC" and "dtype" in node.attrs)
