"""INT8 1x1 convolutions that are bound by memory, on Hopper: blocks keep weights and walk over the rows. Optionally
fused with the convolution of a projection shortcut.

    before    x, weight, multiplier, bias -> QuantisedConvolution `y`
    after     x, weight, multiplier, bias -> QuantisedConvStream `y` (tile="2x128")

    before    x, weight, multiplier, bias -> QuantisedConvolution -> s
              y, weight_2, multiplier_2, bias_2, s -> QuantisedConvolution `r`
    after     x, weight, multiplier, bias, y, weight_2, multiplier_2, bias_2 -> QuantisedConvStreamSum `r`

s has the same integers, but is neither written nor read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches, require
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import HOPPER, count, instance
from graph_passes.executors.cuda.kernels.conv1x1_forward import TILE_ROWS, Tiles
from graph_passes.executors.cuda.kernels.quantised import (
    CHUNK,
    RESERVED_BYTES,
    TILE_VECTOR,
    Epilogue,
    Geometry,
    require_tensor_cores,
)
from graph_passes.executors.cuda.kernels.quantised_conv import TILE
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.graph import Node
from graph_passes.operators import Operator, window
from graph_passes.operators.body import Body
from graph_passes.operators.quantised import (
    OPTIONAL_ADDEND,
    QUANTISED_CONVOLUTION,
    Scales,
    quantised_body,
    quantised_convolution_body,
)

# Teams of a block, and the columns that it computes.
TILES = {f"{teams}x{columns}": (teams, columns) for teams, columns in ((2, 128), (2, 256), (4, 128))}
STRIDES = ((1, 1), (2, 2))  # strides of the shortcut
_CUDA = Declarations("quantised_conv_stream.cu")
STAGES, COLUMNS = _CUDA.values("MAX_STAGES", "MAX_COLUMNS")
MULTIPROCESSOR_SHARED_BYTES = 228 << 10  # shared memory of a multiprocessor of Hopper GPUs


def quantised_conv_stream(table: Candidates, convolution: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a QuantisedConvolution `convolution`."""
    for tile in TILES:
        yield convolution.node.derive("QuantisedConvStream", convolution.node.name, convolution.node.inputs, tile=tile)


