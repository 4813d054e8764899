"""From a BatchNorm's sums through the data of the 1x1 convolution before it, to the sums of the BatchNorm before that
one, where the gradient of the convolution's weights is a launch of its own.

    before    dz, x -> BatchNormBackwardApply `a` -> dx
              dx, weight -> ConvolutionDgrad -> ddata;  dx, data -> ConvolutionWgrad
              ddata, x_2 -> BatchNormReluBackwardReduce -> dgamma, dbeta;  ... -> BatchNormReluBackwardApply `b`
    after     dz, x, weight, x_2 -> NormConvDgrad `a` -> dx, dz_2, dgamma, dbeta;  dx, data -> ConvolutionWgrad
              dz_2, ... -> BatchNormBackwardApply `b`

dx is written, but not read for ddata, nor is ddata for the sums. For 16-bit types and GPUs of the Hopper generation.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node
from graph_passes.passes.conv1x1 import is_product
from graph_passes.passes.norm_backward import of_reduction, relu_reductions

MAX_CHANNELS = 256  # of the convolution's data: so many columns of its gradient fit into the registers of four warps


def norm_dgrad(table: Candidates, apply: Candidate) -> Iterator[Node]:
    """Of BatchNormBackwardApply."""
    if not apply["no_factors"]:
        return
    for dgrad in table.readers(apply.output("data_grad"), "ConvolutionDgrad"):
        if is_product(dgrad.node) and dgrad["data_shape"][3] <= MAX_CHANNELS:
            for reduction in relu_reductions(table, dgrad.output("data_grad")):
                yield _fused(apply.node, dgrad.node, reduction)


def _fused(apply: Node, dgrad: Node, reduction: Candidate) -> Node:
    """In place of all three. Its first output is that of `apply`."""
    norm = (apply.input(role) for role in ("data", "gamma", "saved", "gamma_grad", "beta_grad"))
    inputs = apply.inputs[0], *norm, dgrad.input("weight"), *of_reduction(reduction)
    return apply.derive("NormConvDgrad", apply.name, inputs, **dgrad.attrs)
