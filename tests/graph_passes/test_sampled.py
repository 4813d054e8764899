"""The sampling oracle, for every tensor of a step: it accepts the rounding of a GPU, and detects a single wrong
channel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from sampled import RULES, samples
from step_networks import (
    bottlenecks,
    flattened,
    gradients_alone,
    own_forms,
    pre_activation,
    random_variables,
    small_resnet,
    strided,
)

from common.mxnet_compat import mx
from graph_passes import Graph, Node, Ref, passes, pipeline
from graph_passes.choice import fewest, repeatable
from graph_passes.executors.reference import evaluate
from graph_passes.operators import OPERATORS


def grouped(classes: int = 7) -> Any:
    """Grouped convolutions, one of them with a bias; sums and ReLUs that no BatchNorm absorbs."""
    def conv(x: Any, name: str, **more: Any) -> Any:
        return mx.sym.Convolution(x, num_filter=16, kernel=(3, 3), pad=(1, 1), layout="NHWC", name=name, **more)

    x = mx.sym.relu(conv(mx.sym.Variable("data"), "first"))
    y = conv(x, "second", num_group=4, stride=(2, 2), no_bias=True)
    y = mx.sym.relu(mx.sym.BatchNorm(y, axis=3, fix_gamma=False, name="norm"))
    y = mx.sym.relu(mx.sym.elemwise_add(y, y))
    x = mx.sym.relu(mx.sym.elemwise_add(conv(y, "third", num_group=2), y))
    x = mx.sym.FullyConnected(mx.sym.Flatten(mx.sym.elemwise_add(conv(x, "fourth"), x)), num_hidden=classes, name="fc")
    return mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax")


NETWORKS = {
    "basic blocks": (lambda: small_resnet(False), (5, 17, 14, 3)),
    "bottlenecks": (lambda: bottlenecks(7, 7), (5, 42, 38, 4)),
    "wide bottlenecks": (lambda: bottlenecks(3, 7, 128), (5, 15, 13, 4)),
    "wider bottlenecks": (lambda: bottlenecks(3, 7, 256), (5, 9, 8, 4)),
    "strided bottlenecks": (strided, (5, 15, 13, 3)),
    "BatchNorm first": (pre_activation, (7, 19, 17, 3)),
    "groups": (grouped, (5, 9, 8, 4)),
    "flattened pooling": (lambda: flattened("Pooling"), (5, 11, 8, 4)),
    "binary cross entropy": (lambda: small_resnet(False), (5, 9, 8, 3)),
}


def network(name: str) -> Graph:
    graph = Graph.from_json(NETWORKS[name][0]().tojson())
    return passes.binary_cross_entropy(graph) if name == "binary cross entropy" else graph


PRICES = {"fewest": fewest, "repeatable": repeatable, "own": own_forms, "gradients alone": gradients_alone}
Call = tuple[Node, list[np.ndarray], list[np.ndarray | None]]  # a node, its inputs, its outputs


CASES = [(name, way) for name in NETWORKS for way in PRICES]


@pytest.fixture(scope="module", params=CASES, ids=[f"{name}-{way}" for name, way in CASES])
def calls(request: pytest.FixtureRequest, seed: int) -> list[Call]:
    """The calls of a network's step; two tests read them, and none changes them."""
    return list(computed(*request.param, np.random.default_rng([seed, CASES.index(request.param)])))


def computed(name: str, way: str, rng: np.random.Generator) -> Iterator[Call]:
    """The outputs of every node of a training step in fp16: operators compute in fp32, and stored results are rounded.
    Sums are in fp64, because NumPy adds all pixels one after the other, while a GPU makes many short sums."""
    _, data = NETWORKS[name]
    shapes = {"data": data, "softmax_label": data[:1]}
    graph = network(name)
    values = random_variables(graph, shapes, rng)
    step = pipeline.training_step(graph, shapes, "float16", PRICES[way])
    dtypes = passes.tensor_dtypes(step)
    values["loss_scale"] = np.array([1024.0])
    tensors = {Ref(name): values[name].astype(dtypes[Ref(name)]) for name in step.variables}
    for node in step:
        if node.is_variable:
            continue
        inputs = [tensors[ref] for ref in node.inputs]
        has_sums = any(word in node.op for word in ("Reduce", "Statistics", "DgradStream", "Wgrad", "Weights"))
        dtype = np.float64 if has_sums else np.float32
        exact = evaluate(node, [array.astype(dtype) if array.dtype.kind == "f" else array for array in inputs])
        outputs = [array.astype(dtypes[ref]) for ref, array in zip(node.refs(), exact, strict=True)]
        tensors.update(zip(node.refs(), outputs, strict=True))
        yield node, inputs, [None, *outputs[1:]] if node.get("no_output") else outputs


@pytest.mark.long(but=["basic blocks-*", "groups-fused"])
def test_a_step_is_accepted(calls: list[Call], rng: np.random.Generator) -> None:
    for node, inputs, outputs in calls:
        for sample in samples(node, inputs, outputs, rng):
            assert sample.excess <= 1, (node.op, node.name, sample.output)
            assert sample.decided > 0.9, (node.op, node.name, sample.output)


def with_a_wrong_channel(node: Node, array: np.ndarray) -> np.ndarray:
    """The output with a wrong channel: the channel of the largest element is a fifth too large; for bits and positions,
    other values."""
    broken = array.copy()
    axis = 0 if node.op.endswith(("Wgrad", "Weights")) else -1
    largest = np.unravel_index(np.abs(array.astype(float)).argmax(), array.shape)[axis]
    channel = np.moveaxis(broken, axis, 0)[largest:largest + 1]
    channel[...] = channel * 1.2 if array.dtype.kind == "f" else channel ^ 1
    return broken


@pytest.mark.long(but=["basic blocks-*", "groups-fused"])
def test_a_wrong_channel_is_found(calls: list[Call], rng: np.random.Generator) -> None:
    found = missed = 0
    for node, inputs, outputs in calls:
        names = OPERATORS[node.op].output_names(node)
        for index, array in enumerate(outputs):
            if array is None or not array.any():
                continue  # the gradient of a bias before a BatchNorm
            changed = list(outputs)
            changed[index] = with_a_wrong_channel(node, array)
            checked = samples(node, inputs, changed, rng)
            if max(sample.excess for sample in checked) > 1:
                found += 1
                continue
            missed += 1
            (sample,) = (sample for sample in checked if sample.output == names[index])
            assert sample.bound.max() > 0.1 * np.abs(array).max(), (node.op, node.name, names[index])
    assert missed <= 0.02 * found, "sums of as much above 0 as below it"


@pytest.mark.long
def test_operators_have_rules_and_rules_operators() -> None:
    """An operator that is computed as a whole must have no rounding in between; for fused operators that would be
    wrong."""
    seen = set()
    for name, (_, data) in NETWORKS.items():
        graph, shapes = network(name), {"data": data, "softmax_label": data[:1]}
        for price in PRICES.values():
            seen |= pipeline.training_step(graph, shapes, "float16", price).operators().keys()
    assert RULES.keys() <= seen, RULES.keys() - seen
    fused = {name for name in seen if OPERATORS[name].fused}
    assert fused <= RULES.keys(), fused - RULES.keys()
