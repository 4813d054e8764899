"""A BatchNorm of a training step, and the convolution that reads its output, with the sums of that one's output.

    before    x, sums, ..., addend -> BatchNormAddReluApply `bn` -> y, saved, ..., mask
              y, weight -> Convolution -> z -> BatchNormStatistics -> sums of z
    after     x, sums, ..., addend, weight -> BatchNormAddReluConv1x1 `bn` -> y, saved, ..., mask, z, sums of z

Likewise with BatchNormPairApply, and with BatchNormReluApply within a block, also before a 3x3 convolution over 64
channels. z is made of what is still on the chip. y is written, for the next sum and the backward pass read it too; but
with BatchNormReluApply and a 1x1 convolution it may be left out, where the backward pass makes it again.

For 16-bit types and GPUs of the Hopper generation, where no images are dropped. Weights too large for shared memory are
streamed at the end of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node
from graph_passes.passes.conv1x1 import is_product
from graph_passes.passes.conv3x3 import is_narrow

_WITH_1X1 = {"BatchNormAddReluApply": "BatchNormAddReluConv1x1", "BatchNormPairApply": "BatchNormPairConv1x1",
             "BatchNormReluApply": "BatchNormReluConv1x1"}
_WITH_3X3 = {"BatchNormReluApply": "BatchNormReluConv3x3"}


def norm_conv(table: Candidates, norm: Candidate) -> Iterator[Node]:
    """Of the halves of BatchNorms that these begin with."""
    output = norm.output("output")
    if not norm.node.get("no_factors", True):
        return
    for convolution in table.readers(output, "Convolution"):
        op = _fused(norm.op, convolution.node)
        if op is None or not table.readers(convolution.output("output"), "BatchNormStatistics"):
            continue
        fused = Node(op, norm.node.name, (*norm.node.inputs, convolution.input("weight")),
                     {**convolution.node.attrs, **norm.node.attrs})
        yield fused
        if op == "BatchNormReluConv1x1":
            yield fused.with_attrs(no_output=True)


def _fused(norm: str, convolution: Node) -> str | None:
    if not convolution["no_bias"]:
        return None
    if is_product(convolution):
        return _WITH_1X1[norm]
    return _WITH_3X3.get(norm) if is_narrow(convolution) else None
