"""3x3 convolutions of 64 channels with 64 filters, as in ResNet's stage 1, that kernels of our own can make
(conv3x3.cu), for GPUs of the Hopper generation.

    before    dy, weight -> ConvolutionDgrad
    after     dy, weight -> Conv3x3Dgrad

and where the data comes from a BatchNorm + ReLU, with the first half of that one's backward pass:

    before    dy, weight -> ConvolutionDgrad -> dx
              dx, x, ... -> BatchNormReluBackwardReduce `r` -> dgamma, dbeta
              dx, x, ... -> BatchNormReluBackwardApply `b`
    after     dy, weight, x, ... -> Conv3x3DgradReduce `r` -> dgamma, dbeta, dz
              dz, x, ... -> BatchNormBackwardApply `b`
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node
from graph_passes.operators import window
from graph_passes.passes.norm_backward import relu_reductions

CHANNELS = 64  # and filters
_FORWARD = ("ConvolutionStatistics", "ConvolutionRelu")


def own_form_3x3(fused: Node) -> list[Node]:
    """Our own kernel's, of a convolution with what is fused with it; none where it makes no such thing.

    ConvolutionStatistics becomes Conv3x3Statistics, ConvolutionRelu Conv3x3Relu: they compute the same. That the data
    has 64 channels, too, is for the device to see.
    """
    return [_own(fused)] if fused.op in _FORWARD and is_narrow(fused) else []


def conv3x3_dgrad(table: Candidates, dgrad: Candidate) -> Iterator[Node]:
    """Of ConvolutionDgrad."""
    if not is_narrow(dgrad.node) or dgrad["data_shape"][3] != CHANNELS:
        return
    yield _own(dgrad.node)
    for reduction in relu_reductions(table, dgrad.output("data_grad")):
        norm = (reduction.input(role) for role in ("data", "gamma", "saved", "beta"))
        yield reduction.node.derive("Conv3x3DgradReduce", reduction.node.name, (*dgrad.node.inputs, *norm),
                                    **dgrad.node.attrs)


def is_3x3(convolution: Node) -> bool:
    """Is it, or the convolution whose gradient it is, one of 3x3 at stride and padding 1, in a type of 16 bits?"""
    return (window(convolution) == ((3, 3), (1, 1), (1, 1), (1, 1)) and convolution["layout"] == "NHWC"
            and convolution["num_group"] == 1 and convolution.attrs.get("dtype") in ("float16", "bfloat16"))


def is_narrow(convolution: Node) -> bool:
    """Is it one of these, as far as its filters tell?"""
    return is_3x3(convolution) and convolution["num_filter"] == CHANNELS


def _own(node: Node) -> Node:
    return node.replace(op=node.op.replace("Convolution", "Conv3x3"))
