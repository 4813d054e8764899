"""Which launches a BatchNorm's backward pass is made of, together with those of the convolutions around it.

It is a reduction to sums, which are the gradients of gamma and beta, and then the gradient of the input. The reduction
may come with what it starts from, the gradient of a 1x1 convolution's data (`pointwise.dgrad_reduce`). The second half
may go on through the 1x1 convolution before it, to the sums of the BatchNorm before that one
(`pointwise.norm_backward`). The planner takes what is faster.
"""

from __future__ import annotations

from functools import partial

from graph_passes.executors.cuda.lowering import batch_norm, batch_norm_pair, batch_norm_pool, convolution, pointwise
from graph_passes.executors.cuda.lowering.builder import Builder, rows_and_channels
from graph_passes.executors.cuda.lowering.pointwise import NormConvolution
from graph_passes.graph import Node, Ref


def backward(builder: Builder, node: Node) -> None:
    behind = builder.graph[node.inputs[0].node]
    if behind.op == "MaxPoolingBackward" and behind.inputs[1].node in builder.fusions.pooled:
        _stem_backward(builder, node, behind)
        return
    norms = batch_norm_pair.norms(builder, node)
    held = [builder.fusions.held.pop(ref) for ref in dict.fromkeys(node.inputs) if ref in builder.fusions.held]
    for other in held[1:]:
        convolution.plain_dgrad(builder, other)
    if held:
        _reduce_after(builder, held[0], node)
    else:
        batch_norm.backward_reduce(builder, node)
    batch_norm.share(builder, node, *(builder.output(norm, index) for index in (1, 2) for norm in norms))
    builder.fusions.done |= {norm.name for norm in norms}
    convolutions = [found for norm in norms if (found := pointwise.convolution_before(builder, norm))]
    if len(convolutions) == len(norms):
        _backward_through(builder, node, convolutions)
    else:
        batch_norm.backward_apply(builder, node, batch_norm.stores_dz(node))


def _stem_backward(builder: Builder, node: Node, pool: Node) -> None:
    """Of what `batch_norm_pool.apply` made one launch. The gradient of a convolution by stem.cu is left to the launch
    that reads it."""
    dz = batch_norm_pool.backward_reduce(builder, node, pool)
    batch_norm.share(builder, node, builder.output(node, 1), builder.output(node, 2))
    readers = [reader.op for reader in builder.readers(node)]
    if node.inputs[1].node in builder.fusions.stems and readers == ["ConvolutionWgrad"]:
        builder.fusions.pool_gradients[Ref(node.name)] = (node, pool, dz)
    else:
        batch_norm_pool.backward_apply(builder, node, pool, dz)


def _reduce_after(builder: Builder, dgrad: Node, node: Node) -> None:
    """The gradient of a 1x1 convolution's data, and the sums of the BatchNorm backward that reads it."""

    def separate() -> None:
        convolution.plain_dgrad(builder, dgrad)
        batch_norm.backward_reduce(builder, node)

    k, (rows, columns) = builder.input(dgrad, 1).shape[0], rows_and_channels(node, builder.input(node, 1))
    paired = len(batch_norm_pair.norms(builder, node)) == 2
    names = f"{node.op}{' of a pair' * paired}{'' if node['single_grad'] else ' with another gradient'}"
    builder.fastest(node, f"dgrad {rows}x{k} -> {columns}, {names}, {builder.dtype}",
                    {"separate": separate, "dgrad_reduce": partial(pointwise.dgrad_reduce, builder, dgrad, node)})


def _backward_through(builder: Builder, node: Node, convolutions: list[NormConvolution]) -> None:
    """From dz through BatchNorm and the 1x1 convolutions before it, to the BatchNorm that each of them has read."""
    from_dz = batch_norm.stores_dz(node)
    relu = node.op == "BatchNormReluBackward" and not from_dz  # has it still to be applied?
    dz = batch_norm.dz(builder, node) if from_dz else builder.input(node, 0)

    def separate() -> None:
        batch_norm.backward_apply(builder, node, from_dz)
        for one in convolutions:
            convolution.wgrad(builder, one.wgrad)
            convolution.plain_dgrad(builder, one.dgrad)
            if one.behind:
                batch_norm.backward_alone(builder, one.behind)

    def fused() -> None:
        for one in convolutions:
            pointwise.norm_backward(builder, one, dz, relu)
            if one.behind:
                batch_norm.backward_apply(builder, one.behind, from_dz=True)

    problem = []
    for one in convolutions:
        x, w = builder.input(one.wgrad, 1), builder.input(one.dgrad, 1)
        problem += [f"{x.shape} -> {w.shape[0]}{' after BatchNormRelu' * bool(one.behind)}"]
        builder.fusions.done |= {each.name for each in (one.wgrad, one.dgrad, one.behind) if each}
    builder.fastest(node, f"backward of {node.op} and 1x1 convolution: {', '.join(problem)}, {builder.dtype}",
                    {"separate": separate, "norm_backward": fused})
