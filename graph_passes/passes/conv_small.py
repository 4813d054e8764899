"""Convolutions of few images by a kernel of our own, for GPUs of the Hopper generation."""

from __future__ import annotations

from graph_passes.graph import Node

# By rows (pixels) and columns (filters) of what a block makes.
TILES = {f"conv_small {rows}x{columns}": (rows, columns) for rows, columns in ((64, 64), (64, 32), (32, 64))}


def small_ways(fused: Node) -> dict[str, list[Node]]:
    """The ways that are our own kernel, for a convolution with what is fused with it; none where it is not for that.

    Convolution becomes SmallConvolution, ConvolutionRelu SmallConvolutionRelu, and so on: they compute the same.
    Whether the problem is small enough depends on shapes, so the lowering says it.
    """
    if (fused["layout"] != "NHWC" or fused["num_group"] != 1
            or fused.attrs.get("dtype") not in ("float16", "bfloat16")):
        return {}
    return {way: [fused.replace(op=f"Small{fused.op}", attrs={**fused.attrs, "way": way})] for way in TILES}
