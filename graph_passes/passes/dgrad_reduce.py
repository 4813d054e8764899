"""The gradient of a 1x1 convolution's data, with the sums of the BatchNorm that reads it: of a BatchNorm + add + ReLU,
or a pair, whose output that data was.

    before    dy, weight -> ConvolutionDgrad -> dx;  dx, addend, x, mask -> BatchNormAddReluBackwardReduce `b`
    after     dy, weight, addend, x, mask -> DgradReduce `b` -> dgamma, dbeta, dz

dx is not written. There are two kernels for it, for 16-bit types and GPUs of the Hopper generation; dgrad_stream.cu
takes more channels, and no pair.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node, Ref
from graph_passes.passes.conv1x1 import is_product

OUT_CHANNELS = (64, 128, 256)  # of the convolution: chunks of 64 whose tiles fit into shared memory
# Likewise, for the kernel that needs no whole tile of them. With fewer, the other is faster (docs/performance.md).
STREAM_CHANNELS = range(129, 512 + 1)
MIN_CHANNELS = 128  # of its data


def dgrad_reduce(table: Candidates, reduction: Candidate) -> Iterator[Node]:
    """Of the reductions. A compact gradient can only be added."""
    gradients = [reduction.input("out_grad")]
    if not reduction["single_grad"] and not reduction["grad_stride"]:
        gradients.append(reduction.input("out_grad_2"))
    if len({*gradients}) < len(gradients):  # the sum of a tensor with itself
        return
    for gradient in gradients:
        for dgrad in table.makers(gradient, "ConvolutionDgrad"):
            if dgrad["data_shape"][3] >= MIN_CHANNELS:
                yield from _forms(reduction.node, dgrad.node, gradient)


def _forms(reduction: Node, dgrad: Node, gradient: Ref) -> Iterator[Node]:
    if is_plain_1x1(dgrad):
        yield _fused(reduction, dgrad, gradient)
    if _is_streamed(dgrad, reduction):
        yield _fused(reduction, dgrad, gradient).with_attrs(way="dgrad_stream")


def is_plain_1x1(convolution: Node) -> bool:
    """Is it, or the convolution whose gradient it is, one that our kernels for the backward pass can make?"""
    return is_product(convolution) and convolution["num_filter"] in OUT_CHANNELS


def _is_streamed(dgrad: Node, reduction: Node) -> bool:
    """Can `dgrad_stream.cu` make both?"""
    return (is_product(dgrad) and dgrad["num_filter"] in STREAM_CHANNELS
            and reduction.op == "BatchNormAddReluBackwardReduce")


def _fused(reduction: Node, dgrad: Node, gradient: Ref) -> Node:
    is_pair = reduction.op == "BatchNormPairBackwardReduce"
    norms = [reduction.input(role) for role in ("data", "saved", *(("data_2", "saved_2") if is_pair else ()))]
    gradients = [reduction.input("out_grad")]
    if not reduction["single_grad"]:
        gradients.append(reduction.input("out_grad_2"))
    addend = [ref for ref in gradients if ref != gradient]
    factors = [] if reduction["no_factors"] else [reduction.input("factors")]
    inputs = (*dgrad.inputs, reduction.input("mask"), *norms, *factors, *addend)
    return Node("DgradReduce", reduction.name, inputs,
                {**dgrad.attrs, **reduction.attrs, "single_norm": not is_pair, "single_grad": not addend})
