"""From a BatchNorm's sums through the 1x1 convolution before it, to the sums of the BatchNorm before that one.

    before    dz, x -> BatchNormBackwardApply -> dx
              dx, data -> ConvolutionWgrad `dw`;  dx, weight -> ConvolutionDgrad `ddata`
    after     dz, x, data, weight -> NormConvBackward `dw` -> dw, ddata

and where `data` comes from a BatchNorm + ReLU of `x_2`, with the first half of that one's backward pass:

    before    ddata, x_2 -> BatchNormReluBackwardReduce -> dgamma, dbeta;  ... -> BatchNormReluBackwardApply `b`
    after     dz, x, x_2, weight -> NormConvReduce `dw` -> dw, dz_2, dgamma, dbeta
              dz_2, ... -> BatchNormBackwardApply `b`

dx, the wide one, is not written. The kernel is for 16-bit types and GPUs of the Hopper generation.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node, Ref
from graph_passes.passes.conv1x1 import is_product

# Of the convolution's data -> those it makes: the registers of a block, or of two, hold the gradient of its weights.
CHANNELS = {64: (64, 128, 256), 128: (128, 256, 512)}


def norm_backward(table: Candidates, apply: Candidate) -> Iterator[Node]:
    """Of BatchNormBackwardApply and BatchNormReluBackwardApply."""
    gradient = apply.output("data_grad")
    for dgrad in table.readers(gradient, "ConvolutionDgrad"):
        channels = CHANNELS.get(dgrad["data_shape"][3], ())
        if not is_product(dgrad.node) or dgrad["num_filter"] not in channels:
            continue
        for wgrad in table.readers(gradient, "ConvolutionWgrad"):
            if is_product(wgrad.node):  # where the gradient of the data is compact, this one still has the stride
                yield from _forms(table, apply.node, dgrad, wgrad)


def _forms(table: Candidates, apply: Node, dgrad: Candidate, wgrad: Candidate) -> Iterator[Node]:
    inputs = [apply.inputs[0], *_of_norm(apply), dgrad.input("weight")]
    relu = [apply.input("beta")] if apply.op == "BatchNormReluBackwardApply" else []
    factors = [] if apply.get("no_factors", True) else [apply.input("factors")]
    attrs = {**apply.attrs, **dgrad.node.attrs, "no_relu": not relu, "no_factors": not factors}
    name = wgrad.node.name
    yield Node("NormConvBackward", name, (*inputs, wgrad.input("data"), *relu, *factors), attrs)
    for reduction in relu_reductions(table, dgrad.output("data_grad")):
        data, *before = of_reduction(reduction)
        yield Node("NormConvReduce", name, (*inputs, data, *relu, *before, *factors), attrs)


def _of_norm(apply: Node) -> list[Ref]:
    """What the half of a BatchNorm reads beside the gradient."""
    return [apply.input(role) for role in ("data", "gamma", "saved", "gamma_grad", "beta_grad")]


def relu_reductions(table: Candidates, gradient: Ref) -> Iterator[Candidate]:
    """The first half of the backward pass of a BatchNorm + ReLU that reads this gradient alone."""
    for reduction in table.readers(gradient, "BatchNormReluBackwardReduce"):
        if reduction["single_grad"]:
            yield reduction


def of_reduction(reduction: Candidate) -> list[Ref]:
    """What it reads beside the gradient."""
    return [reduction.input(role) for role in ("data", "gamma", "saved", "beta")]


def from_masked(table: Candidates, reduction: Candidate) -> Iterator[Node]:
    """Of operators that do such a first half and keep the masked gradient: the second half that starts from that."""
    sums = reduction.output("gamma_grad"), reduction.output("beta_grad")
    for apply in table.readers(sums[0], "BatchNormReluBackwardApply"):
        data, gamma, saved = (apply.input(role) for role in ("data", "gamma", "saved"))
        yield apply.node.derive("BatchNormBackwardApply", apply.node.name,
                                (reduction.output("masked_grad"), data, gamma, saved, *sums))
