"""The last INT8 convolution of a residual block and the first INT8 convolution of the next block, in one launch.

    before    x, weight, multiplier, bias, shortcut -> QuantisedConvolution `r` -> y
              y, weight_2, multiplier_2, bias_2 -> QuantisedConvolution -> z
    after     x, weight, multiplier, bias, shortcut, weight_2, multiplier_2, bias_2 -> QuantisedPair `r` -> y, z

Both convolutions have ReLU. The kernel is for Hopper GPUs. Likewise a QuantisedConvStreamSum becomes a
QuantisedPairSum. y is written because the next sum reads it, too. z is computed from y while y is still in registers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches, require, require_hopper
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import Size, count, instance
from graph_passes.executors.cuda.kernels.conv1x1_forward import SHARED_BYTES, TEAMS, TILE_ROWS, Tiles
from graph_passes.executors.cuda.kernels.quantised import CHUNK, TILE_VECTOR, Geometry
from graph_passes.executors.cuda.kernels.quantised_conv_stream import (
    COLUMNS,
    STAGES,
    SUM_INPUTS,
    Stream,
    is_product,
    sum_body,
)
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.graph import Node
from graph_passes.operators import Operator, window
from graph_passes.operators.base import Attribute
from graph_passes.operators.body import Body
from graph_passes.operators.convolution import CONVOLUTION
from graph_passes.operators.quantised import SCALE, Scales, quantised_body

_CUDA = Declarations("quantised_pair.cu")
BLOCK: Size = (_CUDA.value("PAIR_THREADS"), 1, 1)
Z_COLUMNS = (64, 128)  # columns of the second product
PLACE_BYTES = TEAMS * TILE_ROWS * CHUNK  # bytes of one stage of each team, which equal one result of each warp
_OPS = {"QuantisedConvolution": "QuantisedPair", "QuantisedConvStreamSum": "QuantisedPairSum"}


def quantised_pair(table: Candidates, first: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a QuantisedConvolution or QuantisedConvStreamSum `first`."""
    if not _begins(first.node):
        return
    output = first.output("output")
    for second in table.readers(output, "QuantisedConvolution"):
        if second.input("data") == output and _is_rectified(second.node) and second["no_addend"]:
            inputs = (*first.node.inputs, *second.node.inputs[1:])
            yield first.node.derive(_OPS[first.op], first.node.name, inputs, num_filter_2=second["num_filter"],
                                    scale_2=second["scale"])


def _begins(first: Node) -> bool:
    if first.op == "QuantisedConvStreamSum":
        return bool(first["relu"])
    return _is_rectified(first) and not first["no_addend"]


def _is_rectified(node: Node) -> bool:
    return is_product(node) and bool(node["relu"])


def _body(b: Body) -> list[Any]:
    node, is_sum = b.node, b.has("data_2")
    y = sum_body(b, True) if is_sum else quantised_body(
        b, "", b["data"], Scales(node["scale"], node["addend_scale"]), b["addend"])
    z = quantised_body(b, "_3" if is_sum else "_2", y, Scales(node["scale_2"]), stride=(1, 1),
                       num_filter=node["num_filter_2"])
    return [y, z]


