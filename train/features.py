"""A network's features: the input of its classifier, one vector per image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from graph_passes import Graph, roles
from graph_passes.executors import Executor, create_executor
from train import models
from train.build import build_executor, check_memory
from train.checkpoint import Checkpoint
from train.config import Config
from train.devices import Placement
from train.errors import TrainError
from train.models.network import Network

# The classifier divides features by this, so that the exponentials of softmax cover features up to 8 * 87 below the
# largest one: exp(-87) is about the smallest float32. Division by a power of two is exact.
DIVISOR = 8.0


def features_graph(network: Network) -> Graph:
    """The network without its classifier; its output is (N, C) in most networks, (N, 1, 1, C) in some."""
    return Graph(network.graph, roles.classifier(network.graph).inputs[:1], network.graph.attrs)


class Features:
    """Computes features with its own executor. `config` has the batch size and the image size. Raises GraphError and
    TrainError."""

    def __init__(self, trained: Checkpoint, config: Config, placement: Placement) -> None:
        self._hands_on = placement.executor == "cuda"
        make = _handing_on if self._hands_on else _without_classifier
        self._executor = make(trained, config, placement)

    def infer(self, data: Any) -> None:
        """Compute the features of a batch (N, size, size, channels), asynchronously."""
        self._executor.infer(data)

    def request(self) -> Callable[[], np.ndarray]:
        """Request the features (N, C), float32, of the latest `infer`. Returns a function, to be called once, that
        waits for them."""
        receive = self._executor.request_probabilities()
        if self._hands_on:
            return lambda: handed_on(receive())

        def flat() -> np.ndarray:
            found = receive()
            return found.reshape(len(found), -1)

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


def _handing_on(trained: Checkpoint, config: Config, placement: Placement) -> Executor:
    """An executor whose probabilities encode the features. The cuda executor only runs networks that end in a softmax
    over a classifier's scores. So the classifier is chosen such that its scores are the features and an additional
    0."""
    network = models.create(config.model, trained.num_classes)
    weight, bias = network.classifier
    channels = trained.params[weight].shape[1]
    params = trained.params | {
        weight: np.eye(channels + 1, channels, dtype=np.float32) / np.float32(DIVISOR),
        bias: np.zeros(channels + 1, np.float32),
    }
    passing_on = replace(trained, params=params, class_names=[], class_keys=[])
    config = replace(config, loss="softmax", label_smoothing=0.0)
    return build_executor(config, channels + 1, config.inference_image_size, placement, passing_on)


def handed_on(probabilities: np.ndarray) -> np.ndarray:
    """The features (N, C) decoded from the probabilities (N, C + 1) of `_handing_on`: each is the difference of its
    score from the last score, which is 0. In float32 they are exact to about 1e-6. Raises TrainError for features whose
    exponentials exceed float32."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithms = np.log(probabilities.astype(np.float64))
        found = DIVISOR * (logarithms[:, :-1] - logarithms[:, -1:])
    if not np.isfinite(found).all():
        raise TrainError(f"features are too far apart to be computed on this GPU (by more than {87 * DIVISOR:g}): give "
                         "--device cpu")
    return found.astype(np.float32)

