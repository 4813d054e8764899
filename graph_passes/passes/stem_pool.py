"""The stem in inference: ResNet's first convolution up to its max pooling, by a kernel of our own.

    before    image, weight, bias -> ConvolutionRelu -> Pooling `pool`
    after     image, weight, bias -> StemPool `pool`

In 16-bit types. The largest tensor of the network is not written.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node
from graph_passes.operators import window
from graph_passes.passes.stem import FILTERS, WINDOW

POOLING = ((3, 3), (2, 2), (1, 1), (1, 1))  # kernel, stride, pad, dilation


def stem_pool(table: Candidates, pooling: Candidate) -> Iterator[Node]:
    """Of Pooling."""
    if not is_stems(pooling.node, "Pooling"):
        return
    for convolution in table.makers(pooling.node.inputs[0], "ConvolutionRelu"):
        if _fits(convolution.node):
            yield convolution.node.derive("StemPool", pooling.node.name, convolution.node.inputs)


def is_stems(pooling: Node, op: str) -> bool:
    """Is it the max pooling of ResNet's stem, as this operator?"""
    return (pooling.op == op and pooling["pool_type"] == "max" and not pooling["global_pool"]
            and pooling["pooling_convention"] == "valid" and window(pooling) == POOLING)


def _fits(convolution: Node) -> bool:
    return (window(convolution) == WINDOW and convolution["num_filter"] == FILTERS and convolution["num_group"] == 1
            and convolution["layout"] == "NHWC" and convolution.attrs.get("dtype") in ("float16", "bfloat16"))
