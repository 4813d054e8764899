"""The gradient of a 1x1 convolution's data, with the sums of the BatchNorm that reads it."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref
from graph_passes.passes.choice import Choose
from graph_passes.passes.conv1x1 import is_product

OUT_CHANNELS = (64, 128, 256)  # of the convolution: chunks of 64 whose tiles fit into shared memory
# Likewise, for the kernel that needs no whole tile of them. With fewer, the other is faster (docs/performance.md).
STREAM_CHANNELS = range(129, 512 + 1)
MIN_CHANNELS = 128  # of its data


def dgrad_reduce(graph: Graph, choose: Choose) -> Graph:
    """Fuse the gradient of a 1x1 convolution's data with the reduction of the BatchNorm + add + ReLU (or of a pair)
    whose output that data was.

        before    dy, weight -> ConvolutionDgrad -> dx;  dx, addend, x, mask -> BatchNormAddReluBackwardReduce `b`
        after     dy, weight, addend, x, mask -> DgradReduce `b` -> dgamma, dbeta, dz

    dx is not written. There are two kernels for it, for 16-bit types and GPUs of the Hopper generation; that of the
    way `dgrad_stream` takes more channels, and no pair.
    """
    nodes: list[Node] = []
    for reduction in graph:
        dgrad = _gradient(graph, reduction)
        if dgrad is None:
            continue
        fused = _fused(reduction, dgrad)
        ways = {"separate": [dgrad, reduction]}
        if is_plain_1x1(dgrad):
            ways["dgrad_reduce"] = [fused]
        if _is_streamed(dgrad, reduction):
            ways["dgrad_stream"] = [fused.with_attrs(way="dgrad_stream")]
        way = choose(graph, reduction, ways)
        if way != "separate":
            nodes += ways[way]
    return graph.replace(nodes, {})


def is_plain_1x1(convolution: Node) -> bool:
    """Is it, or the convolution whose gradient it is, one that our kernels for the backward pass can make?"""
    return is_product(convolution) and convolution["num_filter"] in OUT_CHANNELS


def _is_streamed(dgrad: Node, reduction: Node) -> bool:
    """Can `dgrad_stream.cu` make both?"""
    return (is_product(dgrad) and dgrad["num_filter"] in STREAM_CHANNELS
            and reduction.op == "BatchNormAddReluBackwardReduce")


def _gradient(graph: Graph, reduction: Node) -> Node | None:
    """The gradient that only this reduction reads, if a kernel makes both. Of two, rather one of dgrad_reduce.cu; a
    compact one can only be added."""
    if reduction.op not in ("BatchNormAddReluBackwardReduce", "BatchNormPairBackwardReduce"):
        return None
    alone = reduction["single_grad"] or reduction["grad_stride"]
    refs = (reduction.input("out_grad"), *(() if alone else (reduction.input("out_grad_2"),)))
    found = [dgrad for ref in refs if (dgrad := graph[ref.node]).op == "ConvolutionDgrad"
             and dgrad["data_shape"][3] >= MIN_CHANNELS and (is_plain_1x1(dgrad) or _is_streamed(dgrad, reduction))
             and graph.sole_reader(ref, reduction.op)]
    return min(found, key=lambda dgrad: not is_plain_1x1(dgrad), default=None)


def _fused(reduction: Node, dgrad: Node) -> Node:
    is_pair = reduction.op == "BatchNormPairBackwardReduce"
    norms = [reduction.input(role) for role in ("data", "saved", *(("data_2", "saved_2") if is_pair else ()))]
    gradients = [reduction.input("out_grad")]
    if not reduction["single_grad"]:
        gradients.append(reduction.input("out_grad_2"))
    addend = [ref for ref in gradients if ref != Ref(dgrad.name)]
    factors = [] if reduction["no_factors"] else [reduction.input("factors")]
    inputs = (*dgrad.inputs, reduction.input("mask"), *norms, *factors, *addend)
    return Node("DgradReduce", reduction.name, inputs,
                {**dgrad.attrs, **reduction.attrs, "single_norm": not is_pair, "single_grad": not addend})
