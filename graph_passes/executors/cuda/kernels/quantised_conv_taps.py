"""INT8 3x3 and 1x1 convolutions of 64 channels or multiples of 128, on Hopper. The pixels of a tile stay in shared
memory for all taps and filters.

    before    x, weight, multiplier, bias -> QuantisedConvolution `y`
    after     x, weight, multiplier, bias -> QuantisedConvTaps `y`
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from graph_passes.candidates import form
from graph_passes.executors.cuda.builder import Builder, Launches, require
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import HOPPER, Size, instance
from graph_passes.executors.cuda.kernels.conv1x1_forward import SHARED_BYTES
from graph_passes.executors.cuda.kernels.quantised import Epilogue, require_tensor_cores
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.graph import Node
from graph_passes.operators import Operator, Shape, window
from graph_passes.operators.quantised import OPTIONAL_ADDEND, QUANTISED_CONVOLUTION, quantised_convolution_body

_CUDA = Declarations("quantised_conv_taps.cu")
FILTERS, PEERS = _CUDA.values("FILTERS", "PEERS")  # FILTERS: multiplied at once; PEERS: blocks of a cluster
# (window size, stride) -> choices for the number of pixels that are multiplied at once, in units of 8 pixels.
EIGHTS = {(3, 1): (26, 28, 30), (3, 2): (14, 26, 28, 30), (1, 1): (24, 26, 28, 30, 32)}
CHANNELS = (64, 128)  # channels of a part
MAX_PLACES, MAX_STAGES, MAX_RESULTS = _CUDA.values("MAX_PLACES", "MAX_STAGES", "MAX_RESULTS")
CONTROL_BYTES = _CUDA.sizeof("Control")
FEW_STAGES = 6  # least number of stages if weights are streamed; further stages use the remaining memory
L2_BYTES = 20  # bytes per clock that a multiprocessor gets from the L2 cache if all multiprocessors read
END_CLOCKS = 80  # clocks in which a team requantises 8 pixels of 64 filters and stores them
MAX_TILE = 256  # largest side of a tile in pixels for TMA


class TappedImages(ctypes.Structure):
    """`TappedImages` of kernels/quantised_conv_taps.cu."""

    _fields_ = _CUDA.fields("TappedImages")


@dataclass(frozen=True)
class QuantisedConvTaps:
    """Images (N, H, W, C) divided into tiles. A tile has `rows` rows of the results of several images and multiplies 8
    * `eights` pixels; a block computes `groups` groups of 64 of the `filters`. `size`, `stride`: size and stride of the
    windows.
    """

    BLOCK: ClassVar[Size] = (_CUDA.value("THREADS"), 1, 1)

    shape: Shape
    filters: int
    size: int
    stride: int
    adds: bool
    eights: int
    rows: int
    groups: int
    results: int  # result slots, each for the pixels of a tile and 64 filters

    @classmethod
    @cache
    def of(cls, shape: Shape, filters: int, size: int, stride: int, adds: bool,
           num_multiprocessors: int) -> QuantisedConvTaps | None:
        """The division with the lowest estimated time. None for windows and channels that the kernel does not support,
        if no division fits into a block, or if the clusters for all filters do not fit on the GPU."""
        few, many = CHANNELS
        if ((size, stride) not in EIGHTS or (shape[3] != few and shape[3] % many) or shape[1] % stride
                or shape[2] % stride):
            return None
        if size == 1:  # for 1x1 it does not matter which pixels are neighbours
            shape = (1, shape[0] * shape[1] * shape[2], 1, shape[3])
        return min((geometry for geometry in cls._all(shape, filters, size, stride, adds)
                    if geometry.fits and geometry.grid(num_multiprocessors)[2] <= max(1, num_multiprocessors // PEERS)),
                   default=None,
                   key=lambda geometry: (geometry.clocks(num_multiprocessors), -geometry.groups, -geometry.rows,
                                         geometry.results))

    @classmethod
    def _all(cls, shape: Shape, filters: int, size: int, stride: int, adds: bool) -> Iterator[QuantisedConvTaps]:
        groups = -(-filters // FILTERS)
        for eights in EIGHTS[size, stride]:
            most = min(shape[1] // stride, 8 * eights // (shape[2] // stride + size // 2))
            for rows in range(1 if size > 1 else most, most + 1):
                for of_block in {-(-groups // blocks) for blocks in range(1, groups + 1)}:
                    for results in (MAX_RESULTS, 2) if adds else (1, 2):
                        yield cls(shape, filters, size, stride, adds, eights, rows, of_block, results)

    @property
    def channels(self) -> int:
        """Channels of a part."""
        return min(self.shape[3], max(CHANNELS))

    @property
    def parts(self) -> int:
        """Parts of a tile's data."""
        return self.shape[3] // self.channels * self.stride**2

    @property
    def pad(self) -> int:
        return self.size // 2

    @property
    def more(self) -> int:
        """Rows of a part in addition to the rows of its results."""
        return 2 * self.pad if self.stride == 1 else 1

    @property
    def pitch(self) -> int:
        """Pixels of a row in shared memory, including one pixel of zeros on the left."""
        return self.shape[2] // self.stride + self.pad

    @property
    def together(self) -> int:
        """Images in a tile."""
        return min(self.shape[0], MAX_TILE, 8 * self.eights // (self.rows * self.pitch))

    @property
    def part_bytes(self) -> int:
        """Bytes of a part of a tile in shared memory: all pixels up to the last pixel that the last tap reads, and at
        least one pixel more than TMA copies.
        """
        line = self.together * self.pitch
        pixels = max((self.rows + self.more) * line + self.pad, self.more * (line + 1) + 8 * self.eights)
        return -(-pixels * self.channels // 1024) * 1024

    @property
    def chunks(self) -> int:
        """Chunks in the weights of 64 filters."""
        return self.size**2 * self.shape[3] // self.channels

    @property
    def stages(self) -> int:
        """Stages for weights: all weights of a block, if two tiles still fit."""
        if self._weights_stay:
            return self.groups * self.chunks
        return min(MAX_STAGES, (self._free_bytes - self.places * self.part_bytes) // self._stage_bytes)

    @property
    def places(self) -> int:
        """Slots for parts of tiles."""
        if self._weights_stay:
            return min(MAX_PLACES, (self._free_bytes - self.stages * self._stage_bytes) // self.part_bytes)
        return min(MAX_PLACES, 2 * self.parts, (self._free_bytes - FEW_STAGES * self._stage_bytes) // self.part_bytes)

    @property
    def fits(self) -> bool:
        return (self.places >= self.parts and (self._weights_stay or self.stages >= 2)
                and max(self.pitch, self.rows + self.more) <= MAX_TILE)

    @property
    def shared_bytes(self) -> int:
        return SHARED_BYTES - self._free_bytes + self.stages * self._stage_bytes + self.places * self.part_bytes

    @property
    def _stage_bytes(self) -> int:
        return FILTERS * self.channels

    @property
    def _free_bytes(self) -> int:
        """Bytes of shared memory for weights and tiles."""
        return SHARED_BYTES - CONTROL_BYTES - self.results * -(-self.eights // 4) * 32 * FILTERS

    @property
    def _weights_stay(self) -> bool:
        all_chunks = self.groups * self.chunks
        return (all_chunks <= MAX_STAGES and
                all_chunks * self._stage_bytes + 2 * self.parts * self.part_bytes <= self._free_bytes)

    def grid(self, num_multiprocessors: int) -> Size:
        across = -(-self.filters // (FILTERS * self.groups))
        return PEERS, max(1, min(num_multiprocessors // PEERS // across, self._pairs)), across

    def clocks(self, num_multiprocessors: int) -> float:
        """The estimated time in clocks. The tensor cores wait for data that the L2 cache cannot deliver in time, and
        for free result slots. With an addend, a slot is in use four times as long, because the addend's copy starts
        early.
        """
        tile_bytes = (self.rows + self.more) * self.together * self.pitch * self.channels * self.parts
        other_bytes = 0 if self._weights_stay else self.groups * self.chunks * self._stage_bytes // PEERS
        if self.adds:
            other_bytes += self.groups * FILTERS * 8 * self.eights
        multiplying, ending = self.chunks * self.channels // 32 * self.eights * 4, END_CLOCKS * self.eights
        of_group = max(multiplying, (multiplying + ending) / 2, ending * (4 if self.adds else 1) / self.results)
        # Share of the next tile's parts that must wait until the last group frees their slots.
        late = max(0, 2 * self.parts - self.places) / self.parts
        waits = max(0, late * (tile_bytes / L2_BYTES - of_group))
        rounds = -(-self._pairs // self.grid(num_multiprocessors)[1])
        return (rounds * max(self.groups * of_group + waits, (tile_bytes + other_bytes) / L2_BYTES)
                + tile_bytes / self.parts / L2_BYTES)

    @property
    def _pairs(self) -> int:
        """Pairs of tiles; each block of a cluster computes one tile of a pair."""
        tiles = -(-(self.shape[1] // self.stride) // self.rows) * -(-self.shape[0] // self.together)
        return -(-tiles // PEERS)

    @property
    def images(self) -> TappedImages:
        images, height, width = (self.shape[0], *(size // self.stride for size in self.shape[1:3]))
        return TappedImages(images, height, width, self.pad, self.rows, self.more, self.together, self.parts,
                            self.places, self.part_bytes // 16, self.stages, self.results, self.groups,
                            -(-self.filters // FILTERS))

    @property
    def data(self) -> Tiling:
        """The TMA view of the data: rows and columns by their remainders. With stride 2, odd rows follow the even ones,
        and odd columns become additional channels."""
        (images, height, width, channels), stride = self.shape, self.stride
        row = width * channels
        return Tiling((stride, height // stride, images, width // stride, stride * channels),
                      (row, stride * row, height * row, stride * channels),
                      (1, self.rows + self.more, self.together, self.pitch, self.channels))

    @property
    def output(self) -> Tiling:
        images, height, width = (self.shape[0], *(size // self.stride for size in self.shape[1:3]))
        row = width * self.filters
        return Tiling((height, images, width, self.filters), (row, height * row, self.filters),
                      (self.rows, self.together, self.pitch, FILTERS))

    @property
    def weights(self) -> Tiling:
        """The TMA view of the weights: in each group of sixteen filters, even filters precede odd filters."""
        length = self.size**2 * self.shape[3]
        return Tiling((self.filters // 16, 2, 8, length), (16 * length, length, 2 * length),
                      (FILTERS // PEERS // 16, 2, 8, self.channels))


def launch(builder: Builder, node: Node) -> None:
    x, weight, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    addend, (adds, relu, share) = builder.optional_input(node, "addend", "no_addend"), Epilogue.of(node)
    filters, sms = y.shape[3], builder.gpu.num_multiprocessors
    size, stride = window(node).kernel[0], window(node).stride[0]
    is_plain = window(node) == ((size, size), (stride, stride), (size // 2, size // 2), (1, 1)) and y.dtype == "int8"
    require_tensor_cores(builder, node, columns=FILTERS)
    geometry = QuantisedConvTaps.of(x.shape, filters, size, stride, adds, sms) if is_plain else None
    require(builder.gpu.capability == HOPPER and geometry is not None, node, "is not for the kernel of taps")
    assert geometry
    builder.launch(
        node, "quantised_conv_taps.cu",
        instance("quantised_conv_taps", size, stride, geometry.channels, geometry.eights, adds, relu),
        geometry.grid(sms), geometry.BLOCK, Tiled(In(x), geometry.data), Tiled(In(weight), geometry.weights),
        Tiled(In(addend), geometry.output), Tiled(Out(y, over=addend), geometry.output),
        In(builder.input(node, "multiplier")), In(builder.input(node, "bias")), geometry.images, ctypes.c_int(filters),
        share, shared_bytes=geometry.shared_bytes, flops=builder.problem("fprop", node, x, weight, y).flops)


OPERATORS = (
    Operator("QuantisedConvTaps", ("data", "weight", "multiplier", "bias", "addend"), attrs=QUANTISED_CONVOLUTION,
             optional=OPTIONAL_ADDEND, form_of="QuantisedConvolution", body=quantised_convolution_body,
             forward="Convolution", fused=True),
)
RULES = (("QuantisedConvolution", form("QuantisedConvTaps")),)
LAUNCHES: Launches = {"QuantisedConvTaps": launch}
