"""Convolutions in INT8 on tensor cores, with any window. A block computes a tile of the output's rows and filters.

    before    x, weight, multiplier, bias -> QuantisedConvolution `y`
    after     x, weight, multiplier, bias -> QuantisedConv `y` (tile="2x128")

Both give the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches, require
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import instance
from graph_passes.executors.cuda.kernels.quantised import CHUNK, Epilogue, Geometry, require_tensor_cores
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.graph import Node
from graph_passes.operators import Operator, window
from graph_passes.operators.base import Attribute
from graph_passes.operators.quantised import OPTIONAL_ADDEND, QUANTISED_CONVOLUTION, quantised_convolution_body

_CUDA = Declarations("quantised_conv.cu")
# Tile of a block by name: rows / 64, and columns.
TILES = {f"{groups}x{columns}": (groups, columns)
         for groups, columns in ((2, 128), (2, 64), (4, 128), (2, 256), (1, 128))}
TILE = {"tile": Attribute(str)}
TILE_CHANNELS = (16, 32, 64)  # numbers of channels that the kernel supports besides multiples of CHUNK


def quantised_conv(table: Candidates, convolution: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a QuantisedConvolution `convolution`."""
    for tile in TILES:
        yield convolution.node.derive("QuantisedConv", convolution.node.name, convolution.node.inputs, tile=tile)


def launch(builder: Builder, node: Node) -> None:
    groups, columns = TILES[node["tile"]]
    x, weight, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    geometry, (adds, relu, share), size = Geometry.of(node, x, y), Epilogue.of(node), window(node)
    channels = x.shape[3]
    require_tensor_cores(builder, node, columns)
    require(channels % CHUNK == 0 or channels in TILE_CHANNELS, node, "is not for the kernel of tiles")
    is_plain = size.kernel == size.stride == (1, 1) and size.pad == (0, 0)
    chunks = -(-size.kernel[0] * size.kernel[1] * channels // CHUNK)
    tile = f"Tile<{groups}, {columns}>"
    rows, threads, stages = _CUDA.values(f"{tile}::ROWS", f"{tile}::THREADS", f"{tile}::STAGES")
    shared_bytes = min(stages, chunks) * _CUDA.sizeof(f"Stage<{tile}>")
    require(shared_bytes <= builder.gpu.max_shared_bytes, node, "has no room for these tiles")
    blocks = -(-geometry.rows // rows) * -(-y.shape[3] // columns)
    builder.launch(
        node, "quantised_conv.cu",
        instance("quantised_conv", y.dtype, groups, columns, is_plain, adds, relu),
        (blocks, 1, 1), (threads, 1, 1), In(x), In(weight), In(builder.input(node, "multiplier")),
        In(builder.input(node, "bias")), In(builder.optional_input(node, "addend", "no_addend")), Out(y), geometry,
        share, ctypes.c_int(chunks), shared_bytes=shared_bytes,
        flops=builder.problem("fprop", node, x, weight, y).flops)


OPERATORS = (
    Operator("QuantisedConv", ("data", "weight", "multiplier", "bias", "addend"), attrs=QUANTISED_CONVOLUTION | TILE,
             optional=OPTIONAL_ADDEND, form_of="QuantisedConvolution", body=quantised_convolution_body,
             forward="Convolution", fused=True),
)
RULES = (("QuantisedConvolution", quantised_conv),)
LAUNCHES: Launches = {"QuantisedConv": launch}
