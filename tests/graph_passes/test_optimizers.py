"""The optimizers and moving averages against float64 oracles, over many steps, on MXNet and NumPy arrays."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from step_networks import fused, random_variables, small_resnet

from common.mxnet_compat import mx
from graph_passes import optimizers, passes, roles
from graph_passes.executors import create_executor
from graph_passes.executors.cuda.kernel_library import SOURCES
from graph_passes.executors.cuda.optimizer import CHUNK, MAX_CONSTANTS, THREADS
from graph_passes.executors.cuda.parameters import MAX_SLOTS
from graph_passes.optimizers import ArrayOptimizer, Rule, base
from graph_passes.optimizers.adamw import AdamW
from graph_passes.optimizers.lamb import LAMB
from graph_passes.optimizers.lars import LARS
from graph_passes.optimizers.lion import Lion
from graph_passes.optimizers.rmsprop import RMSProp
from graph_passes.optimizers.sgd import SGD
from train.optimizer import ema_decay, ema_in_use

Arrays = dict[str, np.ndarray]
WEIGHTS = ("conv_weight", "layer_weight", "zero_weight", "classifier_weight")
SHAPES = {"conv_weight": (5, 3, 3, 7), "bn_gamma": (5,), "bn_beta": (5,), "layer_weight": (3, 1, 1, 2),
          "zero_weight": (4, 6), "classifier_weight": (11, 5), "classifier_bias": (11,)}
STEPS = 50


def norm_ratio(above: float, below: float) -> float:
    """Layers with a norm of 0 keep the learning rate unchanged."""
    return above / below if above and below else 1.0


def momentum_oracle(rule: SGD, params: Arrays, gradients: list[Arrays], rates: list[float]) -> tuple[Arrays, Any]:
    """Plain SGD in float64, with another order of terms than the code under test."""
    moved = {name: np.zeros_like(p) for name, p in params.items()}
    for grads, rate in zip(gradients, rates, strict=True):
        for name, p in params.items():
            decay = rule.weight_decay if name in WEIGHTS else 0.0
            descent = -rate * (grads[name] + decay * p)
            if isinstance(rule, LARS) and name in WEIGHTS:
                norm, gradient_norm = np.linalg.norm(p), np.linalg.norm(grads[name])
                if norm and gradient_norm:
                    descent *= rule.trust_coefficient * norm / (gradient_norm + decay * norm)
            moved[name] = rule.momentum * moved[name] + descent
            params[name] = p + (rule.momentum * moved[name] + descent if rule.nesterov else moved[name])
    return params, {"momentum": moved}


def adam_oracle(rule: AdamW, params: Arrays, gradients: list[Arrays], rates: list[float]) -> tuple[Arrays, Any]:
    """AdamW and LAMB in float64, from the sums that the moving averages represent, not step by step."""
    beta1, beta2 = rule.betas
    for t, rate in enumerate(rates, start=1):
        keep1, keep2 = ((1 - beta) * beta ** np.arange(t - 1, -1, -1) for beta in (beta1, beta2))
        mean = {name: sum(k * g[name] for k, g in zip(keep1, gradients[:t], strict=True)) for name in params}
        variance = {name: sum(k * g[name] ** 2 for k, g in zip(keep2, gradients[:t], strict=True)) for name in params}
        for name, p in params.items():
            descent = mean[name] / keep1.sum() / (np.sqrt(variance[name] / keep2.sum()) + rule.epsilon)
            if name in WEIGHTS:
                descent = descent + rule.weight_decay * p
                if isinstance(rule, LAMB):
                    descent *= norm_ratio(float(np.linalg.norm(p)), float(np.linalg.norm(descent)))
            params[name] = p - rate * descent
    return params, {"mean": mean, "variance": variance}


def lion_oracle(rule: Lion, params: Arrays, gradients: list[Arrays], rates: list[float]) -> tuple[Arrays, Any]:
    """Lion in float64, from the sums that the moving average represents."""
    beta1, beta2 = rule.betas
    mean = {name: np.zeros_like(p) for name, p in params.items()}
    for t, rate in enumerate(rates, start=1):
        keep = (1 - beta2) * beta2 ** np.arange(t - 1, -1, -1)
        for name, p in params.items():
            descent = np.sign(beta1 * mean[name] + (1 - beta1) * gradients[t - 1][name])
            mean[name] = sum(k * g[name] for k, g in zip(keep, gradients[:t], strict=True))
            params[name] = p * (1 - rate * rule.weight_decay if name in WEIGHTS else 1) - rate * descent
    return params, {"mean": mean}


def rmsprop_oracle(rule: RMSProp, params: Arrays, gradients: list[Arrays], rates: list[float]) -> tuple[Arrays, Any]:
    """RMSProp in float64, from the sums that the moving average and the momentum represent."""
    decayed: list[Arrays] = []
    moves: list[Arrays] = []
    for t, rate in enumerate(rates, start=1):
        decayed.append({name: gradients[t - 1][name] + (rule.weight_decay * p if name in WEIGHTS else 0)
                        for name, p in params.items()})
        keep, remain = (factor ** np.arange(t - 1, -1, -1.0) for factor in (rule.rho, rule.momentum))
        square = {name: sum((1 - rule.rho) * k * g[name] ** 2 for k, g in zip(keep, decayed, strict=True))
                  for name in params}
        moves.append({name: rate * decayed[-1][name] / (square[name] + rule.epsilon) ** 0.5 for name in params})
        momentum = {name: sum(k * move[name] for k, move in zip(remain, moves, strict=True)) for name in params}
        params = {name: p - momentum[name] for name, p in params.items()}
    return params, {"mean_square": square, "momentum": momentum}


ORACLES: dict[type[Rule], Any] = {
    SGD: momentum_oracle, LARS: momentum_oracle, AdamW: adam_oracle, LAMB: adam_oracle, Lion: lion_oracle,
    RMSProp: rmsprop_oracle,
}  # fmt: skip
RULES = [
    SGD(weight_decay=0.01, momentum=0.875), SGD(weight_decay=0.01, momentum=0.875, nesterov=True),
    LARS(weight_decay=0.01, momentum=0.875, trust_coefficient=0.3),
    LARS(weight_decay=0.01, momentum=0.875, nesterov=True, trust_coefficient=0.3),
    AdamW(weight_decay=0.05), AdamW(betas=(0.0, 0.9), epsilon=1e-3), LAMB(weight_decay=0.02, epsilon=1e-6),
    Lion(weight_decay=0.5), Lion(betas=(0.95, 0.5)), RMSProp(weight_decay=0.05), RMSProp(rho=0.5, momentum=0.0),
]


def clipped(grads: Arrays, clip_norm: float) -> Arrays:
    """The gradients clipped to the global norm `clip_norm`, with PyTorch's 1e-6."""
    norm = np.linalg.norm(np.concatenate([g.ravel() for g in grads.values()]))
    return {name: g * (clip_norm / (norm + 1e-6)) for name, g in grads.items()} if norm > clip_norm else grads


