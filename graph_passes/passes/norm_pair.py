"""The BatchNorm of a projection shortcut and the BatchNorm + add + ReLU that adds it become one operator."""

from __future__ import annotations

from graph_passes.graph import Graph, Node, Ref

_SAME = ("eps", "momentum", "fix_gamma", "axis")  # what both must agree in


def norm_pair(graph: Graph) -> Graph:
    """Fuse the halves of two BatchNorms whose outputs are added up, forward and backward.

        before    x_2 -> BatchNormApply -> shortcut;  x, shortcut -> BatchNormAddReluApply `bn` -> y, saved, ..., mask
        after     x, x_2 -> BatchNormPairApply `bn` -> y, saved, ..., mask, saved_2, ...

        before    dy, x, mask -> BatchNormAddReluBackwardReduce -> dgamma, dbeta, dz -> BatchNormBackwardApply -> dx
                  dz, x_2 -> BatchNormBackwardReduce -> dgamma_2, dbeta_2 -> BatchNormBackwardApply -> dx_2
        after     dy, x, x_2, mask -> BatchNormPairBackwardReduce -> dgamma, dbeta, dz, dgamma_2, dbeta_2
                  dz, x, x_2, ... -> BatchNormPairBackwardApply -> dx, dx_2

    Neither BatchNorm's output is written, and dz is read once for both. All three read the factors of images that are
    dropped, if `bn` has some.
    """
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    for norm in graph:
        shortcut = _added(graph, norm)
        halves = [_backward(graph, one) for one in (norm, shortcut)] if shortcut else []
        if shortcut is None or not all(halves):
            continue
        reductions, applies = zip(*halves, strict=True)
        factors = [] if norm["no_factors"] else [norm.input("factors")]
        pair = norm.derive("BatchNormPairApply", norm.name, (*norm.inputs[:6], *shortcut.inputs, *factors))
        reduction = _reduction(*reductions)
        apply = applies[0].derive("BatchNormPairBackwardApply", applies[0].name, (
            reduction.output("masked_grad"),
            *(ref for one, suffix in zip(reductions, ("", "_2"), strict=True) for ref in (
                one.input("data"), one.input("gamma"), one.input("saved"),
                reduction.output(f"gamma_grad{suffix}"), reduction.output(f"beta_grad{suffix}"))), *factors))
        nodes += [pair, reduction, apply]
        moved |= {shortcut.output(role): pair.output(f"{role}_2") for role in ("saved", "moving_mean", "moving_var")}
        moved |= {reductions[1].output(role): reduction.output(f"{role}_2") for role in ("gamma_grad", "beta_grad")}
        moved[Ref(applies[1].name)] = apply.output("data_grad_2")
    return graph.replace(nodes, moved)


def _added(graph: Graph, norm: Node) -> Node | None:
    """The BatchNorm that is added by `norm` alone, if both can be one."""
    if norm.op != "BatchNormAddReluApply":
        return None
    addend = norm.input("addend")
    other = graph[addend.node]
    alone = graph.sole_reader(addend, norm.op) and other.op == "BatchNormApply"
    return other if alone and all(norm[name] == other[name] for name in _SAME) else None


def _backward(graph: Graph, norm: Node) -> tuple[Node, ...]:
    """The halves of a BatchNorm's backward pass; none where one of them is fused with something else already."""
    readers = graph.consumers[norm.output("saved")]
    found = [next((reader for reader in readers if reader.op.endswith(half)), None)
             for half in ("BackwardReduce", "BackwardApply")]
    return tuple(node for node in found if node) if all(found) else ()


def _reduction(one: Node, other: Node) -> Node:
    """That of both, with the name of the one that has the mask."""
    both = (reduction.input(role) for reduction in (one, other) for role in ("data", "saved"))
    last = one.inputs[5:]  # factors of images that are dropped, and the second gradient, where there are any
    return one.derive("BatchNormPairBackwardReduce", one.name,
                      (one.input("out_grad"), one.input("mask"), *both, *last))