def sum_of_two(table: Candidates, last: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a QuantisedConvolution `last` that adds another convolution."""
    if last["no_addend"] or not is_product(last.node):
        return
    for shortcut in table.makers(last.input("addend"), "QuantisedConvolution"):
        if _is_shortcut(shortcut.node):
            inputs = (*shortcut.node.inputs, *last.node.inputs[:4])
            for tile in TILES:
                yield shortcut.node.derive("QuantisedConvStreamSum", last.node.name, inputs, scale=last["scale"],
                                           addend_scale=last["addend_scale"], relu=last["relu"], tile=tile)


def _is_shortcut(node: Node) -> bool:
    return bool(any(is_product(node, stride) for stride in STRIDES) and node["no_addend"] and not node["relu"])


def is_product(node: Node, stride: tuple[int, int] = (1, 1)) -> bool:
    """Whether the node is a convolution from int8 to int8 that is a matrix product."""
    return (node.op == "QuantisedConvolution" and window(node) == ((1, 1), stride, (0, 0), (1, 1))
            and node["layout"] == "NHWC" and node["num_group"] == 1 and node["dtype"] == "int8")


def sum_body(b: Body, relu: bool) -> Any:
    """The body: the sum of two convolutions, optionally with ReLU."""
    node = b.node
    shortcut = quantised_body(b, "", b["data"], Scales(node["addend_scale"], relu=False))
    return quantised_body(b, "_2", b["data_2"], Scales(node["scale"], node["addend_scale"], relu), shortcut,
                          stride=(1, 1))


@dataclass(frozen=True)
class Stream:
    """How quantised_conv_stream.cu divides its shared memory, for `channels` (C) and `channels_2` (C_2) of a second
    convolution. A block has `teams` teams and computes `columns` columns. A multiprocessor has room for two teams with
    256 columns, or four teams with 128 columns, in one or more blocks, unless the weights leave too little room.
    """

    channels: int
    teams: int
    columns: int
    adds: bool
    channels_2: int = 0

    @property
    def chunks(self) -> int:
        return -(-self.channels // CHUNK)

    @property
    def chunks_2(self) -> int:
        return -(-self.channels_2 // CHUNK)

    @property
    def blocks(self) -> int:
        """Blocks per multiprocessor."""
        most = 2 * COLUMNS // (self.teams * self.columns)
        return most if self._places(most) >= 2 + (2 if self.adds else 1) else 1

    @property
    def results(self) -> int:
        """Result slots of a warp, fewer slots if the stages need the room. For one convolution the number is that of
        `Conv1x1Forward.results`. For two convolutions each part of the result has a slot, because results can be copied
        away between the two products.
        """
        most = self.columns // CHUNK if self.channels_2 else 3 if self.adds else 2
        return max(2 if self.adds else 1, min(most, self._places(self.blocks) - 2))

    @property
    def stages(self) -> int:
        """Stages of a team; fewer than the necessary two if the weights leave too little room."""
        return min(STAGES, self._places(self.blocks) - self.results)

    @property
    def control_bytes(self) -> int:
        return _CUDA.sizeof(f"Control<{self.teams}, {self.columns}, {2 if self.channels_2 else 1}>")

    @property
    def shared_bytes(self) -> int:
        return self._kept_bytes + self.teams * TILE_ROWS * CHUNK * (self.stages + self.results)

    def _places(self, blocks: int) -> int:
        """Room for stages and results together: one stage of each team is as large as one result of each warp."""
        free = MULTIPROCESSOR_SHARED_BYTES // blocks - RESERVED_BYTES - self._kept_bytes
        return free // (self.teams * TILE_ROWS * CHUNK)

    @property
    def _kept_bytes(self) -> int:
        return self.control_bytes + (self.chunks + self.chunks_2) * self.columns * CHUNK


def launch(builder: Builder, node: Node) -> None:
    """Launch a convolution, or the sum of two."""
    teams, columns = TILES[node["tile"]]
    x, weight, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    is_sum = node.op == "QuantisedConvStreamSum"
    addend = None if is_sum else builder.optional_input(node, "addend", "no_addend")
    x_2, weight_2, multiplier_2, bias_2 = (
        builder.input(node, role) if is_sum else None for role in ("data_2", "weight_2", "multiplier_2", "bias_2"))
    geometry, (adds, relu, share), size = Geometry.of(node, x, y), Epilogue.of(node), window(node)
    channels, channels_2, filters = x.shape[3], x_2.shape[3] if x_2 else 0, y.shape[3]
    require_tensor_cores(builder, node, columns)
    stream, tiles = Stream(channels, teams, columns, adds, channels_2), Tiles.of(x.shape, y.shape, size.stride, CHUNK)
    require(builder.gpu.capability == HOPPER and size.kernel == (1, 1) and size.pad == (0, 0) and tiles is not None
            and channels % TILE_VECTOR == channels_2 % TILE_VECTOR == 0 and y.dtype == "int8" and stream.stages >= 2,
            node, "is not for the kernel that streams")
    assert tiles
    across, of_teams = -(-filters // columns), -(-geometry.rows // (tiles.walk.rows * teams))
    down = max(1, min(stream.blocks * builder.gpu.num_multiprocessors // across, of_teams))
    builder.launch(
        node, "quantised_conv_stream.cu", instance("quantised_conv_stream", teams, columns, adds, relu, is_sum),
        (across, down, 1), (_CUDA.value(f"THREADS<{teams}>"), 1, 1), Tiled(In(x), tiles.data),
        Tiled(In(addend), tiles.output), Tiled(Out(y, over=addend), tiles.output), In(weight),
        In(builder.input(node, "multiplier")), In(builder.input(node, "bias")), count(geometry.rows), tiles.walk,
        *map(ctypes.c_int, (channels, filters)),
        share, *map(ctypes.c_int, (stream.chunks, stream.stages, stream.results)),
        Tiled(In(x_2), tiles.beside(channels_2, CHUNK)), In(weight_2), In(multiplier_2), In(bias_2),
        *map(ctypes.c_int, (channels_2, stream.chunks_2)),
        shared_bytes=stream.shared_bytes, flops=2 * geometry.rows * filters * (channels + channels_2))


_INPUTS = ("data", "weight", "multiplier", "bias")
SUM_INPUTS = (*_INPUTS, *(f"{name}_2" for name in _INPUTS))

OPERATORS = (
    Operator("QuantisedConvStream", (*_INPUTS, "addend"), attrs=QUANTISED_CONVOLUTION | TILE, optional=OPTIONAL_ADDEND,
             form_of="QuantisedConvolution", body=quantised_convolution_body, forward="Convolution", fused=True),
    # A convolution of `data_2` with stride 1, plus another convolution, whose scale is `addend_scale`.
    Operator("QuantisedConvStreamSum", SUM_INPUTS, attrs=QUANTISED_CONVOLUTION | TILE,
             body=lambda b: [sum_body(b, b.node["relu"])], forward="Convolution", fused=True),
)
RULES = (("QuantisedConvolution", quantised_conv_stream), ("QuantisedConvolution", sum_of_two))
LAUNCHES: Launches = {"QuantisedConvStream": launch, "QuantisedConvStreamSum": launch}
