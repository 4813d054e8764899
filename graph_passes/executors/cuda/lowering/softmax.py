"""The classifier's bias, softmax, loss and metrics."""

from __future__ import annotations

import ctypes
import math

from graph_passes.executors.cuda.lowering.builder import Builder, require
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node, Ref


def softmax(builder: Builder, node: Node) -> None:
    """Training: loss, metrics and the gradient of the scores. Inference: probabilities and metrics."""
    training = node.op == "SoftmaxCrossEntropy"
    classifier = builder.graph[node.inputs[0].node]
    require(classifier.op == "FullyConnected", node, "does not follow a FullyConnected: no GPU lowering")
    scores = builder.input(node, 0)
    images, pitch, classes = scores.shape[0], scores.shape[3], classifier["num_hidden"]
    bias = None if classifier["no_bias"] else builder.input(classifier, 2)
    keep = builder.persistent
    gradient = builder.output(node, shape=scores.shape) if training else None
    probabilities, mixup = (None, keep.mixup) if training else (keep.probabilities, None)
    row_loss = Buffer(f"{node.name}:row_loss", (images,), "float32")
    row_rank = Buffer(f"{node.name}:row_rank", (images,), "int32")
    scale = node["grad_scale"] / (images if node["normalization"] == "batch" else 1)
    builder.launch(node, "softmax.cu", builder.kernel("softmax_cross_entropy"), (images, 1, 1), (256, 1, 1),
                   (scores, bias, keep.label, mixup, probabilities, gradient, row_loss, row_rank, keep.loss_scale,
                    ctypes.c_float(scale), ctypes.c_float(node["smooth_alpha"]), ctypes.c_int(classes),
                    ctypes.c_int(pitch)),
                   (scores, bias, keep.label, mixup), (probabilities, gradient, row_loss, row_rank),
                   shared_bytes=4 * classes)
    builder.launch(node, "softmax.cu", "add_metrics", (1, 1, 1), (256, 1, 1),
                   (row_loss, row_rank, keep.num_valid, keep.metrics), (row_loss, row_rank), (keep.metrics,))


def bias_gradient(builder: Builder, node: Node) -> None:
    """Of the classifier, or of a convolution. In front of a BatchNorm, which takes away the mean, it is 0: nothing is
    launched, since gradients start as zeros."""
    source, output = node.inputs[0]
    if output == 0 and builder.graph[source].op.startswith("BatchNorm"):
        return
    dy, dbias = builder.input(node, 0), builder.output(node)
    classes, rows = builder.shapes[Ref(node.name)][0], math.prod(dy.shape[:-1])
    builder.launch(node, "softmax.cu", builder.kernel("bias_gradient"), (-(-classes // 32), 1, 1), (32, 32, 1),
                   (dy, dbias, ctypes.c_int(rows), ctypes.c_int(classes), ctypes.c_int(dy.shape[-1])),
                   (dy,), (dbias,))
