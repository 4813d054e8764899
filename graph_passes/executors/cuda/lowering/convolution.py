"""Convolutions and the classifier: cuDNN's plans, alone or with BatchNorm's sums, or bias, sum and ReLU, in them."""

from __future__ import annotations

from graph_passes.errors import GraphError
from graph_passes.executors.cuda.convolution import Problem
from graph_passes.executors.cuda.lowering import elementwise, pointwise, stem
from graph_passes.executors.cuda.lowering.builder import Builder, no_lowering, require
from graph_passes.executors.cuda.parameters import VECTOR, padded
from graph_passes.executors.cuda.planner import Decision
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node, Ref
from graph_passes.operators import is_relu

LAUNCH_MS = 0.003  # what a separate launch costs besides its bytes


def forward(builder: Builder, node: Node) -> None:
    """Without bias: with the sums for the BatchNorm of a training step that reads it, where that is faster. With bias:
    here, or in inference by the rule of its epilogue."""
    x, w = builder.input(node, 0), builder.input(node, 1)
    if not node["no_bias"]:
        if not _has_epilogue(builder, node):
            _biased(builder, node, node, relu=False)
        return
    y = builder.output(node)
    _require_vectors(node, y)
    plain, fused = (builder.problem(kind, node, x, w, y) for kind in ("fprop", "fprop_stats"))
    wants_sums = any(reader.op.startswith("BatchNorm") and reader.op.endswith("Train")
                     for reader in builder.readers(node))
    one_group = node["num_group"] == 1  # cuDNN fuses nothing into grouped convolutions
    if wants_sums and one_group and stem.serves(builder, node):
        stem.forward(builder, node)
    elif wants_sums and one_group and _fusing_pays(builder, node, plain, fused, y.num_bytes):
        sums = Buffer(f"{node.name}:sums", (2, y.shape[3]), "float32")
        builder.fusions.sums[Ref(node.name)] = sums
        builder.plan(node, fused, (x, w), (y, sums))
    else:
        builder.plan(node, plain, (x, w), (y,))


def epilogue(builder: Builder, node: Node) -> None:
    """ReLU, or the sum of two tensors and ReLU, behind one or two convolutions with bias, of inference."""
    first, *others = sorted(node.inputs, key=lambda ref: not _has_epilogue(builder, builder.graph[ref.node]))
    if not _ends_in_relu(node):
        raise no_lowering(node)
    require(not builder.is_training and _has_epilogue(builder, builder.graph[first.node]), node,
            "follows no BatchNorm, which has no GPU lowering: put one before it")
    for ref in others:
        if _has_epilogue(builder, builder.graph[ref.node]):
            _biased(builder, builder.graph[ref.node], builder.graph[ref.node], relu=False)
    _biased(builder, builder.graph[first.node], node, True, *(builder.buffers[ref] for ref in others))


def _ends_in_relu(node: Node) -> bool:
    return is_relu(node) or node.op == "AddRelu"


def _has_epilogue(builder: Builder, node: Node) -> bool:
    """Is this a convolution with bias whose ReLU, or sum and ReLU, alone reads it? It is launched in their place."""
    readers = builder.readers(node)
    return node.op == "Convolution" and not node["no_bias"] and len(readers) == 1 and _ends_in_relu(readers[0])


def _biased(builder: Builder, node: Node, result: Node, relu: bool, *addend: Buffer) -> None:
    """Convolution + bias (+ addend) (+ ReLU) as the output of `result`: one cuDNN plan, or two launches where these are
    faster or cuDNN has none."""
    x, w, bias = (builder.input(node, index) for index in range(3))
    y = builder.output(result)
    _require_vectors(node, y)
    plain = builder.problem("fprop", node, x, w, y)
    fused = builder.problem(f"fprop_bias{'_add' if addend else ''}{'_relu' if relu else ''}", node, x, w, y)
    if node["num_group"] == 1 and _fusing_pays(builder, node, plain, fused, 2 * y.num_bytes):
        builder.plan(node, fused, (x, w, bias, *addend), (y,))
        return
    product = Buffer(f"{node.name}:product", y.shape, y.dtype)
    builder.plan(node, plain, (x, w), (product,))
    elementwise.bias_add_relu(builder, result, product, bias, addend, relu)


def _require_vectors(node: Node, y: Buffer) -> None:
    require(y.shape[3] % VECTOR == 0, node, f"has {y.shape[3]} filters: use a multiple of {VECTOR}")


def _fusing_pays(builder: Builder, node: Node, plain: Problem, fused: Problem, separate_bytes: int) -> bool:
    """Is a convolution with something in its epilogue faster than one without and a launch that moves so much? No where
    runs are to be repeatable: time must not decide then, and cuDNN's sums for a BatchNorm are added up in a varying
    order, which its notes on plans do not say (cuDNN 9.19 on an H200: other bits in each of 20 runs)."""
    if builder.convolutions.deterministic:
        return False
    try:
        fused_ms = builder.convolutions.plan(fused).time_ms
    except GraphError:
        fused_ms = float("inf")
    separate_ms = separate_bytes / builder.gpu.bandwidth * 1e3 + LAUNCH_MS
    times = {"separate": builder.convolutions.plan(plain).time_ms + separate_ms, fused.kind: fused_ms}
    decision = Decision(node.name, str(fused), times)
    builder.decisions.append(decision)
    return decision.chosen == fused.kind


def classifier(builder: Builder, node: Node) -> None:
    """A 1x1 convolution of a 1x1 image. The bias is added by the softmax kernel, in fp32."""
    readers = {reader.op for reader in builder.readers(node)}
    require(bool(readers) and readers <= {"SoftmaxOutput", "SoftmaxCrossEntropy"}, node,
            "does not feed a SoftmaxOutput alone: only the classifier has a GPU lowering")
    x, w = builder.input(node, 0), builder.input(node, 1)
    y = builder.output(node, shape=(x.shape[0], 1, 1, padded(node["num_hidden"])))
    builder.plan(node, builder.problem("fprop", node, x, w, y), (x, w), (y,))


def wgrad(builder: Builder, node: Node) -> None:
    """The gradient of the weights."""
    if node.inputs[0] in builder.fusions.pool_gradients:
        stem.wgrad(builder, node, *builder.fusions.pool_gradients[node.inputs[0]])
        return
    dy, x = builder.input(node, 0), builder.input(node, 1)
    dw = builder.output(node)
    builder.plan(node, builder.problem("wgrad", node, x, dw, dy), (x, dy), (dw,))


def dgrad(builder: Builder, node: Node) -> None:
    """The gradient of the data, unless the rule of the BatchNorm that reads it decides how it is made."""
    if _may_be_fused(builder, node):
        builder.fusions.held[Ref(node.name)] = node
    else:
        plain_dgrad(builder, node)


def plain_dgrad(builder: Builder, node: Node) -> None:
    """The gradient of the data, in a launch of its own."""
    dy, w = builder.input(node, 0), builder.input(node, 1)
    dx = builder.output(node)
    builder.plan(node, builder.problem("dgrad", node, dx, w, dy), (dy, w), (dx,))


def _may_be_fused(builder: Builder, node: Node) -> bool:
    """Can the BatchNorm that alone reads this gradient make it itself (`pointwise.dgrad_reduce`)?"""
    return ([reader.op for reader in builder.readers(node)] == ["BatchNormAddReluBackward"]
            and pointwise.DgradReduce.serves(builder, node))
