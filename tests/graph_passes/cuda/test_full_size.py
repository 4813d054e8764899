"""The step that users train with, at its size and with what the planner chose for this GPU: every tensor follows from
what the GPU itself read, element by element."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sampled import UNIT, samples

from graph_passes import Node, Ref, passes, roles
from graph_passes.executors.cuda.options import StepOptions
from graph_passes.executors.cuda.program import Buffer
from graph_passes.executors.cuda.training_step import TrainingStep
from graph_passes.operators import OPERATORS
from graph_passes.optimizers import ArrayOptimizer
from train import models

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SHAPES = {"data": (256, 224, 224, 3), "softmax_label": (256,)}
CLASSES = 1000
MANY = 2000  # elements that are looked at of each tensor, unless it is smaller
Call = tuple[Node, list[np.ndarray], list[np.ndarray | None]]  # a node, what it read, what it wrote


def calls(step: TrainingStep, variables: dict[Ref, np.ndarray]) -> Iterator[Call]:
    """Runs the launches of the step one by one. What a node writes is copied right after its last launch, for memory is
    used again, and kept for those that read it."""
    parameters = {buffer: step.store.parameters[name] for name, buffer in step.store.gradients.items()}
    launches = {name: list(group) for name, group in
                itertools.groupby(step.training.program.launches, key=lambda launch: launch.node)}
    sizes = step.graph.infer_shapes(SHAPES)
    statistics = {ref: step.store.statistics.slices[name] for name, ref in passes.output_names(step.graph).items()
                  if name in step.store.statistics.slices}
    last_reader = {ref: node.name for node in step.graph for ref in node.inputs}

    def read(buffer: Buffer, ref: Ref) -> np.ndarray:
        array = step.gpu.download(buffer.address, buffer.shape, buffer.dtype)
        if buffer in parameters:
            array = parameters[buffer].to_canonical(array).astype(buffer.dtype)
        shape = sizes[ref]  # the classifier's columns are padded
        return array.reshape(shape[0], -1)[:, :shape[1]] if len(shape) == 2 else array.reshape(shape)

    tensors = dict(variables)
    for node in step.graph:
        if node.is_variable:
            continue
        assert all(ref in tensors for ref in node.inputs), f"{node.name} reads what nobody wrote"
        written = set()
        for launch in launches.pop(node.name, ()):
            launch.enqueue()
            written.update(launch.writes)
        outputs = []
        for ref in node.refs():
            buffer = step.training.buffers.get(ref)
            if buffer in written:
                tensors[ref] = read(buffer, ref)
            elif node.op in ("Flatten", "FlattenBackward"):  # the same bytes
                tensors[ref] = tensors[node.inputs[0]].reshape(sizes[ref])
            elif node.op == "Zeros" or ref in statistics:  # updated in place
                tensors[ref] = read(statistics.get(ref, buffer), ref)
            outputs.append(tensors.get(ref))
        yield node, [tensors[ref] for ref in node.inputs], outputs
        for ref in node.inputs:
            if last_reader[ref] == node.name:
                tensors.pop(ref, None)
    assert not launches, f"launches of no node: {list(launches)}"


def canonical(step: TrainingStep, name: str, buffer: Buffer) -> np.ndarray:
    """A parameter as it lies on the GPU, without its padding."""
    array = step.gpu.download(buffer.address, buffer.shape, buffer.dtype)
    return step.store.parameters[name].to_canonical(array).astype(buffer.dtype)


def test_every_tensor_of_a_whole_step_at_full_size(tmp_path: Path, rng: np.random.Generator) -> None:
    """ResNet-50 in fp16, after two steps of training: thousands of elements of each activation, statistic and gradient,
    and all updated weights. Bounds and their reasons: sampled.py."""
    network = models.create("resnet50", CLASSES, label_smoothing=0.1)
    step = TrainingStep(network.graph, SHAPES, StepOptions("float16"), cache_folder=tmp_path)
    step.set_params(*network.initial_values(int(rng.integers(1000)), zero_init_residual=False))
    data = rng.standard_normal(SHAPES["data"], dtype=np.float32).astype(np.float16)
    label = rng.integers(0, CLASSES, SHAPES["softmax_label"]).astype(np.float32)
    step.load(data, label)
    for _ in range(2):
        step.forward_backward()
        step.update(0.01)
    assert np.isfinite(step.read_metrics().loss_sum)

    scale = np.array([step.optimizer.read_state().loss_scale], np.float32)
    dtypes = passes.tensor_dtypes(step.graph)
    known: dict[str, Any] = {"data": data, "softmax_label": label, "loss_scale": scale}
    known |= {name: canonical(step, name, step.store.value(name)) for name in step.store.parameters}
    known |= step.get_params()[1]
    variables = {Ref(name): known[name] for name in step.graph.variables}
    assert all(array.dtype == dtypes[ref] for ref, array in variables.items())

    wrong, left_out = [], set()
    worst: dict[tuple[str, str], float] = {}
    for node, inputs, outputs in calls(step, variables):
        arrays = dict(zip(OPERATORS[node.op].output_names(node), outputs, strict=True))
        left_out |= {name for name, array in arrays.items() if array is None}
        for sample in samples(node, inputs, outputs, rng):
            key = (node.op, sample.output)
            worst[key] = max(worst.get(key, 0.0), sample.excess)
            assert sample.got.size >= min(MANY, arrays[sample.output].size), (node.name, sample.output)
            if sample.excess > 1 or sample.decided < 0.99:
                wrong.append(f"{node.op} {node.name} {sample.output}: {sample.excess:.1f} bounds, "
                             f"{sample.decided:.1%} decided")
    for (op, output), excess in sorted(worst.items(), key=lambda item: -item[1]):
        print(f"{excess:8.3f} bounds  {op} {output}")
    assert not wrong, "\n".join(wrong)
    gradients = {name for name in passes.output_names(step.graph) if name.endswith("_grad")}
    assert gradients == {f"{name}_grad" for name in step.store.parameters}
    assert left_out == {"loss", "top1", "top5"}, "added to the metrics"
    check_update(step, network.graph)


def check_update(step: TrainingStep, graph: Any) -> None:
    """All of the weights, their momentum and their copies in fp16: a few roundings of fp32 from float64."""
    gradients = {name: array.astype(np.float64) for name, array in step.get_gradients().items()}
    before = step.get_params()[0]
    weights = {name: array.astype(np.float64) for name, array in before.items()}
    oracle = ArrayOptimizer(step.options.optimizer.rule, weights, gradients, roles.weights(graph))
    for slot, arrays in step.get_state().items():
        oracle.state[slot] = {name: array.astype(np.float64) for name, array in arrays.items()}
    sizes = {name: np.abs(before[name]) + np.abs(gradients[name])
             + sum(np.abs(arrays[name]) for arrays in oracle.state.values()) for name in before}
    oracle.step(0.05)
    step.update(0.05)
    after, state = step.get_params()[0], step.get_state()
    assert step.optimizer.read_state().skipped_steps == 0
    for name, size in sizes.items():
        bound = 8 * UNIT * size
        assert (np.abs(after[name] - weights[name]) <= bound).all(), name
        for slot, arrays in oracle.state.items():
            assert (np.abs(state[slot][name] - arrays[name]) <= bound).all(), (slot, name)
        copy = canonical(step, name, step.store.value(name))
        assert np.array_equal(copy, after[name].astype(copy.dtype)), name