@pytest.mark.long(but=["numpy-*"])
@pytest.mark.parametrize("clip_norm", [0, 10.25], ids=["", "clipped"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{type(rule).__name__} {rule.kernel_constants}")
@pytest.mark.parametrize("backend", ["mxnet", "numpy"])
def test_fifty_steps_against_the_oracle(backend: str, rule: Rule, clip_norm: float, rng: np.random.Generator) -> None:
    if isinstance(rule, Lion):  # in one of a thousand draws a moving average is so near 0 that fp32 has the other sign
        rng = np.random.default_rng(0)
    start = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    start["zero_weight"][:] = 0
    rates = [0.1 / (1 + step) for step in range(STEPS)]
    gradients = [{name: rng.standard_normal(s).astype(np.float32) for name, s in SHAPES.items()} for _ in rates]
    for grads in gradients[:3]:
        grads["layer_weight"][:] = 0

    convert = mx.nd.array if backend == "mxnet" else np.array
    numpy = (lambda array: array.asnumpy()) if backend == "mxnet" else np.asarray
    params = {name: convert(p) for name, p in start.items()}
    live: dict[str, Any] = {}
    optimizer = ArrayOptimizer(rule, params, live, WEIGHTS, clip_norm=clip_norm)
    for number, (grads, rate) in enumerate(zip(gradients, rates, strict=True)):
        live.update({name: convert(g) for name, g in grads.items()})
        optimizer.step(rate, scale=0.5)
        if number == 20:  # as when a run is resumed
            saved, scalars, before = optimizer.state, optimizer.scalars, optimizer
            optimizer = ArrayOptimizer(rule, params, live, WEIGHTS, clip_norm=clip_norm)
            optimizer.scalars = scalars
            for slot, arrays in saved.items():
                for name, array in arrays.items():
                    optimizer.state[slot][name][:] = array
            assert before is not optimizer and scalars == ({"updates": 21} if isinstance(rule, AdamW) else {})

    halved = [{name: 0.5 * g.astype(np.float64) for name, g in grads.items()} for grads in gradients]
    if clip_norm:
        whole, halved = halved, [clipped(grads, clip_norm) for grads in halved]
        assert 5 < sum(a is b for a, b in zip(whole, halved, strict=True)) < 45, "some are clipped"
    exact = {name: p.astype(np.float64) for name, p in start.items()}
    expected, state = ORACLES[type(rule)](rule, exact, halved, rates)
    for name in SHAPES:
        # Bound for fifty updates of values near 1, each rounded to 6e-8 of them.
        np.testing.assert_allclose(numpy(params[name]), expected[name], rtol=1e-5, atol=5e-6, err_msg=name)
        for slot, arrays in state.items():
            np.testing.assert_allclose(numpy(optimizer.state[slot][name]), arrays[name], rtol=1e-5, atol=5e-6,
                                       err_msg=f"{slot} {name}")


@pytest.mark.parametrize("executor_name", ["mxnet", "reference"])
def test_clipping_sees_the_mean_of_all_passes_and_trained_parameters(executor_name: str,
                                                                     rng: np.random.Generator) -> None:
    graph, shapes = fused(small_resnet(True)), {"data": (2, 17, 17, 3), "softmax_label": (2,)}
    values = random_variables(graph, shapes, rng, dtype=np.float32)
    graph = passes.freeze(graph, "stem")
    assert 0 < len(roles.frozen(graph)) < len(graph.arguments)
    executor = create_executor(executor_name, graph, shapes)
    before = {name: values[name] for name in executor.params}
    executor.set_params(before, {name: values[name] for name in executor.aux})
    optimizer = executor.create_optimizer(SGD(momentum=0), clip_norm=0.25)
    batches = [mx.nd.array(rng.standard_normal((2, *shapes["data"])))[number] for number in range(2)]
    label = mx.nd.array([1, 3])
    for number, data in enumerate(batches):
        executor.forward_backward(data, label, accumulate=number > 0)
    mean = {name: executor.to_canonical(name, grad).astype(np.float64) / 2 for name, grad in executor.grads.items()}
    norm = np.sqrt(sum((grad**2).sum() for grad in mean.values()))
    optimizer.step(1.0, scale=0.5)
    executor.request_metrics()()
    assert norm > 0.5 and executor.gradient_norm == pytest.approx(norm, rel=1e-5)
    for name, after in executor.get_params()[0].items():
        moved = 0.25 * mean[name] / norm if name in mean else 0
        np.testing.assert_allclose(before[name] - after, moved, rtol=1e-4, atol=3e-7 * np.abs(before[name]).max(),
                                   err_msg=name)


def test_clipping_against_pytorch(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    for clip_norm in (0.5, 1e-5, 1e4):
        start, grads = ({name: rng.standard_normal(shape) for name, shape in SHAPES.items()} for _ in range(2))
        theirs = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start.items()}
        for name, parameter in theirs.items():
            parameter.grad = torch.tensor(grads[name])
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), clip_norm)
        torch.optim.SGD(theirs.values(), lr=0.1).step()
        optimizer = ArrayOptimizer(SGD(momentum=0), start, grads, WEIGHTS, clip_norm=clip_norm)
        optimizer.step(0.1)
        assert optimizer.gradient_norm == pytest.approx(float(norm), rel=1e-12)
        for name, parameter in theirs.items():
            np.testing.assert_allclose(start[name], parameter.detach().numpy(), rtol=1e-12, atol=1e-13, err_msg=name)


