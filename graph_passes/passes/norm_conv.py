"""A BatchNorm of a training step, and the convolution that reads its output, with the sums of that one's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from graph_passes.graph import Graph, Node, Ref
from graph_passes.passes.choice import Choose
from graph_passes.passes.conv1x1 import is_product

# Of the BatchNorm's half: what both are then, and the way by a kernel of our own.
_WITH_1X1 = {"BatchNormAddReluApply": ("BatchNormAddReluConv1x1", "norm_conv1x1"),
             "BatchNormPairApply": ("BatchNormPairConv1x1", "norm_conv1x1"),
             "BatchNormReluApply": ("BatchNormReluConv1x1", "norm_relu_conv1x1")}
_WITH_3X3 = {"BatchNormReluApply": ("BatchNormReluConv3x3", "norm_conv3x3")}
_WITH_STATISTICS = ("ConvolutionStatistics", "Conv1x1Statistics")


def norm_conv1x1(graph: Graph, choose: Choose) -> Graph:
    """Let BatchNorm + add + ReLU, a pair of BatchNorms, or BatchNorm + ReLU within a block also compute the 1x1
    convolution that reads its output, with the sums of that one's output, in 16-bit types.

        before    x, sums, ..., addend -> BatchNormAddReluApply `bn` -> y, saved, ..., mask
                  y, weight -> ConvolutionStatistics -> z, sums of z
        after     x, sums, ..., addend, weight -> BatchNormAddReluConv1x1 `bn` -> y, saved, ..., mask, z, sums of z

    Likewise with BatchNormPairApply and BatchNormReluApply, with Conv1x1Statistics, and with Convolution and
    BatchNormStatistics. y is written, for the next sum and the backward pass read it too (`unread_output`), but z is
    made of what is still on the chip. Where images are dropped all stays as it is. The kernels are for GPUs of the
    Hopper generation; weights that a block cannot keep that of a block's end reads block by block.
    """
    return _with_convolution(graph, choose, _WITH_1X1, _product)


def norm_conv3x3(graph: Graph, choose: Choose) -> Graph:
    """Let BatchNorm + ReLU also compute the 3x3 convolution over 64 channels that reads its output, with the sums of
    that one's output, where a kernel of our own computes it.

        before    x, sums, ... -> BatchNormReluApply `bn` -> y, saved, ...
                  y, weight -> Conv3x3Statistics -> z, sums of z
        after     x, sums, ..., weight -> BatchNormReluConv3x3 `bn` -> y, saved, ..., z, sums of z

    y is written, for the gradient of the weights reads it, but z is made of what is still on the chip. The kernel is
    for GPUs of the Hopper generation.
    """
    return _with_convolution(graph, choose, _WITH_3X3, _conv3x3)


def unread_output(graph: Graph) -> Graph:
    """Say of BatchNorm + ReLU with the 1x1 convolution that follows whether others read what they give: not if the
    gradients of that convolution make it again of what the BatchNorm reads (`norm_backward`)."""
    unread = [node for node in graph if node.op == "BatchNormReluConv1x1"
              and not graph.consumers.get(Ref(node.name)) and Ref(node.name) not in graph.outputs]
    return graph.replace([node.with_attrs(no_output=True) for node in unread], {})


class _Convolution(NamedTuple):
    """A convolution with the sums of its output: both in one node, or in two."""

    nodes: list[Node]
    sums: Ref

    @property
    def output(self) -> Ref:
        return Ref(self.nodes[0].name)


def _with_convolution(graph: Graph, choose: Choose, fusions: dict[str, tuple[str, str]],
                      find: Callable[[Graph, Node], _Convolution | None]) -> Graph:
    """`find`: of a node that reads what a BatchNorm gives, the convolution that may be fused with it."""
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    for norm in graph:
        if norm.op not in fusions or not norm.get("no_factors", True):
            continue
        output, (op, kernel) = Ref(norm.name), fusions[norm.op]
        readers = (reader for reader in graph.consumers.get(output, ()) if reader.inputs[0] == output)
        convolution = next((found for reader in readers if (found := find(graph, reader))), None)
        if convolution is None:
            continue
        first = convolution.nodes[0]
        fused = Node(op, norm.name, (*norm.inputs, first.inputs[1]), {**first.attrs, **norm.attrs})
        if choose(graph, norm, {"separate": [norm, *convolution.nodes], kernel: [fused]}) == kernel:
            nodes.append(fused)
            moved |= {convolution.output: fused.output("convolved"), convolution.sums: fused.output("sums")}
    return graph.replace(nodes, moved)


def _product(graph: Graph, node: Node) -> _Convolution | None:
    """A 1x1 convolution of which somebody wants the sums."""
    if node.op not in (*_WITH_STATISTICS, "Convolution") or not is_product(node):
        return None
    if node.op in _WITH_STATISTICS:
        return _Convolution([node], node.output("sums"))
    readers = graph.consumers.get(Ref(node.name), ())
    statistics = next((reader for reader in readers if reader.op == "BatchNormStatistics"), None)
    return _Convolution([node, statistics], Ref(statistics.name)) if statistics and node["no_bias"] else None


def _conv3x3(graph: Graph, node: Node) -> _Convolution | None:
    """A 3x3 convolution by a kernel of our own."""
    return _Convolution([node], node.output("sums")) if node.op == "Conv3x3Statistics" else None
