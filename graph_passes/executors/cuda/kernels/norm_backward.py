"""Backward from a BatchNorm's sums, through the 1x1 convolution before it, to the sums of the preceding BatchNorm.

    before    dz, x -> BatchNormBackwardApply -> dx
              dx, data -> ConvolutionWgrad `dw`;  dx, weight -> ConvolutionDgrad `ddata`
    after     dz, x, data, weight -> NormBackward `dw` -> dw, ddata

If `data` is BatchNorm + ReLU of `x_2`, the node includes the first half of that BatchNorm's backward pass:

    before    ddata, x_2 -> BatchNormReluBackwardReduce -> dgamma, dbeta;  ... -> BatchNormReluBackwardApply `b`
    after     dz, x, x_2, weight -> NormBackwardReduce `dw` -> dw, dz_2, dgamma, dbeta
              dz_2, ... -> BatchNormBackwardApply `b`

The wide gradient dx is not written. With stochastic depth after a BatchNorm, the BatchNorm's gradient is multiplied by
`factors`. The kernel is for 16-bit types and Hopper GPUs.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches, require_hopper, rows_and_channels
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import Size, count, instance
from graph_passes.executors.cuda.kernels.batch_norm import from_masked, of_reduction, relu_reductions
from graph_passes.executors.cuda.kernels.conv1x1_forward import CHUNK, is_product
from graph_passes.executors.cuda.kernels.dropout import drops, factors_of
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node, Ref
from graph_passes.operators import Operator
from graph_passes.operators.base import DATA_SHAPE, FALSE
from graph_passes.operators.batch_norm import ATTRIBUTES
from graph_passes.operators.body import Body
from graph_passes.operators.convolution import CONVOLUTION
from graph_passes.operators.dropout import FACTORS, dropping

_CUDA = Declarations("norm_backward.cu")
BLOCK: Size = (_CUDA.value("THREADS"), 1, 1)
# The convolution's input channels -> its possible output channels. With these numbers the registers of one or two
# blocks hold the gradient of the weights.
CHANNELS = {64: (64, 128, 256), 128: (128, 256, 512)}


def norm_backward(table: Candidates, apply: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a BatchNormBackwardApply or BatchNormReluBackwardApply `apply`."""
    gradient = apply.output("data_grad")
    for dgrad in table.readers(gradient, "ConvolutionDgrad"):
        channels = CHANNELS.get(dgrad["data_shape"][3], ())
        if not is_product(dgrad.node) or dgrad["num_filter"] not in channels:
            continue
        for wgrad in table.readers(gradient, "ConvolutionWgrad"):
            # if the gradient of the data is compact, the node still has the convolution's stride
            if is_product(wgrad.node):
                yield from _forms(table, apply.node, dgrad, wgrad)


def _forms(table: Candidates, apply: Node, dgrad: Candidate, wgrad: Candidate) -> Iterator[Node]:
    inputs = [apply.inputs[0], *_of_norm(apply), dgrad.input("weight")]
    relu = [apply.input("beta")] if apply.op == "BatchNormReluBackwardApply" else []
    factors = [] if apply.get("no_factors", True) else [apply.input("factors")]
    attrs = {**apply.attrs, **dgrad.node.attrs, "no_relu": not relu, "no_factors": not factors}
    name = wgrad.node.name
    yield Node("NormBackward", name, (*inputs, wgrad.input("data"), *relu, *factors), attrs)
    for reduction in relu_reductions(table, dgrad.output("data_grad")):
        data, *before = of_reduction(reduction)
        yield Node("NormBackwardReduce", name, (*inputs, data, *relu, *before, *factors), attrs)


def _of_norm(apply: Node) -> list[Ref]:
    """The inputs of a BatchNorm's half besides the gradient."""
    return [apply.input(role) for role in ("data", "gamma", "saved", "gamma_grad", "beta_grad")]


def _body(b: Body, reduces: bool) -> list[Any]:
    gradient = b.dropped(b["masked_grad"])
    dy = b.norm_grad(b.through_relu(gradient) if b.has("beta") else gradient)
    dx = b.dgrad(dy, b["weight"])
    if not reduces:
        return [b.wgrad(dy, b["data_2"]), dx]
    y = b.relu(b.normalised(b["saved_2"], "_2"))
    dz = b.gate(dx, b.mask(y))
    return [b.wgrad(dy, y), dz, *b.reduced(dz, "_2")]


