"""A network's features: the input of its classifier, one vector per image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from graph_passes import Graph, Node, Ref, roles
from graph_passes.executors import Executor, create_executor
from train import models
from train.build import build_executor, check_memory
from train.checkpoint import Checkpoint
from train.config import Config
from train.devices import Placement
from train.models.network import Network


def features_graph(network: Network) -> Graph:
    """The network without its classifier; its output is (N, C) in most networks, (N, 1, 1, C) in some. If the
    classifier is a convolution, the classifier's input is averaged over the pixels.
    """
    graph, classifier = network.graph, roles.classifier(network.graph)
    if classifier.op == "FullyConnected":
        return Graph(graph, classifier.inputs[:1], graph.attrs)
    mean = Node("Pooling", graph.unused_name("features_pool"), classifier.inputs[:1],
                {"pool_type": "avg", "global_pool": True, "kernel": (1, 1), "layout": classifier["layout"]})
    return Graph([*graph, mean], [Ref(mean.name)], graph.attrs)


class Features:
    """Computes features with an executor of its own. `config` has the batch size and the image size. Raises GraphError
    and TrainError.
    """

    def __init__(self, trained: Checkpoint, config: Config, placement: Placement) -> None:
        weight, *_ = models.create(config.model, trained.num_classes).classifier
        self._channels = trained.params[weight].shape[-1]
        make = _within_the_network if placement.executor == "cuda" else _without_classifier
        self._executor = make(trained, config, placement)

    def infer(self, data: Any) -> None:
        """Compute the features of a batch (N, size, size, channels), asynchronously."""
        self._executor.infer(data)

    def request(self) -> Callable[[], np.ndarray]:
        """Request the features (N, C), float32, of the latest `infer`. Returns a function, to be called once, that
        waits for them."""
        receive = self._executor.request_probabilities()

        def flat() -> np.ndarray:
            found = receive()
            return found.reshape(len(found), -1, self._channels).mean(axis=1)

        return flat

    def close(self) -> None:
        """Free the device's memory."""
        self._executor.close()


def _without_classifier(trained: Checkpoint, config: Config, placement: Placement) -> Executor:
    check_memory(config, trained.num_classes, config.inference_image_size, placement, training=False)
    graph = features_graph(models.create(config.model, trained.num_classes))
    size = config.inference_image_size
    executor = create_executor(placement.executor, graph, {"data": (config.batch_size, size, size, 3)},
                               placement.device)
    executor.set_params({name: trained.params[name] for name in executor.params}, trained.aux)
    return executor


def _within_the_network(trained: Checkpoint, config: Config, placement: Placement) -> Executor:
    """The cuda executor of the whole network, whose inference returns the features: it needs a network that can be
    trained.
    """
    network = models.create(config.model, trained.num_classes)
    return build_executor(config, trained.num_classes, config.inference_image_size, placement, trained,
                          answer=roles.classifier(network.graph).inputs[0])
