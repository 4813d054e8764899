"""The cuda executor on MXNet arrays: order with MXNet's engine, metrics, buckets, the common interface."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_arrays import relative_error
from step_networks import bottlenecks
from test_formula import focal, json_of
from test_training_step import CLASSES, fused, random_batch, random_state, small_network

from common.mxnet_compat import mx
from graph_passes import Graph, GraphError, passes, roles
from graph_passes.executors import Box, Draws, Executor, create_executor
from graph_passes.executors.base import NO_DRAWS, Metrics
from graph_passes.executors.cuda import compiled
from graph_passes.executors.cuda.buckets import Bucket
from graph_passes.executors.cuda.executor import CudaExecutor
from graph_passes.optimizers import ArrayOptimizer, Rule
from graph_passes.optimizers.adamw import AdamW
from graph_passes.optimizers.sgd import SGD

pytestmark = pytest.mark.gpu

SHAPES = {"data": (9, 33, 31, 3), "softmax_label": (9,)}


@pytest.fixture
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaExecutor:
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path))
    graph = fused(small_network())
    made = create_executor("cuda", graph, SHAPES, device="gpu(0)", dtype="float32", tf32=False, num_buckets=3)
    assert isinstance(made, CudaExecutor)
    made.set_params(*random_state(graph, SHAPES, seed=1))
    return made


def batch(seed: int) -> tuple:
    data, label = random_batch(SHAPES, seed)
    return mx.nd.array(data, ctx=mx.gpu(0)), mx.nd.array(label, ctx=mx.gpu(0))


def check_pass(executor: CudaExecutor, reference: Executor, seed: int, draws: Draws = NO_DRAWS) -> None:
    """Gradients, read at once, and metrics of one pass over the same batch."""
    data, label = batch(seed)
    executor.forward_backward(data, label, draws=draws)
    got = {name: executor.to_canonical(name, grad) for name, grad in executor.grads.items()}
    reference.forward_backward(data.asnumpy(), label.asnumpy(), draws=draws)
    for name, grad in reference.grads.items():
        assert relative_error(got[name], grad) < 1e-4, name
    wanted, metrics = reference.read_metrics(), executor.read_metrics()
    assert metrics[1:] == wanted[1:] and abs(metrics.loss_sum - wanted.loss_sum) < 1e-4 * wanted.loss_sum


def test_gradients_match_the_reference_and_are_waited_for(executor: CudaExecutor) -> None:
    reference = create_executor("reference", executor.graph, SHAPES, dtype="float64")
    reference.set_params(*executor.get_params())
    for seed in range(3):  # the gradients differ each time and are read at once: a missing gate would show the old ones
        check_pass(executor, reference, seed)
    for name, value in reference.aux.items():
        assert relative_error(executor.to_canonical(name, executor.aux[name]), value) < 1e-4, name


def test_buckets_hold_every_gradient_once_and_in_time(executor: CudaExecutor) -> None:
    data, label = batch(0)
    gpu, seen = executor.gpu, {}

    def download(bucket: Bucket) -> None:
        gpu.synchronize()
        seen[bucket.name] = gpu.download(bucket.address, (bucket.num_elements,), bucket.dtype)

    executor.forward_backward(data, label, on_bucket=download)
    assert list(seen) == ["weights 1", "weights 2", "weights 3", "others"]
    for bucket in executor.step.buckets:  # a bucket's content on arrival equals its content at the end
        final = gpu.download(bucket.address, (bucket.num_elements,), bucket.dtype)
        assert np.array_equal(seen[bucket.name], final) and np.abs(final).max() > 0, bucket.name
    total = sum(float(np.abs(grad.asnumpy()).sum()) for grad in executor.grads.values())
    assert np.isclose(sum(float(np.abs(values).sum()) for values in seen.values()), total)


def test_update_follows_what_mxnet_did_to_the_gradients(executor: CudaExecutor) -> None:
    before, _ = executor.get_params()
    data, label = batch(0)
    executor.forward_backward(data, label)
    half = {name: 0.5 * grad.asnumpy() for name, grad in executor.grads.items()}
    for name, grad in executor.grads.items():
        grad[:] = mx.nd.array(half[name])  # like an all-reduce: a write by MXNet that nobody waits for here
    executor.optimizer.step(0.1)
    after, _ = executor.get_params()
    for name, value in executor.params.items():
        assert np.array_equal(executor.to_canonical(name, value), after[name])
    moved = after["fc_bias"] - before["fc_bias"]
    assert relative_error(moved, -0.1 * executor.to_canonical("fc_bias", half["fc_bias"])) < 1e-4


@pytest.mark.parametrize("rule", [SGD(momentum=0.8, weight_decay=0.01, nesterov=True), AdamW(weight_decay=0.01)],
                         ids=["nesterov", "adamw"])
def test_its_optimizer_does_what_that_on_arrays_does(executor: CudaExecutor, rule: Rule) -> None:
    optimizer = executor.create_optimizer(rule)
    params, _ = executor.get_params()
    live: dict = {}
    oracle = ArrayOptimizer(rule, params, live, roles.weights(executor.graph))
    data, label = batch(3)
    for rate in (0.1, 0.05, 0.02):
        executor.forward_backward(data, label)
        grads = executor.grads
        live.update({name: executor.to_canonical(name, grad) for name, grad in grads.items()})
        oracle.step(rate, scale=0.5)
        optimizer.step(rate, scale=0.5)
    after, _ = executor.get_params()
    for name, value in params.items():
        assert relative_error(after[name], value) < 1e-5, name
    assert optimizer.scalars == oracle.scalars and optimizer.state.keys() == oracle.state.keys()
    for slot, arrays in oracle.state.items():
        for name, array in arrays.items():
            assert relative_error(executor.to_canonical(name, optimizer.state[slot][name]), array) < 1e-4, name
            # as when a checkpoint is restored
            optimizer.state[slot][name][:] = executor.from_canonical(name, 2 * array)
    for slot, arrays in executor.step.get_state().items():
        for name, array in arrays.items():
            assert np.array_equal(array, 2 * oracle.state[slot][name]), name


def test_mixing_against_the_reference(executor: CudaExecutor) -> None:
    """Mixup, CutMix and plain passes in turn: an odd number of images, boxes larger than half an image, an empty
    box."""
    reference = create_executor("reference", executor.graph, SHAPES, dtype="float64")
    reference.set_params(*executor.get_params())
    for draws in (Draws(0.6), Draws(cutmix=Box(3, 0, 20, 31)), NO_DRAWS, Draws(cutmix=Box(0, 1, 33, 30)), Draws(0.75),
                  Draws(cutmix=Box(33, 4, 33, 9)), Draws(cutmix=Box(0, 0, 33, 31)), Draws(cutmix=Box(32, 30, 33, 31))):
        check_pass(executor, reference, seed=5, draws=draws)
    with pytest.raises(GraphError, match="give a box inside the image"):
        executor.forward_backward(*batch(5), draws=Draws(cutmix=Box(0, 0, 34, 31)))


LOSSES = {
    "binary cross entropy": passes.binary_cross_entropy,
    "of targets above 0.2": lambda graph: passes.binary_cross_entropy(graph, 0.2),
    "weighted classes": lambda graph: passes.weigh_classes(graph, np.linspace(0.25, 4, CLASSES)),
    "focal": lambda graph: passes.custom_loss(graph, json_of(focal)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_against_the_reference(loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training with mixed images, and inference; in fp16 with the loss scale."""
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path))
    graph = LOSSES[loss](fused(small_network()))
    reference = create_executor("reference", graph, SHAPES, dtype="float64")
    reference.set_params(*random_state(graph, SHAPES, seed=1))
    executor = create_executor("cuda", graph, SHAPES, device="gpu(0)", dtype="float32", tf32=False)
    assert isinstance(executor, CudaExecutor)
    executor.set_params(*reference.get_params())
    # A ReLU in the box up to row 30 is so near 0 that NumPy in float32 puts it on the other side: 1 % of a gradient.
    for draws in (NO_DRAWS, Draws(0.6), Draws(cutmix=Box(3, 0, 20, 31))):
        check_pass(executor, reference, seed=5, draws=draws)
    data, label = batch(7)
    reference.set_params(*executor.get_params())
    reference.infer(data.asnumpy(), label.asnumpy(), 4)
    executor.infer(data, label, 4)
    assert relative_error(executor.request_probabilities()(), reference.request_probabilities()()) < 1e-4
    metrics, wanted = executor.read_metrics(), reference.read_metrics()
    assert metrics[1:] == wanted[1:] and abs(metrics.loss_sum - wanted.loss_sum) < 1e-4 * wanted.loss_sum
    half = create_executor("cuda", graph, SHAPES, device="gpu(0)", dtype="float16")
    half.set_params(*executor.get_params())
    half.forward_backward(data, label)
    reference.forward_backward(data.asnumpy(), label.asnumpy())
    got = half.to_canonical("fc_bias", half.grads["fc_bias"]) / half.step.optimizer.read_state().loss_scale
    assert relative_error(got, reference.grads["fc_bias"]) < 0.02


