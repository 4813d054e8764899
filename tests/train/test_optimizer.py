"""SGD with momentum, and moving averages, against float64 oracles, over several steps, on MXNet and NumPy arrays."""

import numpy as np
import pytest

from common.mxnet_compat import mx
from train.optimizer import SGD, average_decay, averages_in_use

DECAYED = ("conv_weight", "classifier_weight")


def oracle(params, gradients, rates, momentum, weight_decay, nesterov, scale, trust=None):
    """Plain SGD in float64, written with the velocity v = -m / rate free of the code under test's order of terms."""
    params = {name: p.astype(np.float64) for name, p in params.items()}
    moved = {name: np.zeros_like(p) for name, p in params.items()}
    for grads, rate in zip(gradients, rates, strict=True):
        for name in params:
            decay = weight_decay if name.endswith(DECAYED) else 0.0
            gradient = scale * grads[name].astype(np.float64)
            norm, gradient_norm = np.linalg.norm(params[name]), np.linalg.norm(gradient)
            descent = -rate * (gradient + decay * params[name])
            if trust and name.endswith(DECAYED) and norm and gradient_norm:
                descent *= trust * norm / (gradient_norm + decay * norm)
            moved[name] = momentum * moved[name] + descent
            params[name] = params[name] + (momentum * moved[name] + descent if nesterov else moved[name])
    return params, moved


@pytest.mark.parametrize("trust", [None, 0.3])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("backend", ["mxnet", "numpy"])
def test_against_oracle(backend, nesterov, trust, rng):
    shapes = {"conv_weight": (5, 3, 3, 7), "bn_gamma": (5,), "bn_beta": (5,), "classifier_weight": (11, 5),
              "classifier_bias": (11,)}  # fmt: skip
    shapes |= {f"layer{i}_conv_weight": (3, 1, 1, i + 1) for i in range(3)}
    start = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    rates = [0.1, 0.3, 0.05, 0.2]
    start["layer0_conv_weight"][:] = 0  # LARS leaves the learning rate as it is where a norm is 0
    gradients = [{name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()} for _ in rates]

    convert = mx.nd.array if backend == "mxnet" else np.array
    params = {name: convert(p) for name, p in start.items()}
    live: dict = {}
    optimizer = SGD(params, live, momentum=0.875, weight_decay=0.01, nesterov=nesterov, trust_coefficient=trust)
    for grads, rate in zip(gradients, rates, strict=True):
        live.update({name: convert(g) for name, g in grads.items()})
        optimizer.step(rate, scale=0.5)

    expected, moved = oracle(start, gradients, rates, 0.875, 0.01, nesterov, 0.5, trust)
    for name in shapes:
        got, got_moved = (a.asnumpy() if backend == "mxnet" else a for a in (params[name], optimizer.momenta[name]))
        # four fp32 updates of values near 1: a few rounding errors of 6e-8 each
        np.testing.assert_allclose(got, expected[name], atol=2e-6, err_msg=name)
        np.testing.assert_allclose(got_moved, moved[name], atol=2e-6, err_msg=name)


@pytest.mark.parametrize("backend", ["mxnet", "numpy"])
def test_moving_averages_against_oracle(backend, rng):
    convert = mx.nd.array if backend == "mxnet" else np.array
    numpy = (lambda array: array.asnumpy().copy()) if backend == "mxnet" else np.copy
    params = {"conv_weight": convert(rng.standard_normal((3, 2, 2, 5)).astype(np.float32))}
    aux = {"bn_moving_mean": convert(np.zeros(4, np.float32))}
    grads = {"conv_weight": convert(rng.standard_normal((3, 2, 2, 5)).astype(np.float32))}
    optimizer = SGD(params, grads, momentum=0.9, weight_decay=0.0, averaged={**params, **aux})
    history = []
    for step in range(30):
        aux["bn_moving_mean"][:] = convert(rng.standard_normal(4).astype(np.float32))
        optimizer.step(0.1, average_decay=average_decay(0.75, step))
        history.append({name: numpy(array).astype(np.float64) for name, array in (params | aux).items()})
    expected = history[0]  # the first step's values, whatever the averages were before
    for step, values in enumerate(history[1:], start=1):
        decay = 0.75 if step >= 27 else step / (step + 9)
        expected = {name: decay * expected[name] + (1 - decay) * value for name, value in values.items()}
    with averages_in_use(optimizer):
        for name, array in (params | aux).items():
            # Each step rounds to fp32 three times (6e-8 each) and forgets at least a quarter of what was before: 12
            # times that at most, of the largest value on the way.
            np.testing.assert_allclose(numpy(array), expected[name], rtol=1e-6, atol=2e-6, err_msg=name)
    for name, array in (params | aux).items():
        assert np.array_equal(numpy(array), history[-1][name].astype(np.float32)), "and the weights are back"


def test_weight_decay_spares_norm_and_bias():
    names = ("conv_weight", "bn_gamma", "bn_beta", "classifier_bias")
    params = {name: mx.nd.ones((3,)) for name in names}
    grads = {name: mx.nd.zeros((3,)) for name in names}
    SGD(params, grads, momentum=0.9, weight_decay=0.5).step(learning_rate=0.1)
    for name, value in params.items():
        np.testing.assert_allclose(value.asnumpy(), 0.95 if name == "conv_weight" else 1.0)
