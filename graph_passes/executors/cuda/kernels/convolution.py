"""Convolutions and the classifier: cuDNN plans, alone or fused with BatchNorm's sums, or with bias, addition and ReLU.

    before    x, weight -> Convolution `conv` -> y -> BatchNormStatistics -> sums
    after     x, weight -> ConvolutionStatistics `conv` -> y, sums

cuDNN computes these sums in a varying order, although its notes on the plans do not say so (cuDNN 9.19 on an H200:
other bits in each of 20 runs). So deterministic runs do not use them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches, require
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.executors.cuda.parameters import VECTOR, padded
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators import channel_axis


def conv_statistics(table: Candidates, sums: Candidate) -> Iterator[Node]:
    """Yield the kernel's operator for a BatchNormStatistics `sums`."""
    for convolution in with_statistics(table, sums):
        yield convolution.node.derive("ConvolutionStatistics", convolution.node.name, convolution.node.inputs)


def with_statistics(table: Candidates, sums: Candidate) -> Iterator[Candidate]:
    """The convolution without bias whose output the BatchNorm sums. None for grouped convolutions: cuDNN fuses nothing
    into them."""
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
    y = builder.output(node)
    require(y.shape[3] % VECTOR == 0, node, f"has {y.shape[3]} filters: use a multiple of {VECTOR}")
    return builder.input(node, "data"), builder.input(node, "weight"), y


def classifier(builder: Builder, node: Node) -> None:
    """Launch a 1x1 convolution of a 1x1 image. The softmax adds the bias, in fp32."""
    require(node["no_bias"], node, "does not feed a SoftmaxOutput alone: only the classifier has a GPU lowering")
    x, w = builder.input(node, "data"), builder.input(node, "weight")
    y = builder.output(node, shape=(x.shape[0], 1, 1, padded(node["num_hidden"])))
    builder.plan(node, builder.problem("fprop", node, x, w, y), In(x), In(w), Out(y))


def wgrad(builder: Builder, node: Node) -> None:
    """Launch the gradient of the weights."""
    dy, x = builder.input(node, "out_grad"), builder.input(node, "data")
    shape = None
    if node.op == "FullyConnectedWgrad":  # the parameter's shape, even if this is only a part of its gradient
        shape = (padded(node["num_hidden"]), 1, 1, math.prod(x.shape[1:]))
    dw = builder.output(node, shape=shape)
    builder.plan(node, builder.problem("wgrad", node, x, dw, dy), In(x), In(dy), Out(dw))


def dgrad(builder: Builder, node: Node) -> None:
    """Launch the gradient of the data."""
    dy, w, dx = builder.input(node, "out_grad"), builder.input(node, "weight"), builder.output(node)
    builder.plan(node, builder.problem("dgrad", node, dx, w, dy), In(dy), In(w), Out(dx))


RULES = (("BatchNormStatistics", conv_statistics),)
LAUNCHES: Launches = {
    "Convolution": forward,
    "ConvolutionStatistics": statistics,
    "ConvolutionRelu": relu,
    "ConvolutionAddRelu": add_relu,
    "ConvolutionWgrad": wgrad,
    "ConvolutionDgrad": dgrad,
    "FullyConnected": classifier,
    "FullyConnectedWgrad": wgrad,
    "FullyConnectedDgrad": dgrad,
}
