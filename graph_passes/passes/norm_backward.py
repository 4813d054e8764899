"""From a BatchNorm's sums through the 1x1 convolution before it, to the sums of the BatchNorm before that one."""

from __future__ import annotations

from typing import NamedTuple

from graph_passes.graph import Graph, Node, Ref
from graph_passes.passes.choice import Choose
from graph_passes.passes.conv1x1 import is_product

# Of the convolution's data -> those it makes: the registers of a block, or of two, hold the gradient of its weights.
CHANNELS = {64: (64, 128, 256), 128: (128, 256, 512)}


def norm_backward(graph: Graph, choose: Choose) -> Graph:
    """Fuse the second half of a BatchNorm's backward pass with the gradients of the 1x1 convolution that it reads.

        before    dz, x -> BatchNormBackwardApply -> dx
                  dx, data -> ConvolutionWgrad `dw`;  dx, weight -> ConvolutionDgrad `ddata`
        after     dz, x, data, weight -> NormConvBackward `dw` -> dw, ddata

    and where `data` comes from a BatchNorm + ReLU of `x_2`, with the first half of that one's backward pass:

        before    ddata, x_2 -> BatchNormReluBackwardReduce -> dgamma, dbeta;  ... -> BatchNormReluBackwardApply `b`
        after     dz, x, x_2, weight -> NormConvReduce `dw` -> dw, dz_2, dgamma, dbeta
                  dz_2, ... -> BatchNormBackwardApply `b`

    dx, the wide one, is not written. Of a pair of BatchNorms, where only one convolution can be done so:

        before    dz, x, x_2 -> BatchNormPairBackwardApply `b` -> dx, dx_2
        after     dz, x_2 -> BatchNormBackwardApply `b` -> dx_2, and dz, x, ... as above

    The kernel is for 16-bit types and GPUs of the Hopper generation.
    """
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    taken: set[str] = set()  # nodes that are part of a way
    for apply in graph:
        found = [] if apply.name in taken else _convolutions(graph, apply)
        if not found:
            continue
        taken |= {node.name for each in found for node in each.nodes}
        others = _others(apply, {each.number for each in found})
        fused = [*others, *(node for each in found for node in each.fused(apply))]
        ways = {"separate": [apply, *(node for each in found for node in each.nodes)], "norm_backward": fused}
        if choose(graph, apply, ways) == "norm_backward":
            nodes += fused
            for each in found:
                moved |= each.moved()
            if others:
                moved[apply.refs()[-1]] = Ref(apply.name)
    return graph.replace(nodes, moved)


class _Convolution(NamedTuple):
    """The gradients of a 1x1 convolution, and the halves of the BatchNorm + ReLU that reads that of its data, if they
    can be made with it. `number`: which of a pair's gradients is read."""

    number: int
    wgrad: Node
    dgrad: Node
    reduction: Node | None
    apply: Node | None

    @property
    def nodes(self) -> list[Node]:
        return [node for node in self[1:] if isinstance(node, Node)]

    def fused(self, norm: Node) -> list[Node]:
        """In place of `nodes`, and of the BatchNorm's `norm`."""
        inputs = [*_of_norm(norm, self.number), self.dgrad.input("weight")]
        relu = [norm.input("beta")] if norm.op == "BatchNormReluBackwardApply" else []
        factors = _factors(norm, self.number)
        attrs = {**norm.attrs, **self.dgrad.attrs, "no_relu": not relu, "no_factors": not factors}
        if self.reduction is None or self.apply is None:
            return [Node("NormConvBackward", self.wgrad.name, (*inputs, self.wgrad.input("data"), *relu, *factors),
                         attrs)]
        data, gamma, saved, beta = (self.reduction.input(role) for role in ("data", "gamma", "saved", "beta"))
        fused = Node("NormConvReduce", self.wgrad.name, (*inputs, data, *relu, gamma, saved, beta, *factors), attrs)
        _, dz, dgamma, dbeta = fused.refs()
        return [fused, from_masked(self.apply, dz, dgamma, dbeta)]

    def moved(self) -> dict[Ref, Ref]:
        """Where their outputs are then."""
        if self.reduction is None:
            return {Ref(self.dgrad.name): Ref(self.wgrad.name, 1)}
        return {Ref(self.reduction.name, index): Ref(self.wgrad.name, index + 2) for index in (0, 1)}


_APPLIES = ("BatchNormBackwardApply", "BatchNormReluBackwardApply", "BatchNormPairBackwardApply")


def _convolutions(graph: Graph, apply: Node) -> list[_Convolution]:
    """Those whose output's gradients the half of a BatchNorm gives, if there is a kernel for them."""
    if apply.op not in _APPLIES:
        return []
    return [each for number, ref in enumerate(apply.refs()) if (each := _convolution(graph, number, ref))]


def _others(apply: Node, numbers: set[int]) -> list[Node]:
    """Of a pair, the half of a BatchNorm alone whose gradient is none of these."""
    others = [number for number in range(apply.num_outputs) if number not in numbers]
    return [apply.derive("BatchNormBackwardApply", apply.name, (*_of_norm(apply, number), *(factors := _factors(
        apply, number))), no_factors=not factors) for number in others]


def _of_norm(apply: Node, number: int) -> list[Ref]:
    """What the half of a BatchNorm reads, of a pair that of one."""
    suffix = "_2" if number else ""
    roles = "data", "gamma", "saved", "gamma_grad", "beta_grad"
    return [apply.inputs[0], *(apply.input(f"{role}{suffix}") for role in roles)]


def _factors(apply: Node, number: int) -> list[Ref]:
    """Of a pair, images of the first are dropped."""
    return [] if number or apply.get("no_factors", True) else [apply.input("factors")]


def _convolution(graph: Graph, number: int, gradient: Ref) -> _Convolution | None:
    readers = {reader.op: reader for reader in graph.consumers.get(gradient, ())}
    if (readers.keys() != {"ConvolutionWgrad", "ConvolutionDgrad"} or len(graph.consumers[gradient]) != 2
            or gradient in graph.outputs):
        return None
    wgrad, dgrad = readers["ConvolutionWgrad"], readers["ConvolutionDgrad"]
    channels = CHANNELS.get(dgrad["data_shape"][3], ())
    # Where one is compact (compact_grad.py) only the other still has the stride.
    if not is_product(dgrad) or not is_product(wgrad) or dgrad["num_filter"] not in channels:
        return None
    return _Convolution(number, wgrad, dgrad, *(relu_halves(graph, Ref(dgrad.name)) or (None, None)))


def relu_halves(graph: Graph, gradient: Ref) -> tuple[Node, Node] | None:
    """The halves of the backward pass of a BatchNorm + ReLU, if they alone read this gradient, and no other one."""
    halves = {reader.op: reader for reader in graph.consumers.get(gradient, ())}
    reduction, apply = (halves.get(f"BatchNormReluBackward{half}") for half in ("Reduce", "Apply"))
    alone = (reduction and apply and len(graph.consumers[gradient]) == 2 and reduction["single_grad"]
             and gradient not in graph.outputs)
    return (reduction, apply) if reduction and apply and alone else None


def from_masked(apply: Node, dz: Ref, dgamma: Ref, dbeta: Ref) -> Node:
    """The second half of the two, where the first has kept the masked gradient."""
    data, gamma, saved = (apply.input(role) for role in ("data", "gamma", "saved"))
    return apply.derive("BatchNormBackwardApply", apply.name, (dz, data, gamma, saved, dgamma, dbeta))