@dataclass(frozen=True)
class QuantisedPair:
    """How quantised_pair.cu divides its work: from `channels` (C), or with a shortcut also `channels_2` (C_2), to at
    most COLUMNS filters (K), and on to `filters_z` (K_Z). A block keeps all weights. The rest of its shared memory is
    used as in `Stream`."""

    channels: int
    filters_z: int
    channels_2: int = 0

    @property
    def columns_z(self) -> int:
        """Columns of the second product."""
        return next(columns for columns in Z_COLUMNS if columns >= self.filters_z)

    @property
    def of_y(self) -> Stream:
        return Stream(self.channels, TEAMS, COLUMNS, not self.channels_2, self.channels_2)

    @property
    def results(self) -> int:
        return COLUMNS // CHUNK if self.channels_2 else 3

    @property
    def stages(self) -> int:
        free = SHARED_BYTES - self.control_bytes - self._weight_bytes
        return min(STAGES, free // PLACE_BYTES - self.results - 1)  # one place is for z

    @property
    def control_bytes(self) -> int:
        return _CUDA.sizeof(f"PairControl<{self.columns_z}, {int(self.channels_2 > 0)}>")

    @property
    def shared_bytes(self) -> int:
        return self.control_bytes + self._weight_bytes + PLACE_BYTES * (self.stages + self.results + 1)

    @property
    def _weight_bytes(self) -> int:
        chunks = self.of_y.chunks + self.of_y.chunks_2
        return (chunks * COLUMNS + COLUMNS // CHUNK * self.columns_z) * CHUNK


def launch(builder: Builder, node: Node) -> None:
    """Launch the end of a block (a convolution with an addend, or the sum of two convolutions, the first of which may
    have a stride) and the first convolution of the next block."""
    is_sum = node.op == "QuantisedPairSum"
    x, weight, multiplier, bias = (builder.input(node, role) for role in ("data", "weight", "multiplier", "bias"))
    x_2, weight_2, multiplier_2, bias_2 = (
        builder.input(node, role) if is_sum else None for role in ("data_2", "weight_2", "multiplier_2", "bias_2"))
    last = 3 if is_sum else 2
    weight_z, multiplier_z, bias_z = (
        builder.input(node, f"{role}_{last}") for role in ("weight", "multiplier", "bias"))
    addend = None if is_sum else builder.input(node, "addend")
    y, z = builder.output(node), builder.output(node, "output_2")
    rows, channels, channels_2 = Geometry.of(node, x, y).rows, x.shape[3], x_2.shape[3] if x_2 else 0
    filters, filters_z = y.shape[3], z.shape[3]
    require_hopper(builder, node)
    require(filters <= COLUMNS and filters_z <= max(Z_COLUMNS), node,
            f"makes {filters} and {filters_z} channels: its kernel takes {COLUMNS} and {max(Z_COLUMNS)} at most")
    require(all(each % TILE_VECTOR == 0 for each in (channels, channels_2, filters, filters_z)), node,
            f"has channels that are not multiples of {TILE_VECTOR}")
    geometry = QuantisedPair(channels, filters_z, channels_2)
    require(geometry.stages >= 2, node, f"has {channels} channels: the weights do not fit into shared memory")
    tiles, tiles_z = (Tiles.of(x.shape, made.shape, window(node).stride, CHUNK) for made in (y, z))
    require(tiles is not None, node, f"has images of {x.shape[1]}x{x.shape[2]} pixels, which its kernel cannot divide")
    assert tiles and tiles_z
    blocks = min(builder.gpu.num_multiprocessors, -(-rows // (TEAMS * tiles.walk.rows)))
    builder.launch(
        node, "quantised_pair.cu", instance("quantised_pair", geometry.columns_z, is_sum), (1, blocks, 1), BLOCK,
        Tiled(In(x), tiles.data), Tiled(In(addend), tiles.output), Tiled(Out(y, over=addend), tiles.output),
        Tiled(Out(z), tiles_z.output), In(weight), In(multiplier), In(bias), In(weight_z), In(multiplier_z), In(bias_z),
        count(rows), tiles.walk, *map(ctypes.c_int, (channels, filters, filters_z)),
        ctypes.c_float(node["addend_scale"] / node["scale"]),
        *map(ctypes.c_int, (geometry.of_y.chunks, geometry.stages, geometry.results)),
        Tiled(In(x_2), tiles.beside(channels_2, CHUNK)), In(weight_2), In(multiplier_2), In(bias_2),
        *map(ctypes.c_int, (channels_2, geometry.of_y.chunks_2)), shared_bytes=geometry.shared_bytes,
        flops=2 * rows * filters * (channels + channels_2 + filters_z))


_FACTORS = ("weight", "multiplier", "bias")
_ATTRS = CONVOLUTION | {"dtype": Attribute(str, "int8"), "scale": SCALE, "addend_scale": SCALE,
                        "num_filter_2": Attribute(int), "scale_2": SCALE}

OPERATORS = (
    Operator("QuantisedPair", ("data", *_FACTORS, "addend", *(f"{name}_2" for name in _FACTORS)), attrs=_ATTRS,
             outputs=("output", "output_2"), body=_body, forward="Convolution", fused=True),
    Operator("QuantisedPairSum", (*SUM_INPUTS, *(f"{name}_3" for name in _FACTORS)), attrs=_ATTRS,
             outputs=("output", "output_2"), body=_body, forward="Convolution", fused=True),
)
RULES = tuple((op, quantised_pair) for op in _OPS)
LAUNCHES: Launches = dict.fromkeys(_OPS.values(), launch)
