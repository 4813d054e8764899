"""A plug-in's network in our form: NHWC, with a loss at its end, and only operators that passes and executors know."""

from __future__ import annotations

from typing import Any

from common import plugins
from common.errors import UserError
from common.mxnet_compat import mx
from common.plugins import Registered
from graph_passes import Graph, GraphError, Ref, passes, roles
from graph_passes.operators import LOSSES, OPERATORS
from train.errors import TrainError
from train.models.network import Symbol

# The parameters of a network must not depend on the size of the images.
SIZES = (224, 256)  # pixels
PARAMETERS = ("weight", "bias", "gamma", "beta", "moving_mean", "moving_var")  # roles of inputs


def build(plugin: Registered, num_classes: int, label_smoothing: float) -> Symbol:
    """The training Symbol of a plug-in's network, like `Network.symbol`. Raises UserError if this program cannot train
    it."""
    with mx.name.NameManager():  # counts from 0, so that layers without a name always get the same name
        symbol = _symbol(plugin, plugins.call(plugin, num_classes))
    scores = _graph(plugin, symbol)
    _check_end(plugin, scores, num_classes)
    scores = passes.layout(scores, "NHWC", inputs=["data"])
    _check_parameters(plugin, scores)
    return mx.sym.SoftmaxOutput(mx.sym.load_json(scores.to_json()), name="softmax", normalization="batch",
                                smooth_alpha=label_smoothing)


def known_operators() -> list[str]:
    """The operators that a network may use, by MXNet's names."""
    return sorted(name for name, each in OPERATORS.items() if name not in LOSSES and not name.startswith("_")
                  and not each.fused and (each.gradient or each.numpy_gradient) and hasattr(mx.sym, name))


def _fault(plugin: Registered, sentence: str) -> UserError:
    return TrainError(f"the model {plugin.name} ({plugin.place}) {sentence}")


def _symbol(plugin: Registered, made: Any) -> Symbol:
    """The return value of a plug-in's function as a Symbol."""
    if isinstance(made, mx.gluon.HybridBlock):
        return plugins.call(plugin, mx.sym.Variable("data"), what=made)
    if isinstance(made, mx.gluon.Block):
        raise _fault(plugin, f"is a Gluon Block of the type {type(made).__name__}, which has no graph: make it a "
                             "HybridBlock")
    if not isinstance(made, mx.sym.Symbol):
        raise _fault(plugin, f"is a {type(made).__name__}: return a Symbol, or a Gluon HybridBlock")
    return made


def _graph(plugin: Registered, symbol: Symbol) -> Graph:
    """The Symbol as a graph of known operators."""
    try:
        graph = Graph.from_json(symbol.tojson(), source="its Symbol")
        if unknown := sorted(graph.operators().keys() - set(known_operators())):
            first = next(node for node in graph if node.op == unknown[0])
            raise _fault(plugin, f"has the operator {unknown[0]} ({first.name}), which this program does not know: "
                                 f"make it of {', '.join(known_operators())}, or add the operator ({plugins.WALKS})")
        if "data" not in graph.arguments:
            raise _fault(plugin, "has no input named data: let it read mx.sym.Variable(\"data\")")
        return graph
    except GraphError as error:
        raise _fault(plugin, f"cannot be read: {error}") from None


def _check_end(plugin: Registered, graph: Graph, num_classes: int) -> None:
    """Raise UserError unless the graph ends in the scores of a classifier."""
    end = graph[graph.outputs[0].node]
    if len(graph.outputs) != 1 or end.op != "FullyConnected" or end["no_bias"]:
        raise _fault(plugin, f"ends in {end.op} ({end.name}): let it end in the classes' scores, made by "
                             "FullyConnected with a bias (Gluon: Dense)")
    if end["num_hidden"] != num_classes:
        raise _fault(plugin, f"has {end['num_hidden']} scores for {num_classes} classes: use its argument num_classes")


def _check_parameters(plugin: Registered, graph: Graph) -> None:
    """Raise UserError unless each variable is a parameter of a layer whose shape does not depend on the size of
    images."""
    for name, use in roles.uses(graph).items():
        if name != "data" and use.input not in PARAMETERS:
            raise _fault(plugin, f"has the variable {name}, which is neither data nor a parameter of a layer: leave it "
                                 "out")
    try:
        found = [graph.infer_shapes({"data": (1, size, size, 3)}) for size in SIZES]
    except GraphError as error:
        raise _fault(plugin, f"does not fit images of {SIZES[0]} pixels in NHWC: {error}") from None
    for name in graph.variables:
        first, second = (shapes[Ref(name)] for shapes in found)
        if first != second and name != "data":
            raise _fault(plugin, f"has {name}, whose shape depends on the size of the images ({first} for "
                                 f"{SIZES[0]} pixels, {second} for {SIZES[1]}): let it end in global pooling before "
                                 "the classifier")
