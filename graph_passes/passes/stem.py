"""ResNet's first convolution in 16-bit types: kernels of our own, with what reads its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import Shape, window
from graph_passes.passes.choice import Choose
from graph_passes.passes.conv_statistics import with_statistics

FILTERS, SIZE = 64, 7
WINDOW = ((SIZE, SIZE), (2, 2), (3, 3), (1, 1))  # kernel, stride, pad, dilation
CHANNELS = (3, 4)  # of the images; three are padded to four


def stem(graph: Graph, shapes: Mapping[str, Sequence[int]], choose: Choose) -> Graph:
    """Fuse the first convolution with the sums of its output; and its backward pass with that of BatchNorm, ReLU and
    max pooling after it. `shapes` are those of the inputs.

        before    image, weight -> Convolution `conv` -> x -> BatchNormStatistics -> sums
        after     image, weight -> StemConvolution `conv` -> x, sums

        before    dy, winner, x -> BatchNormPoolBackwardApply -> dx;  dx, image -> ConvolutionWgrad `dw`
        after     dy, winner, x, image -> StemWgrad `dw`

    For 7x7 with stride 2 from 3 or 4 channels to 64, in NHWC. cuDNN has no statistics for 4 channels and, in bfloat16,
    no fast engine either. The gradient of the network's largest tensor is not written.
    """
    sizes = graph.infer_shapes(shapes)
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    for convolution, sums in with_statistics(graph):
        if not _fits(convolution, sizes[convolution.inputs[0]]):
            continue
        fused = convolution.derive("StemConvolution", convolution.name, convolution.inputs)
        ways = {"stem_fprop": [fused], "separate": [convolution, sums],
                "stem_forward": [fused.with_attrs(way="stem_forward")]}
        way = choose(graph, convolution, ways)
        if way != "separate":
            nodes += ways[way]
            moved[Ref(sums.name)] = fused.output("sums")
        nodes += _wgrad(graph, convolution, choose)
    return graph.replace(nodes, moved)


def _fits(convolution: Node, data: Shape) -> bool:
    return (window(convolution) == WINDOW and convolution["num_filter"] == FILTERS and data[3] in CHANNELS
            and data[2] % 2 == 0 and convolution["layout"] == "NHWC" and "dtype" in convolution.attrs)


def _wgrad(graph: Graph, convolution: Node, choose: Choose) -> list[Node]:
    """The gradient of the weights, fused with what makes the gradient of the output."""
    image = convolution.inputs[0]
    for wgrad in graph.consumers[image]:
        before = graph[wgrad.inputs[0].node] if wgrad.op == "ConvolutionWgrad" else wgrad
        if (before.op == "BatchNormPoolBackwardApply" and before.input("data") == Ref(convolution.name)
                and graph.sole_reader(Ref(before.name), "ConvolutionWgrad")):
            fused = before.derive("StemWgrad", wgrad.name, (*before.inputs, image), **wgrad.attrs)
            ways = {"stem_wgrad": [fused], "separate": [before, wgrad],
                    "stem_weights": [fused.with_attrs(way="stem_weights")]}
            way = choose(graph, wgrad, ways)
            return [] if way == "separate" else ways[way]
    return []
