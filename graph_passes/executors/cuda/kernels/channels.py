"""Concat and slice_axis along the channels."""

from __future__ import annotations

from graph_passes.executors.cuda.builder import Builder, Launches, require
from graph_passes.executors.cuda.operands import In, InOut, Out
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators.joining import axis_of, range_of


def concat(builder: Builder, node: Node) -> None:
    """Launch a copy for each input. The first launch also clears the rest of the output."""
    y, first = builder.output(node), 0
    _require_channels(node, "dim", y)
    for number, ref in enumerate(node.inputs):
        x = builder.tensor(ref)
        builder.copy_columns(node, In(x), InOut(y) if number else Out(y), x.shape[-1], to_first=first)
        first += x.shape[-1]


def slice_axis(builder: Builder, node: Node) -> None:
    x, y = builder.input(node, "data"), builder.output(node)
    _require_channels(node, "axis", x)
    begin, end = range_of(node, x.shape)
    builder.copy_columns(node, In(x), Out(y), end - begin, from_first=begin)


def slice_backward(builder: Builder, node: Node) -> None:
    dy, dx = builder.input(node, "out_grad"), builder.output(node)
    _require_channels(node, "axis", dx)
    begin, end = range_of(node, dx.shape)
    builder.copy_columns(node, In(dy), Out(dx), end - begin, to_first=begin, fill=True)


def _require_channels(node: Node, attribute: str, images: Buffer) -> None:
    axis = axis_of(node, attribute, len(images.shape))
    require(axis == len(images.shape) - 1, node, f"works along dimension {axis} of {images.shape}: there is a kernel "
            "for the last one")


LAUNCHES: Launches = {"Concat": concat, "slice_axis": slice_axis, "SliceAxisBackward": slice_backward}
