"""3x3 convolutions of 64 channels with 64 filters, as in ResNet's stage 1, that kernels of our own can make
(conv3x3.cu), for GPUs of the Hopper generation."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import window
from graph_passes.passes.choice import Choose
from graph_passes.passes.norm_backward import from_masked, relu_halves

CHANNELS = 64  # and filters
_FORWARD = ("ConvolutionStatistics", "ConvolutionRelu")


def own_way_3x3(fused: Node) -> dict[str, list[Node]]:
    """The way that is our own kernel, for a convolution with what is fused with it; none where it makes no such thing.

    ConvolutionStatistics becomes Conv3x3Statistics, ConvolutionRelu Conv3x3Relu: they compute the same. That the data
    has 64 channels, too, is for the device to see.
    """
    return {"conv3x3_forward": [_own(fused)]} if fused.op in _FORWARD and _is_narrow(fused) else {}


def conv3x3_dgrad(graph: Graph, choose: Choose) -> Graph:
    """Let a kernel of our own compute the gradient of a 3x3 convolution's data, where that is faster; and where the
    data comes from a BatchNorm + ReLU, with the first half of that one's backward pass.

        before    dy, weight -> ConvolutionDgrad
        after     dy, weight -> Conv3x3Dgrad

        before    dy, weight -> ConvolutionDgrad -> dx
                  dx, x, ... -> BatchNormReluBackwardReduce `r` -> dgamma, dbeta
                  dx, x, ... -> BatchNormReluBackwardApply `b`
        after     dy, weight, x, ... -> Conv3x3DgradReduce `r` -> dgamma, dbeta, dz
                  dz, x, ... -> BatchNormBackwardApply `b`
    """
    nodes: list[Node] = []
    for dgrad in graph:
        if dgrad.op != "ConvolutionDgrad" or not _is_narrow(dgrad) or dgrad["data_shape"][3] != CHANNELS:
            continue
        halves = relu_halves(graph, Ref(dgrad.name)) or ()
        ways = {"dgrad": [dgrad, *halves], "conv3x3_dgrad": [_own(dgrad), *halves]}
        if halves:
            ways["conv3x3_dgrad_reduce"] = _with_sums(dgrad, *halves)
        nodes += ways[choose(graph, dgrad, ways)]
    return graph.replace(nodes, {})


def _with_sums(dgrad: Node, reduction: Node, apply: Node) -> list[Node]:
    """In place of all three."""
    norm = (reduction.input(role) for role in ("data", "gamma", "saved", "beta"))
    fused = reduction.derive("Conv3x3DgradReduce", reduction.name, (*dgrad.inputs, *norm), **dgrad.attrs)
    dgamma, dbeta, dz = fused.refs()
    return [fused, from_masked(apply, dz, dgamma, dbeta)]


def is_3x3(convolution: Node) -> bool:
    """Is it, or the convolution whose gradient it is, one of 3x3 at stride and padding 1, in a type of 16 bits?"""
    return (window(convolution) == ((3, 3), (1, 1), (1, 1), (1, 1)) and convolution["layout"] == "NHWC"
            and convolution["num_group"] == 1 and convolution.attrs.get("dtype") in ("float16", "bfloat16"))


def _is_narrow(convolution: Node) -> bool:
    return is_3x3(convolution) and convolution["num_filter"] == CHANNELS


def _own(node: Node) -> Node:
    return node.replace(op=node.op.replace("Convolution", "Conv3x3"))
