"""The gradient of a strided 1x1 convolution's data, without the pixels that the convolution does not read."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import output_size, window

_REDUCTIONS = ("BatchNormBackwardReduce", "BatchNormReluBackwardReduce", "BatchNormAddReluBackwardReduce")


def compact_grad(graph: Graph) -> Graph:
    """Leave the zeros out of a strided 1x1 convolution's data gradient if a BatchNorm's sums add it to another
    gradient.

        before    dy, weight -> ConvolutionDgrad(stride=(2, 2)) -> dx (N, H, W, C), 3/4 of its pixels are 0
                  other, ..., dx -> BatchNormAddReluBackwardReduce
        after     dy, weight -> ConvolutionDgrad -> dx (N, OH, OW, C)
                  other, ..., dx -> BatchNormAddReluBackwardReduce(grad_stride=(2, 2))

    Only a quarter of dx is written and read. This occurs at the projection shortcuts that end a stage's backward pass.
    """
    nodes: list[Node] = []
    for reduction in graph:
        dgrad = _strided(graph, reduction)
        if dgrad is None:
            continue
        images, height, width, channels = dgrad["data_shape"]
        read = (images, *output_size(dgrad, (height, width)), channels)
        nodes.append(dgrad.with_attrs(stride=(1, 1), data_shape=read))
        other, = (ref for ref in _gradients(reduction) if ref.node != dgrad.name)
        inputs = (other, *reduction.inputs[1:-1], Ref(dgrad.name))
        nodes.append(reduction.with_attrs(grad_stride=window(dgrad).stride).replace(inputs=inputs))
    return graph.replace(nodes, {})


def _gradients(reduction: Node) -> tuple[Ref, Ref]:
    """The two gradients that the node adds: its first input and its last."""
    return reduction.input("out_grad"), reduction.input("out_grad_2")


def _strided(graph: Graph, reduction: Node) -> Node | None:
    """The data gradient of a strided 1x1 convolution that this reduction adds to another gradient, if no other node
    reads it.
    """
    if reduction.op not in _REDUCTIONS or reduction["single_grad"] or reduction["axis"] not in (3, -1):
        return None
    return next((graph[ref.node] for ref in reversed(_gradients(reduction))
                 if _leaves_pixels_out(graph[ref.node]) and graph.sole_reader(ref, reduction.op)), None)


def _leaves_pixels_out(dgrad: Node) -> bool:
    if dgrad.op != "ConvolutionDgrad" or dgrad["layout"] != "NHWC":
        return False
    kernel, stride, pad, _ = window(dgrad)
    return (kernel, pad) == ((1, 1), (0, 0)) and stride != (1, 1)