def test_features_against_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inference that ends at what the classifier reads, of a whole batch and of a part of it."""
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path))
    graph = fused(small_network())
    features = Graph(graph, roles.classifier(graph).inputs[:1], graph.attrs)
    params, aux = random_state(graph, SHAPES, seed=1)
    reference = create_executor("reference", features, {"data": SHAPES["data"]}, dtype="float64")
    reference.set_params({name: params[name] for name in reference.params}, aux)
    executor = create_executor("cuda", graph, SHAPES, device="gpu(0)", dtype="float32", tf32=False,
                               answer=features.outputs[0])
    executor.set_params(params, aux)
    data, _ = batch(7)
    wanted = reference.forward(data.asnumpy()).reshape(len(data), -1)
    for images in (len(data), 2):
        executor.infer(data[:images])
        assert relative_error(executor.request_probabilities()(), wanted[:images]) < 1e-4


def test_metrics_that_are_asked_for_before_they_are_waited_for(executor: CudaExecutor) -> None:
    data, label = batch(2)
    executor.forward_backward(data, label)
    wanted = executor.read_metrics()
    requests = []
    for number in range(3):  # each request returns what came after the previous one, however late it is received
        for _ in range(number):
            executor.forward_backward(data, label)
        requests.append(executor.request_metrics())
    executor.forward_backward(data, label)
    received = [receive() for receive in reversed(requests)][::-1]
    for number, metrics in enumerate(received):
        assert metrics.count == number * wanted.count and metrics.top1 == number * wanted.top1
        assert abs(metrics.loss_sum - number * wanted.loss_sum) <= 1e-4 * wanted.loss_sum
    assert executor.read_metrics().count == wanted.count, "and the rest is not lost"


def test_moving_averages(executor: CudaExecutor) -> None:
    """Against float64 NumPy over the executor's actual weights after each step."""
    optimizer = executor.create_optimizer(SGD(momentum=0.8, weight_decay=0.01), ema=True)
    data, label = batch(4)
    wanted: dict = {}
    for decay in (0.0, 0.5, 0.9):
        executor.forward_backward(data, label)
        optimizer.step(0.05, ema_decay=decay)
        params, aux = executor.get_params()
        now = {**params, **aux}
        wanted = {name: decay * wanted.get(name, 0.0) + (1 - decay) * value for name, value in now.items()}
    ema = {name: executor.to_canonical(name, value) for name, value in optimizer.ema.items()}
    assert ema.keys() == wanted.keys()
    for name, value in wanted.items():
        assert relative_error(ema[name], value) < 1e-6, name
    own = executor.forward(data).asnumpy()
    optimizer.swap_ema()
    reference = create_executor("reference", executor.graph, SHAPES, dtype="float64")
    reference.set_params({name: wanted[name] for name in params}, {name: wanted[name] for name in aux})
    assert relative_error(executor.forward(data).asnumpy(), reference.forward(data.asnumpy())) < 1e-4
    optimizer.swap_ema()
    assert np.array_equal(executor.forward(data).asnumpy(), own)
    for name, value in executor.get_params()[0].items():
        assert np.array_equal(value, params[name]), name


