"""Windows that move over images: geometry shared by convolution and pooling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.operators.base import Array, Attribute, NodeView, Shape


class Window(NamedTuple):
    """The two spatial dimensions of a convolution or pooling: (height, width) each; `pad` on both sides."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]
    dilate: tuple[int, int]


def _layout(value: Any) -> str:
    """Only two spatial dimensions are supported, so None means NCHW."""
    text = "NCHW" if str(value) == "None" else str(value)
    if text not in ("NCHW", "NHWC"):
        raise ValueError(value)
    return text


LAYOUT = Attribute(_layout, "NCHW")


def window(node: NodeView) -> Window:
    """The window of a convolution or pooling, or of the gradient of either. MXNet's defaults are stride and dilation 1
    and no padding.
    """
    kernel = node["kernel"]
    if len(kernel) != 2:
        raise GraphError(f"{node.op} '{node.name}' has kernel={kernel}: only two spatial dimensions are supported")
    return Window(kernel, node["stride"] or (1, 1), node["pad"] or (0, 0), node.get("dilate") or (1, 1))


def output_size(node: NodeView, size: Shape) -> Shape:
    """Height and width after a convolution or pooling of images with height and width `size`."""
    if node.get("global_pool"):
        return (1, 1)
    convention = node.get("pooling_convention")
    if convention == "same":
        raise GraphError(f"Pooling '{node.name}' has pooling_convention='same': supported are 'valid' and 'full'")
    kernel, stride, pad, dilate = window(node)
    result = []
    for s, k, st, p, d in zip(size, kernel, stride, pad, dilate, strict=True):
        span = s + 2 * p - (d * (k - 1) + 1)
        if span < 0:
            raise GraphError(
                f"{node.op} '{node.name}': its kernel {kernel} is larger than its padded {size[0]}x{size[1]} input: "
                "use larger images"
            )
        result.append((math.ceil(span / st) if convention == "full" else span // st) + 1)
        # These windows contain no pixel. MXNet still gives them an output, with a maximum of -infinity; PyTorch and
        # ONNX do not.
        if convention and (p >= k or (result[-1] - 1) * st >= s + p):
            raise GraphError(
                f"{node.op} '{node.name}' has windows outside its {size[0]}x{size[1]} input (kernel={kernel}, "
                f"stride={stride}, pad={pad}, pooling_convention={convention}), where frameworks differ: avoid such "
                "windows with pooling_convention=valid (ONNX: ceil_mode=0), or pad less"
            )
    return tuple(result)


def nhwc(node: NodeView, x: Array) -> Array:
    """Images in NHWC, or a weight in OHWI."""
    return x if node["layout"] == "NHWC" else x.transpose(0, 2, 3, 1)


def as_layout(node: NodeView, x: Array) -> Array:
    """The inverse of `nhwc`."""
    return np.ascontiguousarray(x if node["layout"] == "NHWC" else x.transpose(0, 3, 1, 2))


class Places:
    """For each position (row, column) in a kernel, the region of the padded images that this position reads, one pixel
    per output.

    Iterating gives ((row, column), index of an NHWC array), rows first.
    """

    def __init__(self, node: NodeView, data_shape: Shape) -> None:
        order = (0, 1, 2, 3) if node["layout"] == "NHWC" else (0, 2, 3, 1)
        batch, height, width, channels = (data_shape[i] for i in order)
        self.size = (height, width)
        self.output_size = (batch, *output_size(node, self.size))
        self.window = Window(self.size, (1, 1), (0, 0), (1, 1)) if node.get("global_pool") else window(node)
        # Pooling with the convention "full" reaches beyond the padding at the bottom and right.
        kernel, stride, pad, dilate = self.window
        reach = [(out - 1) * stride[i] + dilate[i] * (kernel[i] - 1) + 1 for i, out in enumerate(self.output_size[1:])]
        self.padded_size = [max(reach[i], self.size[i] + 2 * pad[i]) for i in (0, 1)]
        self.padded_shape = (batch, *self.padded_size, channels)
        self._inner = (slice(None), *(slice(pad[i], pad[i] + self.size[i]) for i in (0, 1)))

    def __iter__(self) -> Iterator[tuple[tuple[int, int], tuple[slice, ...]]]:
        kernel, stride, _, dilate = self.window
        for place in itertools.product(range(kernel[0]), range(kernel[1])):
            starts = [place[i] * dilate[i] for i in (0, 1)]
            stops = [starts[i] + (self.output_size[1 + i] - 1) * stride[i] + 1 for i in (0, 1)]
            yield place, (slice(None), *(slice(starts[i], stops[i], stride[i]) for i in (0, 1)))

    def padded(self, x: Array, fill: float = 0.0) -> Array:
        result = np.full(self.padded_shape, fill, x.dtype)
        result[self._inner] = x
        return result

    def unpadded(self, x: Array) -> Array:
        return x[self._inner]

    def empty_padded(self, dtype: np.dtype) -> Array:
        return np.zeros(self.padded_shape, dtype)

    def divisor(self, node: NodeView) -> Array:
        """The divisor of a window's sum for each output (1, H, W, 1): the number of the window's pixels."""
        if node["pool_type"] == "sum":
            return np.ones((1, 1, 1, 1))
        pad = self.window.pad
        counted = np.zeros((1, *self.padded_size, 1))
        if node["count_include_pad"]:
            counted[:, : self.size[0] + 2 * pad[0], : self.size[1] + 2 * pad[1]] = 1
        else:
            counted[self._inner] = 1
        return np.sum([counted[region] for _, region in self], axis=0)
