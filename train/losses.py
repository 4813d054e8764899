"""Losses that plug-ins define: functions of scores and targets that return an MXNet Symbol."""

from __future__ import annotations

from typing import Any, NamedTuple

from common import plugins
from common.mxnet_compat import mx
from common.plugins import Registered
from graph_passes import Graph, GraphError, passes
from graph_passes.operators.formula import SCORES, TARGETS, read
from train.errors import TrainError
from train.options.optimizer import BCE, LOSSES, SOFTMAX


class Loss(NamedTuple):
    """A plug-in's loss."""

    symbol: str  # the loss's Symbol, as JSON
    probabilities: str  # the function from scores to probabilities: "softmax" or "sigmoid"


def check(name: str) -> None:
    """Raise UserError if no loss has this name, or if the loss cannot be used for training."""
    if name not in LOSSES:
        _of_plugin(name)


def use(graph: Graph, name: str) -> Graph:
    """The network with a plug-in's loss in place of its SoftmaxOutput. Raises UserError like `check`."""
    return passes.custom_loss(graph, *_of_plugin(name))


def answer_of(name: str) -> str:
    """SOFTMAX or BCE: the built-in loss that turns scores into probabilities as this loss does. Programs that only use
    the network need no other property of the loss.
    """
    if name in LOSSES:
        return name
    return BCE if plugins.get("loss", name, LOSSES).made.probabilities == "sigmoid" else SOFTMAX


def _of_plugin(name: str) -> Loss:
    plugin = plugins.get("loss", name, LOSSES)
    variables = [mx.sym.Variable(each) for each in (SCORES, TARGETS)]
    with mx.name.NameManager():  # counts names from 0, so that every call makes an identical Symbol
        made: Any = plugins.call(plugin, *variables, what=plugin.made.function)
    if not isinstance(made, mx.sym.Symbol):
        raise _fault(plugin, f"returned a {type(made).__name__}: return a Symbol, made of scores and targets by mx.sym")
    loss = Loss(made.tojson(), plugin.made.probabilities)
    try:
        read(*loss)
    except GraphError as error:
        raise _fault(plugin, str(error)) from None
    return loss


def _fault(plugin: Registered, sentence: str) -> TrainError:
    return TrainError(f"the loss {plugin.name} ({plugin.place}) {sentence}")
