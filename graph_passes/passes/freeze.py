"""Fine-tuning: the beginning of a network stays as it is, or learns more slowly than its classifier."""

from __future__ import annotations

from graph_passes import roles
from graph_passes.errors import GraphError
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import BATCH_NORMS

BACKBONE = "backbone"


def freeze(graph: Graph, prefix: str) -> Graph:
    """Mark the layers whose names begin with `prefix`, and all that they depend on, as not to be trained.

        before    data, weight -> Convolution -> BatchNorm
        after     data, weight(lr_mult=0) -> Convolution -> BatchNorm(use_global_stats=True), gamma(lr_mult=0), ...

    These are MXNet's own attributes. A frozen BatchNorm normalises with its running statistics in training too, and
    leaves them as they are; so does one that alone reads a frozen convolution. `prefix` is of names as `graph` has them
    ("stage2", "stage2_block1_conv1"), or "backbone": all but the classifier. For a network in which nothing is fused
    yet.

    Raises GraphError where no name begins so, and where nothing would be left to train.
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
    """Mark the parameters of all layers before the classifier, but those that are frozen, to have their learning rate
    multiplied by `factor`.

        before    weight
        after     weight(lr_mult=factor)
    """
    before = _with_ancestors(graph, [graph[roles.classifier(graph).inputs[0].node]])
    slowed = before & _parameters(graph) - roles.frozen(graph)

    def mark(node: Node) -> Node | None:
        return node.with_attrs(**{roles.RATE_FACTOR: str(factor)}) if node.name in slowed else None

    return graph.rewrite(mark)


def _with_ancestors(graph: Graph, nodes: list[Node]) -> set[str]:
    """Names of these nodes and of all that they depend on."""
    found = {node.name for node in nodes}
    for node in reversed(list(graph)):  # readers come before what they read
        if node.name in found:
            found.update(ref.node for ref in node.inputs)
    return found


def _parameters(graph: Graph) -> set[str]:
    return {name for name, use in roles.uses(graph).items() if use.input in ("weight", "bias", "gamma", "beta")}


def _first_words(graph: Graph) -> list[str]:
    """Of the names of layers with parameters, but for the classifier: "stem", "stage1", ..."""
    names = [use.node.name for name, use in roles.uses(graph).items() if name in _parameters(graph)]
    return list(dict.fromkeys(name.split("_")[0] for name in names if name != roles.classifier(graph).name))