class NormBackward:
    """Geometry of `norm_backward`, for convolutions from 64 or 128 channels to `k` channels. With 128 channels, each of
    the two blocks of a cluster has half of the `k` channels. A block's part of the weights' gradient fits into the
    block's registers.
    """

    def __init__(self, k: int, columns: int) -> None:
        self._shape = f"Shape<{k}, {columns}>"
        self.blocks = _CUDA.value(f"{self._shape}::BLOCKS")

    def grid(self, rows: int, num_multiprocessors: int) -> Size:
        """The grid: blocks of a cluster, and clusters."""
        return self.blocks, max(1, min(num_multiprocessors // self.blocks, -(-rows // _CUDA.value("ROWS")))), 1

    def tiling(self, rows: int, channels: int) -> Tiling:
        return Tiling.of_matrix(rows, channels, (_CUDA.value("PIECE_ROWS"), CHUNK))

    @property
    def shared_bytes(self) -> int:
        return _CUDA.sizeof(f"Shared<{self._shape}>")


def launch(builder: Builder, node: Node) -> None:
    """Launch the gradients of the weights and of the data; or the gradient of the weights, the masked gradient, and the
    sums of the BatchNorm that made the data.
    """
    require_hopper(builder, node)
    reduces = node.op == "NormBackwardReduce"
    dz, x, behind = (In(builder.input(node, role)) for role in ("masked_grad", "data", "data_2"))
    w, dw = builder.input(node, "weight"), builder.output(node, "weight_grad")
    beta = builder.optional_input(node, "beta", "no_relu")
    (rows, k), columns = rows_and_channels(node, builder.input(node, "data")), w.shape[3]
    geometry = NormBackward(k, columns)
    of_k, of_columns = geometry.tiling(rows, k), geometry.tiling(rows, columns)
    grid = geometry.grid(rows, builder.gpu.num_multiprocessors)
    parts = Buffer(f"{node.name}:parts", (grid[1], k, columns), "float32")
    before = [builder.input(node, role) if reduces else None for role in ("saved_2", "gamma_2", "beta_2")]
    sums = [builder.output(node, role) if reduces else None for role in ("gamma_grad", "beta_grad")]
    flags = beta is not None, reduces, drops(node)
    builder.launch(node, "norm_backward.cu", builder.kernel("norm_backward", k, columns, *flags), grid, BLOCK,
                   Tiled(dz, of_k), Tiled(x, of_k), Tiled(behind, of_columns),
                   In(builder.input(node, "saved")), In(builder.input(node, "gamma")), In(beta),
                   In(builder.input(node, "gamma_grad")), In(builder.input(node, "beta_grad")), In(w), behind,
                   Out(builder.output(node, "masked_grad" if reduces else "data_grad")), *map(In, before),
                   *map(Out, sums), Out(parts), builder.partials(2 * columns * grid[1]), builder.tickets, count(rows),
                   *factors_of(builder, node, rows), shared_bytes=geometry.shared_bytes, flops=4 * rows * columns * k)
    sum_parts(builder, node, parts, dw)


def sum_parts(builder: Builder, node: Node, parts: Buffer, dw: Buffer) -> None:
    """Launch the sum, in a fixed order, of the parts of dw that the blocks have written."""
    vectors = math.prod(parts.shape[1:]) // VECTOR
    builder.launch(node, "norm_backward.cu", instance("sum_parts", dw.dtype), (-(-vectors // 16), 1, 1), (256, 1, 1),
                   In(parts), Out(dw), ctypes.c_int(parts.shape[0]), count(vectors))


_SUMS = ("gamma_grad", "beta_grad")
NORM_CONV = ("masked_grad", "data", "gamma", "saved", *_SUMS, "weight", "data_2")
BEFORE = ("gamma_2", "saved_2", "beta_2")
_ATTRIBUTES = CONVOLUTION | ATTRIBUTES | DATA_SHAPE | dropping(["factors"]) | {"no_relu": FALSE}
_OPTIONAL = {"beta": "no_relu", **FACTORS}

OPERATORS = (
    # `beta` is an input if the gradient must still be masked by ReLU. `data_2` is the data of the convolution.
    Operator("NormBackward", (*NORM_CONV, "beta", "factors"), attrs=_ATTRIBUTES, outputs=("weight_grad", "data_grad"),
             optional=_OPTIONAL, body=partial(_body, reduces=False), forward="BatchNorm", fused=True),
    # Here `data_2` is the input of the preceding BatchNorm + ReLU, from which the data of the convolution is
    # recomputed.
    Operator("NormBackwardReduce", (*NORM_CONV, "beta", *BEFORE, "factors"), attrs=_ATTRIBUTES,
             outputs=("weight_grad", "masked_grad", *_SUMS), optional=_OPTIONAL, body=partial(_body, reduces=True),
             forward="BatchNorm", fused=True),
)
RULES = (("BatchNormBackwardApply", norm_backward), ("BatchNormReluBackwardApply", norm_backward),
         ("NormBackwardReduce", from_masked))
LAUNCHES: Launches = {"NormBackward": launch, "NormBackwardReduce": launch}
