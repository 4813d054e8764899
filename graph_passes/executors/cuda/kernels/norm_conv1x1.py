"""The end of a residual block in training (BatchNorm + add + ReLU, or two BatchNorms whose sum goes through ReLU),
fused with the 1x1 convolution that begins the next block and the sums of its output.

    before    x, sums, ..., addend -> BatchNormAddReluApply `bn` -> y, saved, ..., mask
              y, weight -> Convolution -> z -> BatchNormStatistics -> sums of z
    after     x, sums, ..., addend, weight -> NormConv1x1 `bn` -> y, saved, ..., mask, z, sums of z

Likewise BatchNormPairApply becomes NormConv1x1Pair. z is computed from y while y is still in registers. y is written
because the next sum and the backward pass read it, too. The kernels are for 16-bit types and Hopper GPUs, without
stochastic depth. Weights too large for shared memory are streamed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches, require, require_hopper, rows_and_channels
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import Size, count
from graph_passes.executors.cuda.kernels.batch_norm import about_mean, convolutions_after, require_gamma, with_conv
from graph_passes.executors.cuda.kernels.batch_norm_pair import APPLIED, apply_body, both
from graph_passes.executors.cuda.kernels.conv1x1_forward import CHUNK, is_product
from graph_passes.executors.cuda.kernels.conv1x1_statistics import NORM_CONV, norm_body
from graph_passes.executors.cuda.kernels.norm_stream import WEIGHT_PLACES, NormStream
from graph_passes.executors.cuda.operands import In, InOut, Out, Tiled
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators import Operator
from graph_passes.operators.batch_norm import RUNNING
from graph_passes.operators.body import Body

_CUDA = Declarations("norm_conv1x1.cu")
_OPS = {"BatchNormAddReluApply": "NormConv1x1", "BatchNormPairApply": "NormConv1x1Pair"}


def norm_conv1x1(table: Candidates, norm: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for one of the BatchNorm halves."""
    for convolution in convolutions_after(table, norm, is_product):
        yield with_conv(_OPS[norm.op], norm, convolution)


def _pair_body(b: Body) -> list[Any]:
    outputs = apply_body(b)
    return [*outputs, *b.with_sums(b.conv(outputs[0], b["weight"]))]


class NormConv1x1(NormStream):
    """Geometry of `norm_conv1x1`, for a convolution from `channels` (C) to `others` (K). A block keeps all weights or
    streams them.
    """

    COLUMNS = (64, 128, 256)
    CONTROL_BYTES = _CUDA.sizeof("NormControl")

    @property
    def block(self) -> Size:
        return _CUDA.value(f"BLOCK<{self.columns}>"), 1, 1

    @property
    def places(self) -> int:
        return WEIGHT_PLACES if _CUDA.value(f"STREAMED<{self.columns}>") else self.chunks

    @property
    def weights(self) -> Tiling:
        return Tiling.of_matrix(self.others, self.channels, (self.columns, CHUNK))


def launch(builder: Builder, node: Node) -> None:
    require_gamma(node)
    require_hopper(builder, node)
    is_pair = node.op == "NormConv1x1Pair"
    x, addend = builder.input(node, "data"), builder.input(node, "data_2" if is_pair else "addend")
    y, z, sums = (builder.output(node, role) for role in ("output", "convolved", "sums"))
    (rows, channels), (_, filters) = (rows_and_channels(node, each) for each in (x, z))
    require(channels % CHUNK == 0, node, f"has {channels} channels: its kernel takes multiples of {CHUNK}")
    most = max(NormConv1x1.COLUMNS)
    require(filters <= most, node, f"is read by {filters} filters: its kernel takes {most} at most")
    geometry = NormConv1x1(channels, filters)
    require(geometry.stages >= 2, node, f"has {channels} channels: the weights do not fit into shared memory")

    def of_both(kind: type[In | Out | InOut], find: Callable[[Node, str], Buffer], role: str) -> list[In | Out | InOut]:
        return [kind(find(node, role)), kind(find(node, f"{role}_2")) if is_pair else In(None)]

    given = partial(of_both, In, builder.input)
    sums_of_both = given("sums")
    grid = geometry.grid(rows, builder.gpu.num_multiprocessors)
    builder.launch(node, "norm_conv1x1.cu", builder.kernel("norm_conv1x1", geometry.columns, is_pair), grid,
                   geometry.block, Tiled(In(x), geometry.read(rows, channels)),
                   Tiled(In(addend), geometry.read(rows, channels)),
                   Tiled(In(builder.input(node, "weight")), geometry.weights),
                   Tiled(Out(y, over=None if is_pair else x), geometry.written(rows, channels)),
                   Tiled(Out(z), geometry.written(rows, filters)), *sums_of_both,
                   *(about_mean(each.buffer) if each.buffer else ctypes.c_bool(False) for each in sums_of_both),
                   *given("gamma"), *given("beta"), Out(builder.output(node, "mask")),
                   *of_both(Out, builder.output, "saved"),
                   *(each for role in RUNNING for each in of_both(InOut, builder.input, role)),
                   ctypes.c_float(node["eps"]), ctypes.c_float(node["momentum"]), Out(sums),
                   builder.partials(3 * filters * grid[1]), builder.tickets, count(rows),
                   *map(ctypes.c_int, (filters, geometry.chunks, geometry.stages)), shared_bytes=geometry.shared_bytes,
                   flops=2 * rows * filters * channels)


_INPUTS = ("data", "sums", "gamma", "beta", *RUNNING)

OPERATORS = (
    Operator("NormConv1x1", (*_INPUTS, "addend", "weight"), attrs=NORM_CONV,
             outputs=("output", "saved", *RUNNING, "mask", "convolved", "sums"), aux=RUNNING,
             in_place={"output": ("data",)}, body=norm_body, forward="BatchNormAddRelu", fused=True),
    Operator("NormConv1x1Pair", (*both(*_INPUTS), "weight"), attrs=NORM_CONV, outputs=(*APPLIED, "convolved", "sums"),
             aux=both(*RUNNING), body=_pair_body, forward="BatchNormAddRelu", fused=True),
)
RULES = tuple((op, norm_conv1x1) for op in _OPS)
LAUNCHES: Launches = dict.fromkeys(_OPS.values(), launch)
