"""The second gradient of a tensor, which a kernel adds to the first: as batch_norm.cuh has it."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from graph_passes.executors.cuda.builder import Builder
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators import Shape


class FastDivisor(ctypes.Structure):
    """Of numbers below 2^31."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in ("value", "factor", "shift"))

    @classmethod
    def by(cls, value: int) -> FastDivisor:
        shift = (value - 1).bit_length()
        return cls(value, 2 ** (31 + shift) // value + 1, shift)


class Grid(ctypes.Structure):
    """The pixels of images that a compact gradient has."""

    _fields_ = (*((name, FastDivisor) for name in ("height", "width", "down", "right")),
                ("out_height", ctypes.c_uint32), ("out_width", ctypes.c_uint32))

    @classmethod
    def of(cls, shape: Shape, stride: tuple[int, int]) -> Grid:
        """Of images (N, H, W, C)."""
        size = shape[1:3]
        out_size = (-(-pixels // step) for pixels, step in zip(size, stride, strict=True))
        return cls(*map(FastDivisor.by, (*size, *stride)), *out_size)


class Second(NamedTuple):
    """`kind`: of batch_norm.cuh's `Second`."""

    kind: str
    grad: Buffer | None
    grid: Grid

    @property
    def whole(self) -> Buffer | None:
        """If it has all pixels: its place may be taken by the sum."""
        return self.grad if self.kind == "WHOLE" else None

    @property
    def compact(self) -> Buffer | None:
        return self.grad if self.kind == "COMPACT" else None

    @classmethod
    def of(cls, builder: Builder, node: Node) -> Second:
        """Of a node that may have `out_grad_2`."""
        grad, stride = builder.optional_input(node, "out_grad_2", "single_grad"), node["grad_stride"]
        if grad is None or not stride:
            return cls("WHOLE" if grad else "NONE", grad, Grid())
        return cls("COMPACT", grad, Grid.of(builder.shapes[node.input("data")], stride))
