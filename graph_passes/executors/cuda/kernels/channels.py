"""Concat and slice_axis along the channels."""

from __future__ import annotations

import math

from graph_passes.executors.cuda.builder import Builder, Launches, require
from graph_passes.executors.cuda.kernel_library import C_TYPES, count, instance, threads
from graph_passes.executors.cuda.operands import In, InOut, Out
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators.joining import axis_of, range_of


def concat(builder: Builder, node: Node) -> None:
    """A launch for each input; the first one begins the output."""
    y, first = builder.output(node), 0
    _require_channels(node, "dim", y)
    for number, ref in enumerate(node.inputs):
        x = builder.buffers[ref]
        _copy(builder, node, In(x), InOut(y) if number else Out(y), x.shape[-1], to_first=first)
        first += x.shape[-1]


def slice_axis(builder: Builder, node: Node) -> None:
    x, y = builder.input(node, "data"), builder.output(node)
    _require_channels(node, "axis", x)
    begin, end = range_of(node, x.shape)
    _copy(builder, node, In(x), Out(y), end - begin, from_first=begin)


def slice_backward(builder: Builder, node: Node) -> None:
    dy, dx = builder.input(node, "out_grad"), builder.output(node)
    _require_channels(node, "axis", dx)
    begin, end = range_of(node, dx.shape)
    _copy(builder, node, In(dy), Out(dx), end - begin, to_first=begin, fill=True)


def _copy(builder: Builder, node: Node, source: In, target: Out | InOut, columns: int, from_first: int = 0,
          to_first: int = 0, fill: bool = False) -> None:
    """By vectors where all that counts is a multiple of them."""
    assert source.buffer and target.buffer
    pitches = source.buffer.shape[-1], target.buffer.shape[-1]
    numbers = (columns, pitches[0], from_first, pitches[1], to_first)
    width = VECTOR if all(number % VECTOR == 0 for number in numbers) else 1
    columns, from_pitch, from_first, to_pitch, to_first = (number // width for number in numbers)
    items = math.prod(source.buffer.shape[:-1]) * (to_pitch if fill else columns)
    kind = builder.kernel("Packed") if width == VECTOR else C_TYPES[builder.dtype]
    builder.launch(node, "channels.cu", instance("copy_columns", kind, fill), *threads(items), source, target,
                   *map(count, (items, columns, from_pitch, from_first, to_pitch, to_first)))


def _require_channels(node: Node, attribute: str, images: Buffer) -> None:
    axis = axis_of(node, attribute, len(images.shape))
    require(axis == len(images.shape) - 1, node, f"works along dimension {axis} of {images.shape}: there is a kernel "
            "for the last one")


LAUNCHES: Launches = {"Concat": concat, "slice_axis": slice_axis, "SliceAxisBackward": slice_backward}