def test_a_graph_that_nobody_fused(executor: CudaExecutor) -> None:
    unfused = Graph.from_json(small_network().tojson())
    made = create_executor("cuda", unfused, SHAPES, device="gpu(0)", dtype="float32", tf32=False)
    assert made.step.graph.operators() == executor.step.graph.operators()
    assert made.graph.operators() == unfused.operators() != executor.graph.operators()


def test_inference_and_metrics(executor: CudaExecutor) -> None:
    reference = create_executor("reference", executor.graph, SHAPES, dtype="float64")
    reference.set_params(*executor.get_params())
    data, label = batch(7)
    wanted = reference.forward(data.asnumpy())
    assert relative_error(executor.forward(data).asnumpy(), wanted) < 1e-4
    assert executor.read_metrics().count == 0, "without a label nothing is counted"
    executor.infer(data, label, num_valid=4)
    evaluated = executor.request_probabilities()
    executor.infer(*batch(8), num_valid=0)
    assert relative_error(evaluated(), wanted) < 1e-4, "those of the batch before, whatever came since"
    asked = []
    for number in range(8):  # more than may be in flight at once; none is received before all are requested
        executor.infer(batch(number)[0][: 3 + number % 3])
        asked.append(executor.request_probabilities())
    for number, answer in reversed(list(enumerate(asked))):
        of_number = executor.forward(batch(number)[0][: 3 + number % 3]).asnumpy()
        assert np.array_equal(answer(), of_number), number
    reference.infer(data.asnumpy(), label.asnumpy(), 4)
    assert executor.read_metrics()[1:] == reference.read_metrics()[1:]
    executor.forward_backward(data, label)
    assert executor.read_metrics().count == SHAPES["data"][0]
    # The running statistics have changed, and a part of a batch has its own graph.
    reference.set_params(*executor.get_params())
    few = executor.forward(data[:2], label[:2])
    assert few.shape == (2, CLASSES) and executor.read_metrics().count == 2
    assert relative_error(few.asnumpy(), reference.forward(data.asnumpy())[:2]) < 1e-4
    executor.params["fc_bias"][:] = mx.nd.array(executor.from_canonical("fc_bias", 1000 * np.eye(CLASSES)[3]))
    assert (executor.forward(data).asnumpy().argmax(1) == 3).all(), "inference sees parameters that MXNet has written"


