"""Every network by name can be lowered for an H100, for training and for inference; no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
from test_training_step import NETWORKS, fused
from test_without_gpu import FakeConvolutions, check_memory, lower_graph

from graph_passes import Graph, GraphError, passes, pipeline
from train import models

# One small network of each family, and those in which the families differ: fully connected layers, odd channels.
SHORT = ("resnet18", "resnet18d", "resnet18_v2", "resnext50_32x4d", "wide_resnet50_2", "tf_efficientnet_lite0",
         "mobilenet_v3_small", "regnet_y_400mf", "convnext_tiny", "seresnet18", "alexnet", "squeezenet1_1",
         "mobilenet_v2_0_25")


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN is asked for tensors that its tensor-core kernels take: of 8 channels or multiples, or of padded images."""

    def plan(self: FakeConvolutions, problem: Any) -> Any:
        if problem.y[3] % 8 or (problem.x[3] % 8 and problem.x[3] != 4):
            raise GraphError(f"{problem}: no multiples of 8")
        return plan_of_any(self, problem)

    plan_of_any = FakeConvolutions.plan
    monkeypatch.setattr(FakeConvolutions, "plan", plan)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.long(but=[f"{name}-float16" for name in SHORT])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", models.names())
def test_a_network_is_lowered(name: str, dtype: str) -> None:
    check_lowering(name, 1000, dtype)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("name", ["squeezenet1_1", "mobilenet_v2_0_25"])
def test_another_number_of_classes(name: str) -> None:
    """Their classifiers are convolutions."""
    check_lowering(name, 7, "float16")


@pytest.mark.parametrize("network, size, dtype", [pytest.param(network, size, dtype, id=f"{name}-{dtype}")
                                                  for name, network, size, _, dtypes in NETWORKS for dtype in dtypes])
def test_small_networks(network: Graph, size: tuple[int, ...], dtype: str) -> None:
    """The networks whose steps a GPU is tested with, all candidates among them."""
    lowered, store = lower_graph(fused(network), {"data": size, "softmax_label": size[:1]}, True, dtype, fused=True)
    assert store.gradients.keys() == store.parameters.keys()
    check_memory(lowered.program)


def check_lowering(name: str, classes: int, dtype: str) -> None:
    """Each launch finds its operands, each parameter gets its gradient, and no two living tensors share memory."""
    network, size = models.create(name, classes), models.image_size(name)
    shapes: dict[str, tuple[int, ...]] = {"data": (2, size, size, 3), "softmax_label": (2,)}
    graph = network.graph
    lowered, store = lower_graph(graph, shapes, True, dtype, fused=True)
    assert store.gradients.keys() == store.parameters.keys() == network.shapes()[0].keys()
    # nothing is launched for a bias before a BatchNorm, whose gradient is 0
    assert all(each.endswith("_bias") for each in store.parameters.keys() - lowered.ready.keys())
    check_memory(lowered.program)
    folded = passes.fold_bn(pipeline.run(pipeline.FUSED, passes.remove_dropout(graph)))
    lowered, _ = lower_graph(folded, shapes, False, dtype, fused=True)
    check_memory(lowered.program)
    for launch in lowered.program.launches:
        launch.enqueue()
