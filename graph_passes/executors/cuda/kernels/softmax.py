"""The end of a classifier: softmax, sigmoid or a custom loss, with bias and metrics. Also the gradient of a bias."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from graph_passes.executors.cuda.builder import Builder, Launches, padded_rows, reads_padded
from graph_passes.executors.cuda.kernel_library import Written
from graph_passes.executors.cuda.operands import In, InOut, Out
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node, Ref
from graph_passes.operators import LOSSES
from graph_passes.operators.custom_loss import formula_of
from graph_passes.operators.formula import Formula


def softmax(builder: Builder, node: Node) -> None:
    """Launch the end of a classifier. Training: loss, metrics and the gradient of the scores. Inference: probabilities
    and metrics."""
    _, classes = builder.shapes[node.input("data")]
    weights = builder.persistent.class_weights if node.op == "SoftmaxCrossEntropy" else None
    _loss(builder, node, "softmax.cu", builder.kernel("softmax_cross_entropy", weights is not None),
          _gradient_scale(builder, node), In(weights), shared_bytes=4 * classes)


def sigmoid(builder: Builder, node: Node) -> None:
    """Like `softmax`, for sigmoid and binary cross entropy."""
    _, classes = builder.shapes[node.input("data")]
    _loss(builder, node, "sigmoid.cu", builder.kernel("sigmoid_cross_entropy"),
          _gradient_scale(builder, node) / classes, ctypes.c_float(node["threshold"]))


def custom(builder: Builder, node: Node) -> None:
    """Like `softmax`, for a loss whose kernel is generated from a formula."""
    _loss(builder, node, written(formula_of(node)), builder.kernel("custom_loss"), _gradient_scale(builder, node))


def written(formula: Formula) -> Written:
    """The source code of a formula's kernel."""
    return Written(f'#include "labels.cuh"\n\n{formula.cuda()}\n#include "custom_loss.cuh"\n')


def _gradient_scale(builder: Builder, node: Node) -> float:
    images, _ = builder.shapes[node.input("data")]
    return node["grad_scale"] / (images if node["normalization"] == "batch" else 1)


def _loss(builder: Builder, node: Node, source: str, kernel: str, gradient_scale: float, *more: Any,
          shared_bytes: int = 0) -> None:
    """Launch a loss kernel with the arguments of softmax_cross_entropy and `more`, and count its hits."""
    training = node.op in LOSSES.values()
    scores, (images, classes) = builder.input(node, "data"), builder.shapes[node.input("data")]
    keep = builder.persistent
    gradient = builder.output(node) if training else None
    probabilities, own_share = (None, keep.own_share) if training else (keep.probabilities, None)
    row_loss = Buffer(f"{node.name}:row_loss", (images,), "float32")
    row_rank = Buffer(f"{node.name}:row_rank", (images,), "int32")
    builder.launch(node, source, kernel, (images, 1, 1), (256, 1, 1),
                   In(scores), In(builder.optional_input(node, "bias", "no_bias")), In(keep.label), In(own_share),
                   Out(probabilities), Out(gradient), Out(row_loss), Out(row_rank), In(keep.loss_scale),
                   ctypes.c_float(gradient_scale), ctypes.c_float(node["smooth_alpha"]), ctypes.c_int(classes),
                   ctypes.c_int(scores.shape[-1]), *more, shared_bytes=shared_bytes)
    builder.launch(node, "softmax.cu", "add_metrics", (1, 1, 1), (256, 1, 1), In(row_loss), In(row_rank),
                   In(keep.num_valid), InOut(keep.metrics))


def bias_gradient(builder: Builder, node: Node) -> None:
    """Launch the bias gradient of the classifier or of a convolution."""
    dy, dbias = builder.input(node, "out_grad"), builder.output(node)
    classes, rows = builder.shapes[Ref(node.name)][0], math.prod(dy.shape[:-1])
    builder.launch(node, "softmax.cu", builder.kernel("bias_gradient"), (-(-classes // 32), 1, 1), (32, 32, 1),
                   In(dy), Out(dbias), ctypes.c_int(rows), ctypes.c_int(classes), ctypes.c_int(dy.shape[-1]))


LAUNCHES: Launches = {
    "SoftmaxOutput": padded_rows(softmax),
    "SoftmaxCrossEntropy": padded_rows(softmax),
    "SigmoidOutput": padded_rows(sigmoid),
    "SigmoidCrossEntropy": padded_rows(sigmoid),
    "CustomOutput": padded_rows(custom),
    "CustomLoss": padded_rows(custom),
    "BiasGrad": padded_rows(bias_gradient, reads_padded),
}
