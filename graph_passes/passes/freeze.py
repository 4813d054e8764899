"""Fine-tuning: freeze the beginning of a network, or let it learn more slowly than its classifier."""

from __future__ import annotations

from graph_passes import roles
from graph_passes.errors import GraphError
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import BATCH_NORMS

BACKBONE = "backbone"


def freeze(graph: Graph, prefix: str) -> Graph:
    """Freeze the layers whose names begin with `prefix`, and everything that they depend on.

        before    data, weight -> Convolution -> BatchNorm
        after     data, weight(lr_mult=0) -> Convolution -> BatchNorm(use_global_stats=True), gamma(lr_mult=0), ...

    `lr_mult` and `use_global_stats` are MXNet's own attributes. A frozen BatchNorm normalises with its running
    statistics in training, too, and does not update them. The same holds for a BatchNorm that is the only reader of a
    frozen convolution. `prefix` is the beginning of names in `graph` ("stage2", "stage2_block1_conv1"), or "backbone":
    all but the classifier. The network must not be fused yet.

    Raises GraphError if no name begins with `prefix`, or if nothing would be left to train.
    """
    classifier = roles.classifier(graph)
    if prefix == BACKBONE:
        ends = [graph[ref.node] for ref in classifier.inputs[:1]]
    else:
        ends = [node for node in graph if not node.is_variable and node.name.startswith(prefix)]
    ends += [reader for node in ends if (reader := graph.sole_reader(Ref(node.name), "BatchNorm"))]
    before, parameters = _with_ancestors(graph, ends), _parameters(graph)
    if not before & parameters:
        raise GraphError(f"no layer with parameters has a name that begins with '{prefix}': there are "
                         f"{', '.join(_first_words(graph))} and {BACKBONE}")
    if classifier.name in before:
        raise GraphError(f"'{prefix}' is the classifier or comes after it, so nothing would be left to train: freeze "
                         f"{BACKBONE}, or a part of it")

    def mark(node: Node) -> Node | None:
        if node.name not in before:
            return None
        if node.op in BATCH_NORMS:
            return node.with_attrs(use_global_stats=True)
        return node.with_attrs(**{roles.RATE_FACTOR: "0.0"}) if node.name in parameters else None

    return graph.rewrite(mark)


def slow_backbone(graph: Graph, factor: float) -> Graph:
    """Multiply the learning rate of all layers before the classifier, except frozen ones, by `factor`.

        before    weight
        after     weight(lr_mult=factor)
    """
    before = _with_ancestors(graph, [graph[roles.classifier(graph).inputs[0].node]])
    slowed = before & _parameters(graph) - roles.frozen(graph)

    def mark(node: Node) -> Node | None:
        return node.with_attrs(**{roles.RATE_FACTOR: str(factor)}) if node.name in slowed else None

    return graph.rewrite(mark)


def _with_ancestors(graph: Graph, nodes: list[Node]) -> set[str]:
    """Names of these nodes and of all nodes that they depend on."""
    found = {node.name for node in nodes}
    for node in reversed(list(graph)):  # in reverse order, readers come before the nodes that they read
        if node.name in found:
            found.update(ref.node for ref in node.inputs)
    return found


def _parameters(graph: Graph) -> set[str]:
    return {name for name, use in roles.uses(graph).items() if use.input in ("weight", "bias", "gamma", "beta")}


def _first_words(graph: Graph) -> list[str]:
    """The first words in the names of layers with parameters, without the classifier: "stem", "stage1", ..."""
    names = [use.node.name for name, use in roles.uses(graph).items() if name in _parameters(graph)]
    return list(dict.fromkeys(name.split("_")[0] for name in names if name != roles.classifier(graph).name))
