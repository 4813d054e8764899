"""INT8: convolutions with requantisation, shortcut and ReLU in them, and what stands between them.

The kernels give the integers that `graph_passes/operators/quantised.py` says, to the bit.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

from graph_passes.executors.cuda.builder import Builder, Launches, require
from graph_passes.executors.cuda.kernel_library import HOPPER, count, instance, threads
from graph_passes.executors.cuda.kernels.conv1x1_forward import TILE_ROWS, Tiles
from graph_passes.executors.cuda.kernels.pooling import Window
from graph_passes.executors.cuda.kernels.quantised_taps import FILTERS as TAPS_FILTERS
from graph_passes.executors.cuda.kernels.quantised_taps import QuantisedTaps
from graph_passes.executors.cuda.operands import In, Out, Tiled
from graph_passes.executors.cuda.parameters import VECTOR, padded
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators import window
from graph_passes.operators.quantised import SQUARE_CHANNELS, squares
from graph_passes.passes.quantised_stem_pool import WINDOW
from graph_passes.passes.quantised_way import SQUARES, STREAMS, TAPS, TILES
from graph_passes.passes.stem import FILTERS

TILE_VECTOR = 16  # VECTOR of quantised_conv.cu: channels
CHUNK = 128  # bytes of a reduction that it multiplies at once
SQUARES_ROWS, SQUARES_STAGES, SQUARES_BLOCKS = 128, 3, 3  # of quantised_conv_squares.cu; blocks on a multiprocessor
SQUARES_COLUMNS = {64: 64, 128: 128}  # of a block for 3x3 over so many channels, which that kernel takes too; else 64
STREAM_STAGES, STREAM_COLUMNS = 12, 256  # of quantised_conv_stream.cu, at most
TEAM_THREADS = 160  # four warps that multiply, one that starts copies
STREAM_FACTOR_BYTES, STREAM_BARRIER_BYTES = 12, 288  # of its Control: of each filter, and of each team
STEM_TEAMS, STEM_BLOCK, STEM_WIDTH, STEM_SHARED_BYTES = 3, (384, 1, 1), 112, 88_608  # of quantised_stem_pool.cu
MULTIPROCESSOR_SHARED_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10  # Hopper's; what is not asked for, of each block
TILE_CHANNELS = (16, 32, 64)  # that it takes beside multiples of CHUNK


class PooledSizes(ctypes.Structure):
    """`PooledSizes` of quantised_stem_pool.cu."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("images", "out_height", "out_width", "pooled_height",
                                                       "pooled_width"))


class Geometry(ctypes.Structure):
    """`Convolution` of quantised.cuh."""

    _fields_ = (("rows", ctypes.c_uint32), *((name, ctypes.c_int) for name in (
        "height", "width", "channels", "out_height", "out_width", "filters", "kernel_h", "kernel_w", "stride_h",
        "stride_w", "pad_h", "pad_w", "dilate_h", "dilate_w")))

    @classmethod
    def of(cls, node: Node, x: Buffer, y: Buffer) -> Geometry:
        """Of a convolution from `x` to `y`, both NHWC."""
        images, out_height, out_width, filters = y.shape
        size = window(node)
        return cls(images * out_height * out_width, *x.shape[1:4], out_height, out_width, filters, *size.kernel,
                   *size.stride, *size.pad, *size.dilate)


class _Epilogue(NamedTuple):
    """What is done with the sums of a convolution."""

    adds: bool
    relu: bool
    share: ctypes.c_float  # of the addend

    @classmethod
    def of(cls, node: Node) -> _Epilogue:
        return cls(not node.get("no_addend", True), node["relu"], ctypes.c_float(node["addend_scale"] / node["scale"]))


def quantise(builder: Builder, node: Node) -> None:
    """Floats become int8; of images also the channel that pads them."""
    x = builder.input(node, "data")
    y = builder.output(node, shape=x.shape)
    require(x.shape[-1] % 4 == 0, node, f"has {x.shape[-1]} channels: use a multiple of 4")
    vectors = _vectors(node, y)
    builder.launch(node, "quantised.cu", builder.kernel("quantise"), *threads(vectors), In(x), Out(y),
                   ctypes.c_float(1 / node["scale"]), count(vectors))