def test_profiles(executor: CudaExecutor) -> None:
    """Profiles of the step and of inference: every launch has a time, and inference has fewer."""
    executor.forward_backward(*batch(1))
    step, inference = executor.profile(), executor.profile_inference(batch(1)[0])
    assert all(row.milliseconds > 0 for row in (*step.rows, *inference.rows))
    assert len(step.rows) > len(inference.rows) > 0 and step.ceiling > 0
    assert inference.rows[-1].node in inference.text("")


def test_validation_between_steps_changes_no_bit_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inference uses the memory of the training step, and large images make that memory move. Here inference comes
    between gradients and update, and the metrics of both are received at the end."""
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path))
    graph = fused(small_network())

    def batches(*shapes: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [random_batch({"data": shape, "softmax_label": shape[:1]}, seed=sum(shape)) for shape in shapes]

    trained = batches(*[SHAPES["data"]] * 5)
    validated = batches((9, 33, 31, 3), (4, 33, 31, 3), (9, 210, 190, 3), (9, 33, 31, 3), (2, 45, 60, 3))

    def run(validates: bool) -> tuple[CudaExecutor, list[Metrics], list[Any]]:
        executor = create_executor("cuda", graph, SHAPES, device="gpu(0)", dtype="float16", deterministic=True,
                                   num_buckets=3)
        assert isinstance(executor, CudaExecutor)
        executor.set_params(*random_state(graph, SHAPES, seed=1))
        if validates:
            executor.prepare_inference((33, 31))
        requests, answers = [], []
        for (data, label), (other_data, other_label) in zip(trained, validated, strict=True):
            executor.forward_backward(mx.nd.array(data), mx.nd.array(label))
            requests.append(executor.request_metrics())
            if validates:
                executor.infer(mx.nd.array(other_data), mx.nd.array(other_label), len(other_label) - 1)
                answers.append((executor.get_params(), executor.request_metrics(),
                                executor.forward(mx.nd.array(other_data)).asnumpy()))
            executor.optimizer.step(0.05)
        return executor, [receive() for receive in requests], answers

    alone, wanted, _ = run(validates=False)
    executor, got, answers = run(validates=True)
    assert got == wanted and wanted[0] != wanted[4]
    for ours, theirs in zip((*executor.get_params(), executor.step.get_state()["momentum"]),
                            (*alone.get_params(), alone.step.get_state()["momentum"]), strict=True):
        for name, value in theirs.items():
            assert np.array_equal(ours[name], value), name
    for (data, label), (params, metrics, probabilities) in zip(validated, answers, strict=True):
        alone.set_params(*params)
        assert np.array_equal(alone.forward(mx.nd.array(data)).asnumpy(), probabilities), data.shape
        alone.infer(mx.nd.array(data), mx.nd.array(label), len(label) - 1)
        assert metrics() == alone.read_metrics()


def test_half_precision_images_and_other_shapes(executor: CudaExecutor) -> None:
    data, label = batch(0)
    executor.forward_backward(mx.nd.array(data.asnumpy(), ctx=mx.gpu(0), dtype="float16"), label)
    assert 0 < executor.read_metrics().loss_sum < 100 * CLASSES
    with pytest.raises(GraphError, match=r"\(9, 33, 31, 3\)"):
        executor.forward_backward(mx.nd.zeros((2, 33, 31, 3)), label)
    with pytest.raises(GraphError, match="data has the dtype float64: give one of float16, bfloat16, float32"):
        executor.forward_backward(mx.nd.array(data.asnumpy(), ctx=mx.gpu(0), dtype="float64"), label)
    with pytest.raises(GraphError, match="'softmax_label' has the dtype int32: give float32"):
        executor.forward_backward(data, mx.nd.array(label.asnumpy(), dtype="int32"))
    with pytest.raises(GraphError, match="cpu"):
        create_executor("cuda", executor.graph, SHAPES, device="cpu(0)")


@pytest.mark.alone
def test_the_host_does_not_wait_to_show_passes(executor: CudaExecutor) -> None:
    """The host does not wait in `show_passes`, although a host function on the stream takes half a second."""
    gpu, microseconds = executor.gpu, 500_000
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
    executor.show_passes(6)
    executor.synchronize()
    assert executor.passes_shown[0] == 6
    gpu.check(gpu._driver.cuLaunchHostFunc(gpu.stream_handle, gpu._driver.CUhostFn(sleep), microseconds))
    start = time.perf_counter()
    executor.show_passes(7)
    assert time.perf_counter() - start < 0.1
    assert executor.passes_shown[0] == 6
    executor.synchronize()
    assert executor.passes_shown[0] == 7


@pytest.mark.alone
def test_close_gives_the_memory_back(executor: CudaExecutor) -> None:
    before = executor.gpu.memory()[0]
    shapes = {"data": (1024, 64, 64, 3), "softmax_label": (1024,)}
    large = create_executor("cuda", executor.graph, shapes, device="gpu(0)", dtype="float32", tf32=False)
    used = before - executor.gpu.memory()[0]
    large.close()
    assert used > 2**28 and before - executor.gpu.memory()[0] < used / 4, "but for the code of kernels"


def test_batches_are_read_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that are read in place give the bits of copied batches: without waiting in between, in buckets and
    accumulated, mixed or not."""
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path))
    graph, shapes = fused(bottlenecks(7)), {"data": (6, 40, 36, 4), "softmax_label": (6,)}
    state = random_state(graph, shapes, seed=1)
    results = []
    for least in (0, 1 << 40):
        monkeypatch.setattr(compiled, "LEAST_READ", least)
        executor = CudaExecutor(graph, shapes, dtype="float16", deterministic=True, num_buckets=2)
        executor.set_params(*state)
        assert len(executor.step._training._readers) == (0 if least else 2)
        for seed in range(4):
            images, label = random_batch(shapes, seed)
            data, labels = mx.nd.array(images, ctx=mx.gpu(0), dtype="float16"), mx.nd.array(label, ctx=mx.gpu(0))
            draws = Draws(mixup=0.7) if seed == 2 else NO_DRAWS
            executor.forward_backward(data, labels, accumulate=seed == 3, draws=draws)
            if seed != 2:
                executor.optimizer.step(0.01)
        results.append((*executor.get_params(), executor.read_metrics()))
        executor.close()
    (params, aux, metrics), (wanted, wanted_aux, wanted_metrics) = results
    assert metrics == wanted_metrics and metrics.count == 24
    assert all(np.array_equal(params[name], wanted[name]) for name in wanted)
    assert all(np.array_equal(aux[name], wanted_aux[name]) for name in wanted_aux)
    assert any(not np.array_equal(params[name], state[0][name]) for name in params)
