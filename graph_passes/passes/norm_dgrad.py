"""From a BatchNorm's sums through the data of the 1x1 convolution before it, to the sums of the BatchNorm before that
one, where the gradient of the convolution's weights is a launch of its own."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref
from graph_passes.passes.choice import Choose
from graph_passes.passes.conv1x1 import is_product
from graph_passes.passes.norm_backward import from_masked, relu_halves

MAX_CHANNELS = 256  # of the convolution's data: so many columns of its gradient fit into the registers of four warps


def norm_dgrad(graph: Graph, choose: Choose) -> Graph:
    """Fuse the second half of a BatchNorm's backward pass with the gradient of the data of the 1x1 convolution that it
    reads, and the first half of the backward pass of the BatchNorm + ReLU that made that data of `x_2`.

        before    dz, x -> BatchNormBackwardApply `a` -> dx;  dx, data -> ConvolutionWgrad
                  dx, weight -> ConvolutionDgrad -> ddata
                  ddata, x_2 -> BatchNormReluBackwardReduce -> dgamma, dbeta;  ... -> BatchNormReluBackwardApply `b`
        after     dz, x, weight, x_2 -> NormConvDgrad `a` -> dx, dz_2, dgamma, dbeta;  dx, data -> ConvolutionWgrad
                  dz_2, ... -> BatchNormBackwardApply `b`

    dx is written, but not read for ddata, nor is ddata for the sums. For 16-bit types and GPUs of the Hopper
    generation.
    """
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    for apply in graph:
        dgrad = _gradient(graph, apply)
        halves = relu_halves(graph, Ref(dgrad.name)) if dgrad else None
        if dgrad is None or halves is None:
            continue
        reduction, before = halves
        fused = _fused(apply, dgrad, reduction)
        _, *masked_and_sums = fused.refs()
        rest = from_masked(before, *masked_and_sums)
        ways = {"separate": [apply, dgrad, reduction, before], "norm_dgrad": [fused, rest]}
        if choose(graph, apply, ways) == "norm_dgrad":
            nodes += fused, rest
            moved |= dict(zip(reduction.refs(), masked_and_sums[1:], strict=True))
    return graph.replace(nodes, moved)


def _gradient(graph: Graph, apply: Node) -> Node | None:
    """That of the data of the convolution of whose output the half of a BatchNorm gives the gradient, if a kernel makes
    both."""
    if apply.op != "BatchNormBackwardApply" or not apply.get("no_factors", True):
        return None
    readers = graph.consumers.get(Ref(apply.name), ())
    dgrad = next((reader for reader in readers if reader.op == "ConvolutionDgrad"), None)
    fits = dgrad is not None and is_product(dgrad) and dgrad["data_shape"][3] <= MAX_CHANNELS
    return dgrad if fits else None


def _fused(apply: Node, dgrad: Node, reduction: Node) -> Node:
    """In place of all three. Its first output is that of `apply`."""
    norm = (apply.input(role) for role in ("data", "gamma", "saved", "gamma_grad", "beta_grad"))
    before = (reduction.input(role) for role in ("data", "gamma", "saved", "beta"))
    inputs = apply.inputs[0], *norm, dgrad.input("weight"), *before
    return apply.derive("NormConvDgrad", apply.name, inputs, **dgrad.attrs)
