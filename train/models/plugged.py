"""Converts networks of other origin to our form: NHWC, the loss at the end, only operators that passes and executors
know. The networks come from plug-ins, from files (`network_file`) and from Gluon's model zoo (`gluon_zoo`), as Symbols,
Gluon blocks or graphs, in NCHW or NHWC.
"""

from __future__ import annotations

import contextlib
from typing import Any

from common import plugins
from common.mxnet_compat import mx
from common.plugins import Registered
from graph_passes import Graph, GraphError, Node, Ref, passes, roles
from graph_passes.operators import LOSSES, OPERATORS, window
from train.errors import TrainError
from train.models.network import Symbol

# The parameters of a plug-in's network must not depend on the size of the images.
SIZES = (224, 256)  # pixels
PARAMETERS = ("weight", "bias", "gamma", "beta", "moving_mean", "moving_var")  # roles of inputs that are parameters
LOSS_OPERATORS = ("SoftmaxOutput", "Softmax", "softmax", "SoftmaxActivation")  # operators that may follow the scores
COUNTS = {"FullyConnected": "num_hidden", "Convolution": "num_filter"}  # the attribute with the number of outputs
# Operators that may stand between a convolution as classifier and the scores. They read and write one number for each
# class.
AFTER_CONVOLUTION = ("Activation", "relu", "Pooling", "mean", "Flatten", "Dropout")


def build(plugin: Registered, size: int, num_classes: int, label_smoothing: float) -> Symbol:
    """The training Symbol of a plug-in's or a file's network, as `Network.symbol`. `size`: see `in_our_form`. Raises
    UserError if it is not a network that this program can train."""
    with fresh_names():
        made = plugins.call(plugin, num_classes)
        network = made if isinstance(made, Graph) else _symbol(plugin, made)
    what = f"the model {plugin.name} ({plugin.place})"
    graph = in_our_form(what, network, num_classes, size)
    if not isinstance(made, Graph):
        _check_any_size(what, graph)
    return with_loss(graph, label_smoothing)


def fresh_names() -> contextlib.AbstractContextManager[Any]:
    """A context in which unnamed layers always get the same names."""
    return mx.name.NameManager()  # type: ignore[no-any-return]  # counts from 0


def in_our_form(what: str, network: Symbol | Graph, num_classes: int, size: int) -> Graph:
    """The graph in NHWC from the images to the scores of its classes.

    Args: what: the network, for messages. network: reads `data`, in NCHW or NHWC, and ends in the scores (N,
        num_classes) or in a softmax of them. num_classes: number of the network's classes. size: height and width, in
        pixels, of images that the network accepts.

    Raises UserError if it is not a network that this program can train.
    """
    graph = without_loss(what, network if isinstance(network, Graph) else _read(what, network))
    check_operators(what, graph)
    _check_classes(what, graph, num_classes)
    graph = passes.reading_nhwc(graph, default="NHWC")
    whole = _whole_windows(_checked(what, _in_nhwc(graph), size), size)
    return _in_nhwc(graph.rewrite(lambda node: node.with_attrs(global_pool=True) if node.name in whole else None))


def with_loss(graph: Graph, label_smoothing: float) -> Symbol:
    """The training Symbol of a graph that ends in scores."""
    return mx.sym.SoftmaxOutput(mx.sym.load_json(graph.to_json()), name="softmax", normalization="batch",
                                smooth_alpha=label_smoothing)


def without_loss(what: str, graph: Graph) -> Graph:
    """The graph up to the scores, if it ends in a softmax of the scores. Raises UserError for any other softmax."""
    end = graph[graph.outputs[0].node]
    if len(graph.outputs) != 1 or end.op not in LOSS_OPERATORS:
        return graph
    if end.op == "softmax" and (end["temperature"] != 1 or end["axis"] not in (-1, 1)):
        raise TrainError(f"{what} ends in softmax ({end.name}) with temperature={end['temperature']:g} and "
                         f"axis={end['axis']}: let it end in the scores, or in a softmax of them with temperature 1 "
                         "and axis -1")
    return Graph(graph, end.inputs[:1], graph.attrs)


def known_operators() -> list[str]:
    """The operators that a network may contain, under MXNet's names."""
    return sorted(name for name, each in OPERATORS.items() if name not in LOSSES and not each.fused
                  and (each.gradient or each.numpy_gradient)
                  and (hasattr(mx.sym, name) or hasattr(mx.sym._internal, name)))


