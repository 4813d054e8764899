"""Softmax with the classifier's bias, loss and metrics; the gradient of a bias."""

from __future__ import annotations

import ctypes
import math

from graph_passes.executors.cuda.lowering.builder import Builder, Rules, require
from graph_passes.executors.cuda.lowering.operands import In, InOut, Out
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node, Ref


def softmax(builder: Builder, node: Node) -> None:
    """Training: loss, metrics and the gradient of the scores. Inference: probabilities and metrics."""
    training = node.op == "SoftmaxCrossEntropy"
    scores, (images, classes) = builder.input(node, "data"), builder.shapes[node.input("data")]
    require(scores.shape[:-1] == (images, 1, 1), node, "does not follow a FullyConnected: no GPU lowering")
    keep = builder.persistent
    gradient = builder.output(node, shape=scores.shape) if training else None
    probabilities, own_share = (None, keep.own_share) if training else (keep.probabilities, None)
    row_loss = Buffer(f"{node.name}:row_loss", (images,), "float32")
    row_rank = Buffer(f"{node.name}:row_rank", (images,), "int32")
    scale = node["grad_scale"] / (images if node["normalization"] == "batch" else 1)
    builder.launch(node, "softmax.cu", builder.kernel("softmax_cross_entropy"), (images, 1, 1), (256, 1, 1),
                   In(scores), In(builder.optional_input(node, "bias", "no_bias")), In(keep.label), In(own_share),
                   Out(probabilities), Out(gradient), Out(row_loss), Out(row_rank), In(keep.loss_scale),
                   ctypes.c_float(scale), ctypes.c_float(node["smooth_alpha"]), ctypes.c_int(classes),
                   ctypes.c_int(scores.shape[3]), shared_bytes=4 * classes)
    builder.launch(node, "softmax.cu", "add_metrics", (1, 1, 1), (256, 1, 1), In(row_loss), In(row_rank),
                   In(keep.num_valid), InOut(keep.metrics))


def bias_gradient(builder: Builder, node: Node) -> None:
    """Of the classifier, or of a convolution."""
    dy, dbias = builder.input(node, "out_grad"), builder.output(node)
    classes, rows = builder.shapes[Ref(node.name)][0], math.prod(dy.shape[:-1])
    builder.launch(node, "softmax.cu", builder.kernel("bias_gradient"), (-(-classes // 32), 1, 1), (32, 32, 1),
                   In(dy), Out(dbias), ctypes.c_int(rows), ctypes.c_int(classes), ctypes.c_int(dy.shape[-1]))


RULES: Rules = {
    "SoftmaxOutput": softmax,
    "SoftmaxCrossEntropy": softmax,
    "BiasGrad": bias_gradient,
}