def quantise_squares(builder: Builder, node: Node) -> None:
    """Images become int8, in squares of 2x2 pixels."""
    x, y = builder.input(node, "data"), builder.output(node)
    require(4 * x.shape[3] == SQUARE_CHANNELS, node, f"has images with {x.shape[3]} channels: give 3 or 4")
    number = y.num_bytes // SQUARE_CHANNELS
    before = (squares(*of).before for of in zip(node["kernel"], node["pad"], strict=True))
    builder.launch(node, "quantised.cu", builder.kernel("quantise_squares"), *threads(number), In(x), Out(y),
                   ctypes.c_float(1 / node["scale"]), count(number),
                   *map(ctypes.c_int, (*x.shape[1:3], *y.shape[1:3], *before)))


def dequantise(builder: Builder, node: Node) -> None:
    """int8 becomes what it stands for."""
    x = builder.input(node, "data")
    y = builder.output(node, shape=x.shape)
    vectors = _vectors(node, x)
    builder.launch(node, "quantised.cu", builder.kernel("dequantise"), *threads(vectors), In(x), Out(y),
                   ctypes.c_float(node["data_scale"]), count(vectors))


def _vectors(node: Node, integers: Buffer) -> int:
    """Of all values, as many as a thread works on at once each."""
    require(integers.num_bytes % VECTOR == 0, node, f"has the shape {integers.shape}, and works on {VECTOR} values at "
            f"once: use a multiple of {VECTOR} of them")
    return integers.num_bytes // VECTOR


def convolution(builder: Builder, node: Node) -> None:
    """By the kernel that `passes/quantised_way.py` has chosen, or the one for all shapes."""
    way = node["way"]
    if way in TILES:
        _tiles(builder, node, *TILES[way])
    elif way in STREAMS:
        _stream(builder, node, *STREAMS[way])
    elif way == TAPS:
        _taps(builder, node)
    elif way == SQUARES:
        _squares(builder, node)
    else:
        _direct(builder, node)


def stages_of(groups: int, columns: int) -> int:
    """STAGES of quantised_conv.cu: chunks that have a place in shared memory."""
    return 3 if groups * columns <= 256 else 4


