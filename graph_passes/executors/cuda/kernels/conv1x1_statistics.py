"""1x1 convolutions of a training step with the output's sums for a BatchNorm, also fused with the preceding BatchNorm +
ReLU.

    before    x, weight -> Convolution `conv` -> y -> BatchNormStatistics -> sums
    after     x, weight -> Conv1x1Statistics `conv` -> y, sums

    before    x, sums, ... -> BatchNormReluApply `bn` -> y, saved, ...
              y, weight -> Convolution -> z -> BatchNormStatistics -> sums of z
    after     x, sums, ..., weight -> NormReluConv1x1 `bn` -> y, saved, ..., z, sums of z

Both kernels are for 16-bit types and Hopper GPUs. The sums are about a value near the mean, in a fixed order. z is
computed from y while y is still in registers. y may be left out (`no_output`) if the backward pass recomputes it.
Stochastic depth between BatchNorm and convolution is not supported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from graph_passes.candidates import Candidate, Candidates, form
from graph_passes.executors.cuda.builder import Builder, Launches, require, rows_and_channels
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import Size, count
from graph_passes.executors.cuda.kernels.batch_norm import before, convolutions_after, require_gamma, with_conv
from graph_passes.executors.cuda.kernels.conv1x1_forward import (
    CHUNK,
    PLACE_BYTES,
    TILE_ROWS,
    WARP_ROWS,
    Conv1x1Forward,
    affine_bytes,
    is_own,
    is_product,
    tiles_of,
)
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.graph import Node
from graph_passes.operators import Operator
from graph_passes.operators.base import FALSE
from graph_passes.operators.batch_norm import ATTRIBUTES, RUNNING
from graph_passes.operators.batch_norm_halves import apply_body
from graph_passes.operators.body import Body
from graph_passes.operators.convolution import CONVOLUTION


def norm_relu_conv1x1(table: Candidates, norm: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a BatchNormReluApply `norm`."""
    for convolution in convolutions_after(table, norm, is_product):
        fused = with_conv("NormReluConv1x1", norm, convolution)
        yield from (fused, fused.with_attrs(no_output=True))


def norm_body(b: Body) -> list[Any]:
    """The body: a BatchNorm's half with ReLU, and the convolution of its output with sums."""
    outputs = apply_body(b, relu=True)
    return [*outputs, *b.with_sums(b.conv(outputs[0], b["weight"]))]


@dataclass(frozen=True)
class Conv1x1Statistics(Conv1x1Forward):
    """Like `Conv1x1Forward`, for the kernels of conv1x1_statistics.cu, which also sum their output. `normalises`: the
    output of a preceding BatchNorm + ReLU is written, which needs one more slot per warp.

    Four more warps compute the sums, so a thread has registers for at most 128 columns.
    """

    BLOCK: ClassVar[Size] = (Declarations("conv1x1_statistics.cu").value("BLOCK"), 1, 1)
    COLUMNS: ClassVar[tuple[int, ...]] = (64, 128)

    normalises: bool = False

    @property
    def results(self) -> int:
        """Result slots of a warp: each result is both copied away and summed."""
        return 3

    @property
    def peers(self) -> int:
        """Number of blocks of a cluster. A cluster reads data from the L2 cache only once. On an H200 a cluster of two
        blocks pays if two blocks share the columns, but not if more blocks do.
        """
        return 2 if self.blocks == 2 else 1

    @property
    def _kept_bytes(self) -> int:
        return super()._kept_bytes + (affine_bytes(self.chunks) + PLACE_BYTES if self.normalises else 0)


def statistics(builder: Builder, node: Node) -> None:
    """Launch the convolution with the sums of its output."""
    x, w, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    (rows, filters), (_, channels) = rows_and_channels(node, y), rows_and_channels(node, x)
    geometry = Conv1x1Statistics(channels, filters)
    tiles = tiles_of(builder, node, geometry, y)
    grid = geometry.grid(-(-rows // tiles.walk.rows), builder.gpu.num_multiprocessors)
    builder.launch(node, "conv1x1_statistics.cu",
                   builder.kernel("conv1x1_statistics", geometry.columns, geometry.peers), grid, geometry.BLOCK,
                   Tiled(In(x), tiles.data), Tiled(In(w), geometry.weights), Tiled(Out(y), tiles.output),
                   Out(builder.output(node, "sums")), builder.partials(3 * filters * grid[1]), builder.tickets,
                   count(rows), tiles.walk,
                   *map(ctypes.c_int, (filters, geometry.chunks, geometry.stages, geometry.results)),
                   shared_bytes=geometry.shared_bytes, flops=2 * rows * filters * channels)


def norm_statistics(builder: Builder, node: Node) -> None:
    """Launch BatchNorm + ReLU, and the convolution of its output with the sums of that output."""
    require_gamma(node)
    x, w, z = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node, "convolved")
    (rows, filters), (_, channels) = rows_and_channels(node, z), rows_and_channels(node, x)
    require(channels % CHUNK == 0, node, f"has {channels} channels: its kernel takes multiples of {CHUNK}")
    geometry = Conv1x1Statistics(channels, filters, normalises=True)
    tiles = tiles_of(builder, node, geometry, z)
    require(geometry.stages >= 2, node, f"has {channels} channels: their weights leave no place in shared memory")
    grid = geometry.grid(-(-rows // TILE_ROWS), builder.gpu.num_multiprocessors)
    y = None if node["no_output"] else builder.output(node)
    builder.launch(node, "conv1x1_statistics.cu", builder.kernel("norm_relu_conv1x1", geometry.columns, geometry.peers),
                   grid, geometry.BLOCK, Tiled(In(x), tiles.data), Tiled(In(w), geometry.weights),
                   Tiled(Out(y), Tiling.of_matrix(rows, channels, (WARP_ROWS, CHUNK))), Tiled(Out(z), tiles.output),
                   ctypes.c_bool(y is not None), *before(builder, node), Out(builder.output(node, "sums")),
                   builder.partials(3 * filters * grid[1]), builder.tickets, count(rows), tiles.walk,
                   *map(ctypes.c_int, (filters, geometry.chunks, geometry.stages, geometry.results)),
                   shared_bytes=geometry.shared_bytes, flops=2 * rows * filters * channels)


NORM_CONV = CONVOLUTION | ATTRIBUTES | {"no_output": FALSE}

OPERATORS = (
    Operator("Conv1x1Statistics", ("data", "weight"), attrs=CONVOLUTION, outputs=("output", "sums"),
             form_of="ConvolutionStatistics", body=lambda b: b.with_sums(b.conv(b["data"], b["weight"])),
             forward="Convolution", fused=True),
    # Other blocks compute other columns from the same data, so the data must not be overwritten.
    Operator("NormReluConv1x1", ("data", "sums", "gamma", "beta", *RUNNING, "weight"), attrs=NORM_CONV,
             outputs=("output", "saved", *RUNNING, "convolved", "sums"), aux=RUNNING, body=norm_body,
             forward="BatchNormRelu", fused=True),
)
RULES = (("ConvolutionStatistics", form("Conv1x1Statistics", is_own)), ("BatchNormReluApply", norm_relu_conv1x1))
LAUNCHES: Launches = {"Conv1x1Statistics": statistics, "NormReluConv1x1": norm_statistics}
