"""1x1 convolutions that kernels of our own can make, for GPUs of the Hopper generation."""

from __future__ import annotations

from graph_passes.graph import Node
from graph_passes.operators import window


def is_product(convolution: Node, stride: tuple[int, int] = (1, 1)) -> bool:
    """Is it, or the convolution whose gradient it is, a product of matrices, in a type of 16 bits?"""
    return (window(convolution) == ((1, 1), stride, (0, 0), (1, 1)) and convolution["layout"] == "NHWC"
            and convolution["num_group"] == 1 and convolution.attrs.get("dtype") in ("float16", "bfloat16"))


def own_form(fused: Node) -> list[Node]:
    """Our own kernel's, of a convolution with what is fused with it; none where it is no such product.

    Convolution becomes Conv1x1, ConvolutionRelu Conv1x1Relu, and so on: they compute the same.
    """
    if not is_product(fused) and not is_product(fused, stride=(2, 2)):
        return []
    return [fused.replace(op=fused.op.replace("Convolution", "Conv1x1"))]
