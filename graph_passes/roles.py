"""The role of each parameter in a network: which operator reads it, as which input, and at which depth."""

from __future__ import annotations

from typing import NamedTuple

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import BATCH_NORMS, OPERATORS


class Use(NamedTuple):
    """The operator that reads a parameter, and the role of the parameter as an input: "weight", "bias", "gamma",
    "beta", or "parameters" for all parameters of a recurrent layer.
    """

    node: Node
    input: str


def uses(graph: Graph) -> dict[str, Use]:
    """The use of each variable of the graph, inputs included, by the first operator that reads it. A variable that
    multiplies each channel, through a Reshape, is used as "gamma"."""
    found: dict[str, Use] = {}
    for node in graph:
        if node.op in OPERATORS:
            for name, ref in zip(OPERATORS[node.op].input_names(node), node.inputs, strict=True):
                if graph[ref.node].is_variable:
                    found.setdefault(ref.node, _factor(graph, node) or Use(node, name))
    return found


def _factor(graph: Graph, node: Node) -> Use | None:
    """The use of a variable that a Reshape makes the factor of each channel (layer scale, arXiv:2103.17239)."""
    product = graph.sole_reader(Ref(node.name), "broadcast_mul") if node.op == "Reshape" else None
    return Use(product, "gamma") if product else None


RATE_FACTOR = "__lr_mult__"  # attribute of a parameter by which MXNet's Module multiplies the learning rate


def rate_factors(graph: Graph) -> dict[str, float]:
    """The factor of the learning rate, for each parameter for which the graph sets one."""
    return {node.name: float(node.attrs[RATE_FACTOR]) for node in graph
            if node.is_variable and RATE_FACTOR in node.attrs}


def frozen(graph: Graph) -> frozenset[str]:
    """The parameters and running statistics that training does not change (`passes/freeze.py`)."""
    kept = {ref.node for node in graph if node.op in BATCH_NORMS and node["use_global_stats"]
            for ref in OPERATORS[node.op].aux_inputs(node)}
    return frozenset(kept | {name for name, factor in rate_factors(graph).items() if factor == 0})


def weights(graph: Graph) -> frozenset[str]:
    """The parameters with weight decay, and with a separate learning rate in LARS and LAMB: weights of convolutions and
    fully connected layers, but no bias, gamma or beta (He et al., arXiv:1812.01187, section 3.1). The parameters of a
    recurrent layer, biases included, are one vector, which counts as a weight."""
    return frozenset(name for name, use in uses(graph).items() if use.input in ("weight", "parameters"))


def images(graph: Graph) -> frozenset[Ref]:
    """The network's images, as they are given and with rows and columns in reverse order."""
    reverse = (Ref(node.name) for node in graph.consumers.get(Ref("data"), ()) if node.op == "reverse")
    return frozenset((Ref("data"), *reverse))


def first_weights(graph: Graph) -> frozenset[str]:
    """Weights of the convolutions that read the images."""
    given = images(graph)
    return frozenset(name for name, use in uses(graph).items()
                     if use.input == "weight" and use.node.inputs[0] in given)


CLASSIFIERS = ("FullyConnected", "Convolution")


def classifier(graph: Graph) -> Node:
    """The layer whose outputs are the classes' scores: the last one that is fully connected or a convolution. Operators
    that may follow a convolution (SqueezeNet's ReLU and global pooling) keep one channel for each class.
    """
    return next(node for node in reversed(list(graph)) if node.op in CLASSIFIERS)


def trained(graph: Graph) -> frozenset[str]:
    """The parameters that training changes, and the operators that depend on one of them."""
    kept, found = frozen(graph), set()
    for name, use in uses(graph).items():
        if use.input in ("weight", "bias", "gamma", "beta", "parameters") and name not in kept:
            found.add(name)
    for node in graph:
        if any(ref.node in found for ref in node.inputs):
            found.add(node.name)
    return frozenset(found)


def branches(graph: Graph) -> dict[str, Ref]:
    """The end of each residual branch, by the sum that reads it, from the first block to the last. The graph must not
    be fused yet.

    Both summands are computed from a common tensor. The branch is the summand with more operators in between; the other
    summand is the shortcut, which is the common tensor itself or a projection of it.
    """
    found = {}
    for node in graph:
        if node.op == "elemwise_add":
            paths = [_path(graph, ref) for ref in node.inputs]
            shared = set(paths[0]) & set(paths[1])
            own = [[name for name in path if name not in shared] for path in paths]
            if any(own):
                found[node.name] = Ref(max(own, key=len)[0])
    return found


def branch_gammas(graph: Graph) -> frozenset[str]:
    """Gamma of the last BatchNorm of each residual branch. The graph must not be fused yet. Squeeze-and-excitation may
    follow the BatchNorm."""
    ends = (graph[ref.node] for ref in branches(graph).values())
    ends = (graph[end.inputs[0].node] if end.op == "broadcast_mul" else end for end in ends)
    return frozenset(end.inputs[1].node for end in ends if end.op == "BatchNorm")


def _path(graph: Graph, ref: Ref) -> list[str]:
    """Names of the operators from a tensor back to the input, along each operator's data input."""
    names = []
    while not graph[ref.node].is_variable:
        names.append(ref.node)
        ref = graph[ref.node].inputs[0]
    return names