# Trains a float64 parameter by PyTorch's RMSprop, and by timm's, whose mean square starts at 0 here as ours does.
RMSPROP_PEER = """
import sys
import numpy as np, torch, timm.optim
given = np.load(sys.argv[1])
weight, gradients, rate, decay = given["weight"], torch.tensor(given["gradients"]), float(given["rate"]), 0.05
found = {}
for name, create, epsilon in (("torch", torch.optim.RMSprop, 1e-30), ("timm", timm.optim.RMSpropTF, 1e-3)):
    parameter = torch.nn.Parameter(torch.tensor(weight))
    optimizer = create([parameter], lr=rate, alpha=0.9, momentum=0.9, weight_decay=decay, eps=epsilon)
    if name == "timm":
        optimizer.state[parameter] = {"step": torch.zeros(()), "square_avg": torch.zeros_like(parameter),
                                      "momentum_buffer": torch.zeros_like(parameter)}
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    found[name] = parameter.detach().numpy()
np.savez(sys.argv[2], **found)
"""


@pytest.mark.skipif("PEER_PYTHON" not in os.environ, reason="PEER_PYTHON is not set")
@pytest.mark.parametrize("peer, epsilon", [("torch", 1e-30), ("timm", 1e-3)])
def test_rmsprop_against_pytorch_and_timm(peer: str, epsilon: float, tmp_path: Path, rng: np.random.Generator) -> None:
    """PyTorch's, which has epsilon outside the root, with none; timm's with the usual one, at a constant rate."""
    weight, gradients, rate = rng.standard_normal((5, 7)), rng.standard_normal((20, 5, 7)), 0.01
    np.savez(tmp_path / "given.npz", weight=weight, gradients=gradients, rate=rate)
    subprocess.run([os.environ["PEER_PYTHON"], "-c", RMSPROP_PEER, tmp_path / "given.npz", tmp_path / "found.npz"],
                   check=True)
    grads: Arrays = {}
    optimizer = ArrayOptimizer(RMSProp(weight_decay=0.05, epsilon=epsilon), {"w": weight}, grads, {"w"})
    for gradient in gradients:
        grads["w"] = gradient
        optimizer.step(rate)
    with np.load(tmp_path / "found.npz") as found:
        np.testing.assert_allclose(weight, found[peer], rtol=1e-12, atol=1e-13)  # twenty updates in float64


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{type(rule).__name__} {rule.kernel_constants}")
@pytest.mark.parametrize("backend", ["mxnet", "numpy"])
def test_a_gradient_of_nan_shows(backend: str, rule: Rule) -> None:
    """A NaN in a gradient becomes a NaN in the parameter, and so in the loss."""
    convert = mx.nd.array if backend == "mxnet" else np.array
    params = {"bn_beta": convert(np.ones(3, np.float32))}
    gradients = {"bn_beta": convert(np.array([0.5, np.nan, -0.5], np.float32))}
    ArrayOptimizer(rule, params, gradients, WEIGHTS, clip_norm=1.0).step(0.1)
    updated = np.array(params["bn_beta"].asnumpy() if backend == "mxnet" else params["bn_beta"])
    assert list(np.isnan(updated)) == [False, True, False]


