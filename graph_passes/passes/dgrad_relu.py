"""The gradient of a 1x1 convolution's data, with the sums of the BatchNorm + ReLU before it."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref
from graph_passes.passes.choice import Choose
from graph_passes.passes.dgrad_reduce import is_streamed


def dgrad_relu(graph: Graph, choose: Choose) -> Graph:
    """Fuse the gradient of a 1x1 convolution's data with the first half of the backward pass of the BatchNorm + ReLU
    whose output that data was.

        before    dy, weight -> ConvolutionDgrad -> dx;  dx, x -> BatchNormReluBackwardReduce `b` -> dgamma, dbeta
                  dx, x, dgamma, dbeta -> BatchNormReluBackwardApply
        after     dy, weight, x -> DgradReluReduce `b` -> dgamma, dbeta, dz
                  dz, x, dgamma, dbeta -> BatchNormBackwardApply

    dx is not read to sum it up, and written after ReLU. For 16-bit types; the kernel is for GPUs of the Hopper
    generation.
    """
    nodes: list[Node] = []
    for reduction in graph:
        found = _found(graph, reduction)
        if found is None:
            continue
        dgrad, apply = found
        data, saved, gamma, beta = (reduction.input(role) for role in ("data", "saved", "gamma", "beta"))
        fused = Node("DgradReluReduce", reduction.name, (*dgrad.inputs, data, saved, gamma, beta),
                     {**dgrad.attrs, **reduction.attrs})
        dgamma, dbeta, dz = fused.refs()
        rest = apply.derive("BatchNormBackwardApply", apply.name, (dz, data, gamma, saved, dgamma, dbeta))
        ways = {"separate": [dgrad, reduction, apply], "dgrad_relu": [fused, rest]}
        if choose(graph, reduction, ways) == "dgrad_relu":
            nodes += [fused, rest]
    return graph.replace(nodes, {})


def _found(graph: Graph, reduction: Node) -> tuple[Node, Node] | None:
    """The gradient, and the second half, if all three belong together."""
    if reduction.op != "BatchNormReluBackwardReduce" or not reduction["single_grad"]:
        return None
    gradient = reduction.input("out_grad")
    readers = {reader.op: reader for reader in graph.consumers[gradient]}
    apply = readers.get("BatchNormReluBackwardApply")
    if (not is_streamed(graph[gradient.node]) or apply is None or len(graph.consumers[gradient]) != 2
            or gradient in graph.outputs or any(apply.input(role) != Ref(reduction.name, number)
                                                for number, role in enumerate(("gamma_grad", "beta_grad")))):
        return None
    return graph[gradient.node], apply