def _symbol(plugin: Registered, made: Any) -> Symbol:
    """The return value of a plug-in's function, as a Symbol."""
    if isinstance(made, mx.gluon.HybridBlock):
        return plugins.call(plugin, mx.sym.Variable("data"), what=made)
    what = f"the model {plugin.name} ({plugin.place})"
    if isinstance(made, mx.gluon.Block):
        raise TrainError(f"{what} is a Gluon Block of the type {type(made).__name__}, which has no graph: make it a "
                         "HybridBlock")
    if not isinstance(made, mx.sym.Symbol):
        raise TrainError(f"{what} is a {type(made).__name__}: return a Symbol, or a Gluon HybridBlock")
    return made


def _read(what: str, symbol: Symbol) -> Graph:
    try:
        return Graph.from_json(symbol.tojson(), source="its Symbol")
    except GraphError as error:
        raise TrainError(f"{what} cannot be read: {error}") from None


def check_operators(what: str, graph: Graph) -> None:
    """Raise UserError unless the graph reads images, and consists of operators that are known."""
    if unknown := sorted(graph.operators().keys() - set(known_operators())):
        first = next(node for node in graph if node.op == unknown[0])
        raise TrainError(f"{what} has the operator {unknown[0]} ({first.name}), which this program does not know: make "
                         f"it of {', '.join(known_operators())}, or add the operator ({plugins.WALKS})")
    if "data" not in graph.arguments:
        raise TrainError(f"{what} has no input named data: let it read mx.sym.Variable(\"data\")")


def classifier(what: str, graph: Graph) -> Node:
    """The layer that computes the scores in which a graph ends. Raises UserError if the graph ends in another layer."""
    end = graph[graph.outputs[0].node]
    node = end
    while node.op in AFTER_CONVOLUTION:
        node = graph[node.inputs[0].node]
    if len(graph.outputs) != 1:
        raise TrainError(f"{what} has {len(graph.outputs)} outputs: let it have one, the classes' scores")
    is_flat = end.op == "Flatten" or (end.op == "mean" and not end["keepdims"])
    is_whole = is_flat and node.op == "Convolution" and window(node).kernel == (1, 1)
    if not (end.op == "FullyConnected" or is_whole):
        raise TrainError(f"{what} ends in {end.op} ({end.name}): let it end in the classes' scores, made by "
                         "FullyConnected (Gluon: Dense), or by a 1x1 Convolution, global pooling and Flatten")
    return node


def _check_classes(what: str, graph: Graph, num_classes: int) -> None:
    count = num_scores(classifier(what, graph))
    if count != num_classes:
        raise TrainError(f"{what} has {count} scores for {num_classes} classes: use its argument num_classes")


def num_scores(classifier: Node) -> int:
    """The number of classes of a classifier."""
    return int(classifier[COUNTS[classifier.op]])


def _checked(what: str, graph: Graph, size: int) -> Graph:
    """The graph. Raises UserError unless the graph accepts images of `size` pixels, and each variable is a parameter of
    a layer.
    """
    for name, use in roles.uses(graph).items():
        if name != "data" and use.input not in PARAMETERS:
            raise TrainError(f"{what} has the variable {name}, which is neither data nor a parameter of a layer: leave "
                             "it out")
    try:
        graph.infer_shapes({"data": (1, size, size, 3)})
    except GraphError as error:
        raise TrainError(f"{what} does not fit images of {size} pixels in NHWC: {error}") from None
    return graph


def _check_any_size(what: str, graph: Graph) -> None:
    """Raise UserError unless the shape of each parameter is equal for images of any size."""
    first, second = (graph.infer_shapes({"data": (1, size, size, 3)}) for size in SIZES)
    for name in graph.variables:
        if name != "data" and first[Ref(name)] != second[Ref(name)]:
            raise TrainError(f"{what} has {name}, whose shape depends on the size of the images ({first[Ref(name)]} "
                             f"for {SIZES[0]} pixels, {second[Ref(name)]} for {SIZES[1]}): let it end in global "
                             "pooling before the classifier")


def _in_nhwc(graph: Graph) -> Graph:
    return passes.layout(graph, "NHWC")


def _whole_windows(graph: Graph, size: int) -> frozenset[str]:
    """The names of poolings whose window covers their whole input, for images of `size` pixels, in a graph in NHWC.
    Global pooling gives equal results for this size, and also accepts images of other sizes.
    """
    shapes = graph.infer_shapes({"data": (1, size, size, 3)})
    return frozenset(
        node.name for node in graph if node.op == "Pooling" and node["layout"] == "NHWC" and not node["global_pool"]
        and (window(node).kernel, window(node).pad) == (shapes[node.inputs[0]][1:3], (0, 0)))