@pytest.mark.parametrize("backend", ["mxnet", "numpy"])
def test_moving_averages_against_oracle(backend: str, rng: np.random.Generator) -> None:
    convert = mx.nd.array if backend == "mxnet" else np.array
    numpy = (lambda array: array.asnumpy().copy()) if backend == "mxnet" else np.copy
    params = {"conv_weight": convert(rng.standard_normal((3, 2, 2, 5)).astype(np.float32))}
    aux = {"bn_moving_mean": convert(np.zeros(4, np.float32))}
    grads = {"conv_weight": convert(rng.standard_normal((3, 2, 2, 5)).astype(np.float32))}
    optimizer = ArrayOptimizer(SGD(), params, grads, params, ema_of={**params, **aux})
    history = []
    for step in range(30):
        aux["bn_moving_mean"][:] = convert(rng.standard_normal(4).astype(np.float32))
        optimizer.step(0.1, ema_decay=ema_decay(0.75, step))
        history.append({name: numpy(array).astype(np.float64) for name, array in (params | aux).items()})
    expected = history[0]  # the first step's values, whatever the averages were before
    for step, values in enumerate(history[1:], start=1):
        decay = 0.75 if step >= 27 else step / (step + 9)
        expected = {name: decay * expected[name] + (1 - decay) * value for name, value in values.items()}
    with ema_in_use(optimizer):
        for name, array in (params | aux).items():
            # Each step rounds to fp32 three times (6e-8 each) and forgets at least a quarter of earlier errors: 12
            # times that at most, relative to the largest value so far.
            np.testing.assert_allclose(numpy(array), expected[name], rtol=1e-6, atol=2e-6, err_msg=name)
    for name, array in (params | aux).items():
        assert np.array_equal(numpy(array), history[-1][name].astype(np.float32)), "and the weights are back"