def _tiles(builder: Builder, node: Node, groups: int, columns: int) -> None:
    """On tensor cores; a block makes 64 * groups rows of so many columns."""
    x, weight, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    geometry, (adds, relu, share), size = Geometry.of(node, x, y), _Epilogue.of(node), window(node)
    channels = x.shape[3]
    _require_tensor_cores(builder, node, columns)
    require(channels % CHUNK == 0 or channels in TILE_CHANNELS, node, "is not for the kernel of tiles")
    is_plain = size.kernel == size.stride == (1, 1) and size.pad == (0, 0)
    chunks = -(-size.kernel[0] * size.kernel[1] * channels // CHUNK)
    rows = 64 * groups
    shared_bytes = min(stages_of(groups, columns), chunks) * (rows + columns) * CHUNK
    require(shared_bytes <= builder.gpu.max_shared_bytes, node, "has no room for these tiles")
    blocks = -(-geometry.rows // rows) * -(-y.shape[3] // columns)
    builder.launch(
        node, "quantised_conv.cu",
        instance("quantised_conv", y.dtype, groups, columns, is_plain, adds, relu),
        (blocks, 1, 1), (128 * groups, 1, 1), In(x), In(weight), In(builder.input(node, "multiplier")),
        In(builder.input(node, "bias")), In(builder.optional_input(node, "addend", "no_addend")), Out(y), geometry,
        share, ctypes.c_int(chunks), shared_bytes=shared_bytes,
        flops=builder.problem("fprop", node, x, weight, y).flops)


def _taps(builder: Builder, node: Node) -> None:
    """3x3 or 1x1 on Hopper; pixels of a tile stay in shared memory for all taps and filters."""
    x, weight, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    addend, (adds, relu, share) = builder.optional_input(node, "addend", "no_addend"), _Epilogue.of(node)
    filters, sms = y.shape[3], builder.gpu.num_multiprocessors
    size, stride = window(node).kernel[0], window(node).stride[0]
    is_plain = window(node) == ((size, size), (stride, stride), (size // 2, size // 2), (1, 1)) and y.dtype == "int8"
    _require_tensor_cores(builder, node, columns=TAPS_FILTERS)
    way = QuantisedTaps.of(x.shape, filters, size, stride, adds, sms) if is_plain else None
    require(builder.gpu.capability == HOPPER and way is not None, node, "is not for the kernel of taps")
    assert way
    builder.launch(
        node, "quantised_conv_taps.cu",
        instance("quantised_conv_taps", size, stride, way.channels, way.eights, adds, relu), way.grid(sms), way.BLOCK,
        Tiled(In(x), way.data), Tiled(In(weight), way.weights), Tiled(In(addend), way.output),
        Tiled(Out(y, over=addend), way.output), In(builder.input(node, "multiplier")), In(builder.input(node, "bias")),
        way.images, ctypes.c_int(filters), share, shared_bytes=way.shared_bytes,
        flops=builder.problem("fprop", node, x, weight, y).flops)


def _squares(builder: Builder, node: Node) -> None:
    """Windows that overlap in shared memory, on Hopper; blocks walk over the places."""
    x, weight, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    size, (adds, relu, _), filters = window(node), _Epilogue.of(node), y.shape[3]
    images, height, width, channels = x.shape
    kernel, pad, planes = size.kernel[0], size.pad[0], channels // SQUARE_CHANNELS
    is_plain = size == ((kernel, kernel), (1, 1), (pad, pad), (1, 1)) and not adds
    is_squares = channels == SQUARE_CHANNELS and kernel % 2 == 0 and pad == 0
    has_few_channels = channels in SQUARES_COLUMNS and kernel == 3
    require(builder.gpu.capability == HOPPER and is_plain and (is_squares or has_few_channels), node,
            "is not for the kernel of squares")
    columns = SQUARES_COLUMNS.get(channels, 64)
    _require_tensor_cores(builder, node, columns)
    on_multiprocessor = SQUARES_BLOCKS if columns == 64 else 1
    height, width = height + 2 * pad, width + 2 * pad
    places, patch = images * height * width, SQUARES_ROWS + (kernel - 1) * width + kernel
    patch += (8 // planes - patch) % 8  # eight copies, of all planes, are then in all banks of shared memory
    stages = SQUARES_STAGES if planes == 1 else SQUARES_STAGES - 1
    shared_bytes = -(-kernel**2 * planes // 8) * columns * CHUNK + stages * patch * channels
    require(shared_bytes <= builder.gpu.max_shared_bytes // on_multiprocessor - RESERVED_BYTES, node,
            "has too wide images for the kernel of squares")
    blocks = min(-(-places // SQUARES_ROWS), on_multiprocessor * builder.gpu.num_multiprocessors)
    builder.launch(
        node, "quantised_conv_squares.cu", instance("quantised_conv_squares", y.dtype, kernel, planes, columns, relu),
        (blocks, -(-filters // columns), 1), (2 * SQUARES_ROWS, 1, 1), In(x), In(weight),
        In(builder.input(node, "multiplier")), In(builder.input(node, "bias")), Out(y), count(places),
        *map(ctypes.c_int, (height, width, filters, patch, pad)), shared_bytes=shared_bytes,
        flops=builder.problem("fprop", node, x, weight, y).flops)


def stem_pool(builder: Builder, node: Node) -> None:
    """The first convolution and max pooling at once, on Hopper; teams walk over the rows of all images."""
    x, weight, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    images, height, width, channels = x.shape
    size = window(node)
    out_height, out_width = height - size.kernel[0] + 1, width - size.kernel[1] + 1
    require(builder.gpu.capability == HOPPER and size == WINDOW and channels == SQUARE_CHANNELS
            and y.shape[3] == FILTERS and y.dtype == "int8" and out_width <= STEM_WIDTH, node,
            "is not for the kernel of the stem and its pooling")
    blocks = min(builder.gpu.num_multiprocessors, -(-images * y.shape[1] // STEM_TEAMS))
    builder.launch(node, "quantised_stem_pool.cu", instance("quantised_stem_pool", node["relu"]), (blocks, 1, 1),
                   STEM_BLOCK, In(x), In(weight), In(builder.input(node, "multiplier")),
                   In(builder.input(node, "bias")), Out(y),
                   PooledSizes(images, out_height, out_width, *y.shape[1:3]), shared_bytes=STEM_SHARED_BYTES,
                   flops=2 * images * out_height * out_width * weight.num_bytes)


@dataclass(frozen=True)
class Stream:
    """How quantised_conv_stream.cu divides its shared memory, for C `channels`, and C_2 `channels_2` of a second
    convolution; a block has so many teams and makes so many columns. There is room for as many blocks on a
    multiprocessor as have two teams with 256 columns together, or four with 128, unless weights leave too little of it.
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
        """On a multiprocessor."""
        most = 2 * STREAM_COLUMNS // (self.teams * self.columns)
        return most if self._places(most) >= 2 + (2 if self.adds else 1) else 1

    @property
    def results(self) -> int:
        """As `Conv1x1Forward.results`, or one less where stages need the room. Of two convolutions, between whose
        products there is time to copy them away, as many as are made at once."""
        most = self.columns // CHUNK if self.channels_2 else 3 if self.adds else 2
        return max(2 if self.adds else 1, min(most, self._places(self.blocks) - 2))

    @property
    def stages(self) -> int:
        """Less than the 2 that are needed where weights leave no room."""
        return min(STREAM_STAGES, self._places(self.blocks) - self.results)

    @property
    def control_bytes(self) -> int:
        factors = STREAM_FACTOR_BYTES * self.columns * (2 if self.channels_2 else 1)
        return -(-(factors + STREAM_BARRIER_BYTES * self.teams) // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        return self._kept_bytes + self.teams * TILE_ROWS * CHUNK * (self.stages + self.results)

    def _places(self, blocks: int) -> int:
        """For a stage of each team, or a result of each warp: they have the same size."""
        free = MULTIPROCESSOR_SHARED_BYTES // blocks - RESERVED_BYTES - self._kept_bytes
        return free // (self.teams * TILE_ROWS * CHUNK)

    @property
    def _kept_bytes(self) -> int:
        return self.control_bytes + (self.chunks + self.chunks_2) * self.columns * CHUNK


def _stream(builder: Builder, node: Node, teams: int, columns: int) -> None:
    """A 1x1 convolution on Hopper, or the sum of two; blocks keep weights and walk over the rows."""
    x, weight, y = builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)
    is_sum = node.op == "QuantisedConvolutionSum"
    addend = None if is_sum else builder.optional_input(node, "addend", "no_addend")
    x_2, weight_2, multiplier_2, bias_2 = (
        builder.input(node, role) if is_sum else None for role in ("data_2", "weight_2", "multiplier_2", "bias_2"))
    geometry, (adds, relu, share), size = Geometry.of(node, x, y), _Epilogue.of(node), window(node)
    channels, channels_2, filters = x.shape[3], x_2.shape[3] if x_2 else 0, y.shape[3]
    _require_tensor_cores(builder, node, columns)
    stream, tiles = Stream(channels, teams, columns, adds, channels_2), Tiles.of(x.shape, y.shape, size.stride, CHUNK)
    require(builder.gpu.capability == HOPPER and size.kernel == (1, 1) and size.pad == (0, 0) and tiles is not None
            and channels % TILE_VECTOR == channels_2 % TILE_VECTOR == 0 and y.dtype == "int8" and stream.stages >= 2,
            node, "is not for the kernel that streams")
    assert tiles
    across, of_teams = -(-filters // columns), -(-geometry.rows // (tiles.walk.rows * teams))
    down = max(1, min(stream.blocks * builder.gpu.num_multiprocessors // across, of_teams))
    builder.launch(
        node, "quantised_conv_stream.cu", instance("quantised_conv_stream", teams, columns, adds, relu, is_sum),
        (across, down, 1), (teams * TEAM_THREADS, 1, 1), Tiled(In(x), tiles.data), Tiled(In(addend), tiles.output),
        Tiled(Out(y, over=addend), tiles.output), In(weight), In(builder.input(node, "multiplier")),
        In(builder.input(node, "bias")), count(geometry.rows), tiles.walk, *map(ctypes.c_int, (channels, filters)),
        share, *map(ctypes.c_int, (stream.chunks, stream.stages, stream.results)),
        Tiled(In(x_2), tiles.beside(channels_2, CHUNK)), In(weight_2), In(multiplier_2), In(bias_2),
        *map(ctypes.c_int, (channels_2, stream.chunks_2)),
        shared_bytes=stream.shared_bytes, flops=2 * geometry.rows * filters * (channels + channels_2))


def convolution_sum(builder: Builder, node: Node) -> None:
    """A projection shortcut and the convolution that it is added to, by the kernel that streams."""
    _stream(builder, node, *STREAMS[node["way"]])


def _require_tensor_cores(builder: Builder, node: Node, columns: int) -> None:
    """Raise GraphError where the kernels on tensor cores are not for this GPU, or blocks of so many columns not for
    this number of filters."""
    filters = node["num_filter"]
    require(builder.gpu.capability >= (8, 0) and node["num_group"] == 1 and filters % TILE_VECTOR == 0, node,
            "is not for the kernels on tensor cores")
    require(filters > columns // 2, node, f"has less filters than {columns} columns are worth")


def _direct(builder: Builder, node: Node) -> None:
    """By the kernel for all shapes: a thread makes an output."""
    x, y = builder.input(node, "data"), builder.output(node)
    own = x.shape[3] // node["num_group"]
    require(own % 4 == 0, node, f"has {own} channels in a group: use a multiple of 4")
    _launch_direct(builder, node, Geometry.of(node, x, y), builder.input(node, "bias"),
                   builder.optional_input(node, "addend", "no_addend"), y, _Epilogue.of(node), node["num_group"])


def classifier(builder: Builder, node: Node) -> None:
    """A 1x1 convolution of a 1x1 image, in floats. The softmax adds the bias."""
    x = builder.input(node, "data")
    images, channels, filters = x.shape[0], x.num_bytes // x.shape[0], padded(node["num_hidden"])
    require(channels % 4 == 0, node, f"has {channels} values of an image: use a multiple of 4")
    require(node["dtype"] != "int8", node, "does not feed a SoftmaxOutput alone: only the classifier has "
            "a GPU lowering")
    y = builder.output(node, shape=(images, 1, 1, filters))
    geometry = Geometry(images, 1, 1, channels, 1, 1, filters, *(1,) * 4, 0, 0, 1, 1)
    _launch_direct(builder, node, geometry, None, None, y, _Epilogue(False, False, ctypes.c_float(0)), groups=1)


def _launch_direct(builder: Builder, node: Node, geometry: Geometry, bias: Buffer | None, addend: Buffer | None,
                   y: Buffer, epilogue: _Epilogue, groups: int) -> None:
    outputs = geometry.rows * geometry.filters
    adds, relu, share = epilogue
    builder.launch(node, "quantised.cu", instance("quantised_conv_direct", y.dtype, adds, relu), *threads(outputs),
                   In(builder.input(node, "data")), In(builder.input(node, "weight")),
                   In(builder.input(node, "multiplier")), In(bias), In(addend), Out(y), geometry, share,
                   count(outputs), ctypes.c_int(groups))


def pooling(builder: Builder, node: Node) -> None:
    """Maxima are the same integers; means and sums are requantised."""
    x, y = builder.input(node, "data"), builder.output(node)
    channels = x.shape[3]
    require(channels % 4 == 0, node, f"has {channels} channels: use a multiple of 4")
    words = 4 if channels % 16 == 0 else 1
    items, pitch = x.shape[0] * y.shape[1] * y.shape[2] * channels // (4 * words), channels // (4 * words)
    size = (Window(*x.shape[1:3], 1, 1, *x.shape[1:3], 1, 1, 0, 0) if node["global_pool"]
            else Window.of(node, x, y))
    if node["pool_type"] == "max":
        unrolled = 3 if (size.kernel_h, size.kernel_w) == (3, 3) else 0
        builder.launch(node, "quantised.cu", instance("quantised_max_pool", words, unrolled), *threads(items), In(x),
                       Out(y), size, count(items), ctypes.c_int(pitch))
        return
    divisor = "SUM" if node["pool_type"] == "sum" else "PADDING" if node["count_include_pad"] else "IMAGE"
    builder.launch(node, "quantised.cu", instance("quantised_average_pool", y.dtype, words, divisor),
                   *threads(items), In(x), Out(y), size, ctypes.c_double(node["data_scale"] / node["scale"]),
                   count(items), ctypes.c_int(pitch))


LAUNCHES: Launches = {
    "Quantise": quantise,
    "QuantiseSquares": quantise_squares,
    "Dequantise": dequantise,
    "QuantisedConvolution": convolution,
    "QuantisedConvolutionSum": convolution_sum,
    "QuantisedStemPool": stem_pool,
    "QuantisedFullyConnected": classifier,
    "QuantisedPooling": pooling,
}
