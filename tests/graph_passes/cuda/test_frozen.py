"""The compiled step of a network with frozen first layers and a backbone that learns more slowly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gpu_arrays import DTYPES, Device, relative_error
from test_training_step import random_batch, random_state, small_network

from graph_passes import Graph, passes, pipeline, roles
from graph_passes.executors.cuda.optimizer import OptimizerConfig
from graph_passes.executors.cuda.options import StepOptions
from graph_passes.executors.cuda.training_step import TrainingStep
from graph_passes.optimizers import Rule
from graph_passes.optimizers.lamb import LAMB
from graph_passes.optimizers.sgd import SGD
from train import models

pytestmark = pytest.mark.gpu

# rounding of one value, and in fp32 of a few operations
ROUNDING = {"float32": 1e-6, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("dtype", DTYPES)
def test_frozen_layers_are_folded(cache: Path, dtype: str) -> None:
    """Folded weights and biases are computed again for each set of values; the statistics stay. Every tensor of such a
    step is tested in test_training_step.py."""
    graph = passes.freeze(Graph.from_json(small_network().tojson()), "a")
    shapes = {"data": (3, 29, 23, 3), "softmax_label": (3,)}
    fused, frozen = pipeline.run(pipeline.FUSED, graph), roles.frozen(graph)
    step = TrainingStep(graph, shapes, StepOptions(dtype, tf32=False, num_buckets=2), cache_folder=cache)
    for seed in (1, 2):
        params, aux = random_state(graph, shapes, seed)
        step.set_params(params, aux)
        step.load(*random_batch(shapes, seed))
        step.forward_backward()
        wanted = passes.fold_bn_params(fused, params, aux, frozen_only=True)
        for name, parameter in step._frozen.store.parameters.items():
            buffer = step._frozen.store.values[name]
            got = parameter.to_canonical(Device(step.gpu, step.kernels).get(buffer.address, buffer.shape, buffer.dtype))
            assert relative_error(got, wanted[name]) < ROUNDING[buffer.dtype], name
        assert step.get_gradients().keys() == params.keys() - frozen
        for name, value in step.get_params()[1].items():
            assert np.array_equal(value, aux[name]) == (name in frozen), name
    step.gpu.free_all()


@pytest.mark.parametrize("prefix", ["a", passes.BACKBONE])  # for the latter no running statistics are left to average
@pytest.mark.parametrize("rule", [SGD(momentum=0.9, weight_decay=1e-2), LAMB(weight_decay=1e-2)])
def test_updates_leave_what_is_frozen_and_go_as_far_as_the_factors_say(cache: Path, rule: Rule, prefix: str) -> None:
    shapes = {"data": (6, 33, 31, 4), "softmax_label": (6,)}
    frozen_graph = passes.freeze(Graph.from_json(small_network().tojson()), prefix)
    frozen, moves = roles.frozen(frozen_graph), {}
    params, aux = random_state(frozen_graph, shapes, seed=3)
    data, label = random_batch(shapes, seed=4)
    for factor in (1.0, 0.25):
        graph = frozen_graph if factor == 1 else passes.slow_backbone(frozen_graph, factor)
        options = StepOptions("float16", optimizer=OptimizerConfig(rule, ema=True), deterministic=True)
        step = TrainingStep(graph, shapes, options, cache_folder=cache)
        step.set_params(params, aux)
        step.load(data, label)
        for number in range(2):
            step.forward_backward()
            step.update(0.1, ema_decay=0.5 * number)
            if number == 0:
                moves[factor] = {name: value - params[name] for name, value in step.get_params()[0].items()}
        assert all(state.keys() == params.keys() - frozen for state in step.get_state().values())
        now = step.get_params()
        step.swap_ema()
        averaged = step.get_params()
        for values in (now, averaged):
            for name, value in {**values[0], **values[1]}.items():
                assert np.array_equal(value, {**params, **aux}[name]) == (name in frozen), name
        step.infer()
        of_averages = step.probabilities()
        step.swap_ema()
        step.infer()
        assert all(np.array_equal(now[0][name], value) for name, value in step.get_params()[0].items())
        assert not np.array_equal(of_averages, step.probabilities())
        step.gpu.free_all()
    for name in params.keys() - frozen:
        wanted = moves[1.0][name] * (1.0 if name.startswith("fc") else 0.25)
        rounding = 2.0**-23 * np.abs(params[name]).max()  # relative to the fp32 weights whose difference is compared
        assert np.abs(moves[0.25][name] - wanted).max() < 2 * rounding + 1e-5 * np.abs(wanted).max(), name
        assert np.abs(wanted).max() > 10 * rounding, name


def test_clipping_takes_the_norm_of_what_is_trained(cache: Path) -> None:
    shapes = {"data": (6, 33, 31, 4), "softmax_label": (6,)}
    graph = passes.freeze(Graph.from_json(small_network().tojson()), "a")
    options = StepOptions("float16", optimizer=OptimizerConfig(SGD(momentum=0), clip_norm=1e-3), deterministic=True)
    step = TrainingStep(graph, shapes, options, cache_folder=cache)
    params, aux = random_state(graph, shapes, seed=3)
    step.set_params(params, aux)
    step.load(*random_batch(shapes, seed=4))
    step.forward_backward()
    gradients = {name: gradient.astype(np.float64) for name, gradient in step.get_gradients().items()}
    assert gradients.keys() == params.keys() - roles.frozen(graph)
    norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
    step.update(1000.0)
    step.read_metrics()
    assert norm > 2e-3 and step.gradient_norm == pytest.approx(norm, rel=1e-5)
    for name, gradient in gradients.items():
        moved = params[name] - step.get_params()[0][name]
        rounding = 2.0**-23 * max(1.0, np.abs(params[name]).max())
        np.testing.assert_allclose(moved, gradient / norm, rtol=1e-4, atol=2 * rounding, err_msg=name)
    step.gpu.free_all()


def test_a_frozen_step_is_faster(cache: Path) -> None:
    """ResNet-50 at batch 64: fewer launches, less memory, less time."""
    shapes, found = {"data": (64, 224, 224, 4), "softmax_label": (64,)}, []
    network = models.create("resnet50", 10)
    for prefix in (None, "stage1", "stage3", "backbone"):
        graph = passes.freeze(network.graph, prefix) if prefix else network.graph
        step = TrainingStep(graph, shapes, StepOptions("float16"), cache_folder=cache)
        step.set_params(*network.initial_values(seed=1, channels=4))
        step.load(*random_batch(shapes, seed=2))
        start, end = step.gpu.timing_event(), step.gpu.timing_event()
        for number in range(30):
            if number == 10:  # already warm
                step.gpu.record(start)
            step.forward_backward()
            step.update(0.001)
        step.gpu.record(end)
        step.gpu.synchronize()
        found.append((prefix, step.gpu.elapsed_ms(start, end) / 20, step._arena.num_bytes / 2**20))
        step.gpu.free_all()
    print(*(f"frozen {prefix}: {ms:.3f} ms, arena {mib:.0f} MiB" for prefix, ms, mib in found), sep="\n")
    times = [ms for _, ms, _ in found]
    assert times == sorted(times, reverse=True) and times[-1] < times[0] / 2
