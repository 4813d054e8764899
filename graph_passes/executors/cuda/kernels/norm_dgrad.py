"""Backward from a BatchNorm through the 1x1 convolution before it to the sums of the preceding BatchNorm. The gradient
of the convolution's weights is a launch of its own.

    before    dz, x -> BatchNormBackwardApply `a` -> dx
              dx, weight -> ConvolutionDgrad -> ddata;  dx, data -> ConvolutionWgrad
              ddata, x_2 -> BatchNormReluBackwardReduce -> dgamma, dbeta;  ... -> BatchNormReluBackwardApply `b`
    after     dz, x, weight, x_2 -> NormDgrad `a` -> dx, dz_2, dgamma, dbeta;  dx, data -> ConvolutionWgrad
              dz_2, ... -> BatchNormBackwardApply `b`

dx is written for the weights' gradient only; ddata is not written. The kernel is for 16-bit types and Hopper GPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches, require, require_hopper, rows_and_channels
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import count
from graph_passes.executors.cuda.kernels.batch_norm import from_masked, of_reduction, relu_reductions
from graph_passes.executors.cuda.kernels.conv1x1_forward import CHUNK, is_product
from graph_passes.executors.cuda.kernels.norm_backward import BEFORE, NORM_CONV
from graph_passes.executors.cuda.kernels.norm_stream import STREAMED_BLOCK, WEIGHT_PLACES, NormStream
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.graph import Node
from graph_passes.operators import Operator
from graph_passes.operators.base import DATA_SHAPE
from graph_passes.operators.batch_norm import ATTRIBUTES
from graph_passes.operators.body import Body
from graph_passes.operators.convolution import CONVOLUTION

MAX_CHANNELS = 256  # most channels of the data: this many columns of the gradient fit into the registers of four warps


def norm_dgrad(table: Candidates, apply: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a BatchNormBackwardApply `apply`."""
    if not apply["no_factors"]:
        return
    for dgrad in table.readers(apply.output("data_grad"), "ConvolutionDgrad"):
        if is_product(dgrad.node) and dgrad["data_shape"][3] <= MAX_CHANNELS:
            for reduction in relu_reductions(table, dgrad.output("data_grad")):
                yield _fused(apply.node, dgrad.node, reduction)


def _fused(apply: Node, dgrad: Node, reduction: Candidate) -> Node:
    """The fusion of all three nodes as one node. Its first output is the output of `apply`."""
    norm = (apply.input(role) for role in ("data", "gamma", "saved", "gamma_grad", "beta_grad"))
    inputs = apply.inputs[0], *norm, dgrad.input("weight"), *of_reduction(reduction)
    return apply.derive("NormDgrad", apply.name, inputs, **dgrad.attrs)


def _body(b: Body) -> list[Any]:
    dy = b.norm_grad(b["masked_grad"])
    dz = b.gate(b.dgrad(dy, b["weight"]), b.mask(b.normalised(b["saved_2"], "_2")))
    return [dy, dz, *b.reduced(dz, "_2")]


@dataclass(frozen=True)
class NormDgrad(NormStream):
    """Geometry of `norm_dgrad`, for a convolution from `others` (C) to `channels` (K)."""

    COLUMNS = (128, 256)
    CONTROL_BYTES = Declarations("norm_dgrad.cu").sizeof("DgradControl")

    places = WEIGHT_PLACES

    @property
    def weights(self) -> Tiling:
        """The weights' layout in the parameter: by rows of k."""
        return Tiling.of_matrix(self.channels, self.others, (CHUNK, CHUNK))


def launch(builder: Builder, node: Node) -> None:
    require_hopper(builder, node)
    dz, x, behind = (builder.input(node, role) for role in ("masked_grad", "data", "data_2"))
    dx, dz_behind = builder.output(node, "conv_grad"), builder.output(node, "masked_grad")
    (rows, channels), (_, data_channels) = (rows_and_channels(node, each) for each in (x, behind))
    require(channels % CHUNK == 0, node, f"has {channels} channels: its kernel takes multiples of {CHUNK}")
    most = max(NormDgrad.COLUMNS)
    require(data_channels % VECTOR == 0 and data_channels <= most, node,
            f"is made of {data_channels} channels: its kernel takes multiples of {VECTOR}, {most} at most")
    geometry = NormDgrad(channels, data_channels)
    require(geometry.stages >= 2, node, f"has {channels} channels: there is no room in shared memory for tiles of them")
    grid = geometry.grid(rows, builder.gpu.num_multiprocessors)
    given = [builder.input(node, role) for role in ("saved", "gamma", "gamma_grad", "beta_grad", "saved_2", "gamma_2",
                                                    "beta_2")]
    wide, narrow = geometry.read(rows, channels), geometry.read(rows, data_channels)
    builder.launch(node, "norm_dgrad.cu", builder.kernel("norm_dgrad", geometry.columns), grid, STREAMED_BLOCK,
                   Tiled(In(dz), wide), Tiled(In(x), wide), Tiled(In(builder.input(node, "weight")), geometry.weights),
                   Tiled(In(behind), narrow), Tiled(Out(dx, over=x), geometry.written(rows, channels)),
                   Tiled(Out(dz_behind), geometry.written(rows, data_channels)), *map(In, given),
                   Out(builder.output(node, "gamma_grad")), Out(builder.output(node, "beta_grad")),
                   builder.partials(2 * data_channels * grid[1]), builder.tickets, count(rows),
                   *map(ctypes.c_int, (data_channels, geometry.chunks, geometry.stages)),
                   shared_bytes=geometry.shared_bytes, flops=2 * rows * data_channels * channels)


OPERATORS = (
    Operator("NormDgrad", (*NORM_CONV, *BEFORE), attrs=CONVOLUTION | ATTRIBUTES | DATA_SHAPE,
             outputs=("conv_grad", "masked_grad", "gamma_grad", "beta_grad"), in_place={"conv_grad": ("data",)},
             body=_body, forward="BatchNorm", fused=True),
)
RULES = (("BatchNormBackwardApply", norm_dgrad), ("NormDgrad", from_masked))
LAUNCHES: Launches = {"NormDgrad": launch}
