"""The step that users train with, at full size and with the planner's choice for this GPU. For every tensor,
elements are compared with float64 arithmetic on the inputs from which the GPU computed them.

First the GPU runs the launches one by one, and their inputs and outputs are copied: 85 MB per image in fp16, 22 GB of
host memory. Then the GPU is free, and the copies are checked on all cores, one node per core.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from sampled import UNIT, Sample, samples

from graph_passes import Node, Ref, passes, roles
from graph_passes.executors.cuda.options import StepOptions
from graph_passes.executors.cuda.program import Buffer
from graph_passes.executors.cuda.training_step import TrainingStep
from graph_passes.operators import OPERATORS
from graph_passes.optimizers import ArrayOptimizer
from pipelines.progress import num_cores
from train import models

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SHAPES = {"data": (256, 224, 224, 3), "softmax_label": (256,)}
CLASSES = 1000
MANY = 2000  # elements checked in each tensor, unless it is smaller
RATE = 0.05  # for the update that is checked
Arrays = dict[str, np.ndarray]
Call = tuple[Node, list[np.ndarray], list[np.ndarray | None]]  # a node, its inputs, its outputs


class Optimized(NamedTuple):
    """Parameters, and the optimizer's state for them, by slot."""

    params: Arrays
    state: dict[str, Arrays]


def calls(step: TrainingStep, variables: dict[Ref, np.ndarray]) -> list[Call]:
    """Runs the launches of the step one by one. A node's outputs are copied right after its last launch, because memory
    is reused."""
    parameters = {buffer: step.store.parameters[name] for name, buffer in step.store.gradients.items()}
    launches = {name: list(group) for name, group in
                itertools.groupby(step.training.program.launches, key=lambda launch: launch.node)}
    sizes = step.graph.infer_shapes(SHAPES)
    statistics = {ref: step.store.statistics.slices[name] for name, ref in passes.output_names(step.graph).items()
                  if name in step.store.statistics.slices}

    def read(buffer: Buffer, ref: Ref) -> np.ndarray:
        array = step.gpu.download(buffer.address, buffer.shape, buffer.dtype)
        if buffer in parameters:
            array = parameters[buffer].to_canonical(array).astype(buffer.dtype)
        shape = sizes[ref]  # the classifier's columns are padded
        return array.reshape(shape[0], -1)[:, :shape[1]] if len(shape) == 2 else array.reshape(shape)

    found: list[Call] = []
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
        found.append((node, [tensors[ref] for ref in node.inputs], outputs))
    assert not launches, f"launches of no node: {list(launches)}"
    return found


def canonical(step: TrainingStep, name: str, buffer: Buffer) -> np.ndarray:
    """A parameter from the GPU, without its padding."""
    array = step.gpu.download(buffer.address, buffer.shape, buffer.dtype)
    return step.store.parameters[name].to_canonical(array).astype(buffer.dtype)


def test_every_tensor_of_a_whole_step_at_full_size(tmp_path: Path, rng: np.random.Generator) -> None:
    """ResNet-50 in fp16, after two training steps: thousands of elements of each activation, statistic and gradient,
    and all updated weights. sampled.py explains the bounds."""
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

    found = calls(step, variables)
    gradients, before = step.get_gradients(), Optimized(step.get_params()[0], step.get_state())
    step.update(RATE)
    after = Optimized(step.get_params()[0], step.get_state())
    copies = {name: canonical(step, name, step.store.value(name)) for name in after.params}
    assert step.optimizer.read_state().skipped_steps == 0
    step.gpu.free_all()

    check_step(found, rng)
    names = {name for name in passes.output_names(step.graph) if name.endswith("_grad")}
    assert names == {f"{name}_grad" for name in step.store.parameters}
    oracle = ArrayOptimizer(step.options.optimizer.rule, doubles(before.params), doubles(gradients),
                            roles.weights(network.graph))
    check_update(oracle, before, after, copies)


def check_step(found: list[Call], rng: np.random.Generator) -> None:
    """Check one node per core, from the last on: the gradient of the stem's weight takes longest."""
    def check(call: Call, rng: np.random.Generator) -> list[Sample]:
        return samples(*call, rng)

    found = found[::-1]
    with ThreadPoolExecutor(num_cores()) as pool:
        checked = list(pool.map(check, found, rng.spawn(len(found))))

    wrong, left_out = [], set()
    worst: dict[tuple[str, str], float] = {}
    for (node, _, outputs), its_samples in zip(found, checked, strict=True):
        arrays = dict(zip(OPERATORS[node.op].output_names(node), outputs, strict=True))
        unread = {"output"} if node.get("no_output") else set()
        left_out |= {name for name, array in arrays.items() if array is None} - unread
        for sample in its_samples:
            key = (node.op, sample.output)
            worst[key] = max(worst.get(key, 0.0), sample.excess)
            assert sample.got.size >= min(MANY, arrays[sample.output].size), (node.name, sample.output)
            if sample.excess > 1 or sample.decided < 0.99:
                wrong.append(f"{node.op} {node.name} {sample.output}: {sample.excess:.1f} bounds, "
                             f"{sample.decided:.1%} decided")
    for (op, output), excess in sorted(worst.items(), key=lambda item: -item[1]):
        print(f"{excess:8.3f} bounds  {op} {output}")
    assert not wrong, "\n".join(wrong)
    assert left_out == {"loss", "top1", "top5"}, "added to the metrics"


def doubles(arrays: Arrays) -> Arrays:
    return {name: array.astype(np.float64) for name, array in arrays.items()}


def check_update(oracle: ArrayOptimizer, before: Optimized, after: Optimized, copies: Arrays) -> None:
    """Check all weights, their momentum and their fp16 copies: they differ from float64 by a few roundings of fp32."""
    for slot, arrays in before.state.items():
        oracle.state[slot] = doubles(arrays)
    sizes = {name: np.abs(array) + np.abs(oracle.grads[name])
             + sum(np.abs(arrays[name]) for arrays in oracle.state.values()) for name, array in before.params.items()}
    oracle.step(RATE)
    for name, size in sizes.items():
        bound = 8 * UNIT * size
        assert (np.abs(after.params[name] - oracle.params[name]) <= bound).all(), name
        for slot, arrays in oracle.state.items():
            assert (np.abs(after.state[slot][name] - arrays[name]) <= bound).all(), (slot, name)
        copy = copies[name]
        assert np.array_equal(copy, after.params[name].astype(copy.dtype)), name
