"""Convolutions and fully connected layers by cuDNN's plans. A convolution can be fused with BatchNorm's sums, or with
bias, addition and ReLU.

    before    x, weight -> Convolution `conv` -> y -> BatchNormStatistics -> sums
    after     x, weight -> ConvolutionStatistics `conv` -> y, sums

cuDNN computes these sums in a varying order, although its notes on the plans do not say so (cuDNN 9.19 on an H200:
different bits in each of 20 runs). So deterministic runs do not use these kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches, padded_rows, require
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.executors.cuda.parameters import is_depthwise
from graph_passes.executors.cuda.program import Buffer, View
from graph_passes.graph import Node, Ref
from graph_passes.operators import Shape, channel_axis


def conv_statistics(table: Candidates, sums: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a BatchNormStatistics `sums`."""
    for convolution in with_statistics(table, sums):
        yield convolution.node.derive("ConvolutionStatistics", convolution.node.name, convolution.node.inputs)


def with_statistics(table: Candidates, sums: Candidate) -> Iterator[Candidate]:
    """Yield the convolution without bias whose output the BatchNorm sums. Yields no grouped convolution, because cuDNN
    fuses nothing into these.
    """
    for convolution in table.makers(sums.input("data"), "Convolution"):
        if (convolution["no_bias"] and convolution["num_group"] == 1
                and sums["axis"] % 4 == channel_axis(convolution["layout"])):
            yield convolution


def forward(builder: Builder, node: Node) -> None:
    """Launch a convolution with or without bias."""
    if node["no_bias"]:
        _plan(builder, node, "fprop")
    else:
        _plan(builder, node, "fprop_bias", "bias")


def relu(builder: Builder, node: Node) -> None:
    _plan(builder, node, "fprop_bias_relu", "bias")


def add_relu(builder: Builder, node: Node) -> None:
    _plan(builder, node, "fprop_bias_add_relu", "bias", "addend")


def _plan(builder: Builder, node: Node, kind: str, *more: str) -> None:
    x, w, y = _operands(builder, node)
    builder.plan(node, builder.problem(kind, node, x, w, y), In(x), In(w),
                 *(In(builder.input(node, role)) for role in more), Out(y))


def statistics(builder: Builder, node: Node) -> None:
    """Launch a convolution with the sums of its output."""
    x, w, y = _operands(builder, node)
    builder.plan(node, builder.problem("fprop_stats", node, x, w, y), In(x), In(w), Out(y),
                 Out(builder.output(node, "sums")))


def _operands(builder: Builder, node: Node) -> tuple[Buffer, Buffer, Buffer]:
    """Data, weight and output of a convolution."""
    return builder.input(node, "data"), builder.input(node, "weight"), builder.output(node)


def wgrad(builder: Builder, node: Node) -> None:
    """Launch the gradient of the weights."""
    dy, x = builder.input(node, "out_grad"), builder.input(node, "data")
    _, *kernel, channels = builder.shapes[Ref(node.name)]
    # the parameter's shape, even if this is only a part of its gradient
    shape = (dy.shape[3], *kernel, x.shape[3] if node["num_group"] == 1 else channels)
    dw = builder.output(node, shape=shape)
    builder.plan(node, builder.problem("wgrad", node, x, dw, dy), In(x), In(dy), Out(dw))


def dgrad(builder: Builder, node: Node) -> None:
    """Launch the gradient of the data."""
    dy, w, dx = builder.input(node, "out_grad"), builder.input(node, "weight"), builder.output(node)
    builder.plan(node, builder.problem("dgrad", node, dx, w, dy), In(dy), In(w), Out(dx))


def _is_padded(builder: Builder, node: Node) -> bool:
    """Whether the weight of a convolution is padded. Weights of grouped convolutions are not padded, except in
    depthwise convolutions.
    """
    groups, weight = node["num_group"], Ref(node.name) if node.op == "ConvolutionWgrad" else node.input("weight")
    return groups == 1 or is_depthwise(builder.shapes[weight], groups)


# --- fully connected layers: 1x1 convolutions of 1x1 images ---


def fully_connected(builder: Builder, node: Node) -> None:
    """Launch a layer without its bias, which a softmax or another launch adds."""
    require(node["no_bias"], node, "has a bias that no pass has taken out of it")
    x, w, y = _data(builder, node), builder.input(node, "weight"), _rows(builder.output(node))
    builder.plan(node, builder.problem("fprop", node, x, w, y), In(x), In(w), Out(y))


def fully_connected_wgrad(builder: Builder, node: Node) -> None:
    dy, x = _rows(builder.input(node, "out_grad")), _data(builder, node)
    dw = builder.output(node, shape=(dy.shape[1], 1, 1, x.shape[1]))
    builder.plan(node, builder.problem("wgrad", node, x, dw, dy), In(x), In(dy), Out(dw))


def fully_connected_dgrad(builder: Builder, node: Node) -> None:
    dy, w = _rows(builder.input(node, "out_grad")), builder.input(node, "weight")
    with builder.output_matrix(node, _features(node["data_shape"], node)) as dx:
        builder.plan(node, builder.problem("dgrad", node, dx, w, dy), In(dy), In(w), Out(dx))


def _data(builder: Builder, node: Node) -> Buffer:
    """The buffer of a fully connected layer's data, as a matrix."""
    data = node.input("data")
    return builder.matrix(data, _features(builder.shapes[data], node))


def _features(data: Shape, node: Node) -> int:
    """How many numbers of each row of the data a fully connected layer reads."""
    return math.prod(data[1:]) if node["flatten"] else data[-1]


def _rows(y: Buffer) -> Buffer:
    """A tensor as a matrix with equal rows."""
    return View(y, (math.prod(y.shape[:-1]), y.shape[-1]))


RULES = (("BatchNormStatistics", conv_statistics),)
LAUNCHES: Launches = {
    "Convolution": padded_rows(forward, _is_padded),
    "ConvolutionStatistics": padded_rows(statistics),
    "ConvolutionRelu": padded_rows(relu),
    "ConvolutionAddRelu": padded_rows(add_relu),
    "ConvolutionWgrad": padded_rows(wgrad, _is_padded),
    "ConvolutionDgrad": padded_rows(dgrad, _is_padded),
    "FullyConnected": padded_rows(fully_connected),
    "FullyConnectedWgrad": padded_rows(fully_connected_wgrad),
    "FullyConnectedDgrad": padded_rows(fully_connected_dgrad),
}
