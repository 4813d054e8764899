"""The BatchNorm that ends a residual block of a training step, and the convolution that begins the next block."""

from __future__ import annotations

from typing import NamedTuple

from graph_passes.graph import Graph, Node, Ref
from graph_passes.passes.choice import Choose
from graph_passes.passes.conv1x1 import is_product

_NORMS = {"BatchNormAddReluApply": "BatchNormAddReluConv1x1", "BatchNormPairApply": "BatchNormPairConv1x1"}
_WITH_STATISTICS = ("ConvolutionStatistics", "Conv1x1Statistics")


def norm_conv1x1(graph: Graph, choose: Choose) -> Graph:
    """Let BatchNorm + add + ReLU, or a pair of BatchNorms, also compute the 1x1 convolution that reads its output, with
    the sums of that one's output, in 16-bit types.

        before    x, sums, ..., addend -> BatchNormAddReluApply `bn` -> y, saved, ..., mask
                  y, weight -> ConvolutionStatistics -> z, sums of z
        after     x, sums, ..., addend, weight -> BatchNormAddReluConv1x1 `bn` -> y, saved, ..., mask, z, sums of z

    Likewise with BatchNormPairApply, with Conv1x1Statistics, and with Convolution and BatchNormStatistics. y is
    written, for the next sum and the backward pass read it too, but z is made of what is still on the chip. Where
    images are dropped all stays as it is. The kernel is for GPUs of the Hopper generation; weights that a block cannot
    keep it reads block by block.
    """
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    for norm in graph:
        convolution = _convolution(graph, norm)
        if convolution is None:
            continue
        fused = Node(_NORMS[norm.op], norm.name, (*norm.inputs, convolution.nodes[0].inputs[1]),
                     {**convolution.nodes[0].attrs, **norm.attrs})
        ways = {"separate": [norm, *convolution.nodes], "norm_conv1x1": [fused]}
        if choose(graph, norm, ways) == "norm_conv1x1":
            nodes.append(fused)
            moved |= {convolution.output: fused.output("convolved"), convolution.sums: fused.output("sums")}
    return graph.replace(nodes, moved)


class _Convolution(NamedTuple):
    """A convolution with the sums of its output: both in one node, or in two."""

    nodes: list[Node]
    sums: Ref

    @property
    def output(self) -> Ref:
        return Ref(self.nodes[0].name)


def _convolution(graph: Graph, norm: Node) -> _Convolution | None:
    """The first that reads what `norm` gives, if both can be one."""
    if norm.op not in _NORMS or not norm["no_factors"]:
        return None
    output = Ref(norm.name)
    for node in graph.consumers.get(output, ()):
        if node.op not in (*_WITH_STATISTICS, "Convolution") or not is_product(node) or node.inputs[0] != output:
            continue
        if node.op in _WITH_STATISTICS:
            return _Convolution([node], node.output("sums"))
        readers = graph.consumers.get(Ref(node.name), ())
        statistics = next((reader for reader in readers if reader.op == "BatchNormStatistics"), None)
        if statistics and node["no_bias"]:
            return _Convolution([node, statistics], Ref(statistics.name))
    return None