@pytest.mark.parametrize("executor_name", ["mxnet", "reference"])
@pytest.mark.parametrize("rule", [SGD(weight_decay=0.5), AdamW(weight_decay=0.5)], ids=["sgd", "adamw"])
def test_weight_decay_spares_norm_and_bias(executor_name: str, rule: Rule, rng: np.random.Generator) -> None:
    """The graph says which parameters are weights, in any layout."""
    graph, shapes = fused(small_resnet(True)), {"data": (2, 17, 17, 3), "softmax_label": (2,)}
    values = random_variables(graph, shapes, rng, dtype=np.float32)
    executor = create_executor(executor_name, graph, shapes)
    executor.set_params({name: values[name] for name in executor.params}, {name: values[name] for name in executor.aux})
    executor.create_optimizer(rule).step(learning_rate=0.1)  # gradients are 0
    weights = roles.weights(graph)
    assert weights == {name for name in executor.params if name.endswith("_weight")} and len(weights) > 8
    for name, value in executor.get_params()[0].items():
        np.testing.assert_allclose(value, values[name] * (0.95 if name in weights else 1), rtol=1e-6, err_msg=name)


def test_norms_of_numpys_arrays_are_python_numbers() -> None:
    """A NumPy float64 would make NumPy 2 compute updates in float64; an fp32 would make it compute ratios in fp32."""
    weight = np.full((2, 2), 3, np.float32)
    found = base.norm(np, weight)
    assert (found, type(found), (weight * found).dtype) == (6, float, np.float32)


def test_by_name() -> None:
    assert optimizers.names() == ["adamw", "lamb", "lars", "lion", "rmsprop", "sgd"]
    constants = {"momentum": 0.5, "betas": (0.5, 0.9), "weight_decay": 0.25, "nesterov": True, "depth": 3}
    assert optimizers.create("sgd", constants) == SGD(momentum=0.5, weight_decay=0.25, nesterov=True)
    assert optimizers.create("lamb", constants) == LAMB(betas=(0.5, 0.9), weight_decay=0.25)


def test_what_the_kernels_know_of_the_rules() -> None:
    source = (SOURCES / "optimizer.cu").read_text()
    for name, here in (("CHUNK", CHUNK), ("THREADS", THREADS), ("MAX_SLOTS", MAX_SLOTS),
                       ("MAX_CONSTANTS", MAX_CONSTANTS)):
        found = re.search(rf"\b{name} = (\d+)", source)
        assert found and int(found[1]) == here, name
    for rule in RULES:
        assert len(rule.slots) <= MAX_SLOTS and len(rule.kernel_constants) <= MAX_CONSTANTS
        assert f"struct {rule.kernel.partition('<')[0]} " in source
