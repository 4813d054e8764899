"""Losses as formulas: values and gradients against MXNet and central differences; the CUDA C++ compiled for the CPU."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.mxnet_compat import mx
from graph_passes import GraphError
from graph_passes.operators import formula

STEP = 1e-6  # of central differences in float64
S = mx.sym


def focal(scores: Any, targets: Any) -> Any:
    log_p = S.log_softmax(scores, axis=1)
    return -S.sum(targets * (1 - S.exp(log_p)) ** 2 * log_p, axis=1)


def binary(scores: Any, targets: Any) -> Any:
    return S.sum(S.Activation(scores, act_type="softrelu") - scores * targets, axis=1)


def generalised(scores: Any, targets: Any) -> Any:
    """Zhang and Sabuncu, arXiv:1805.07836, with q = 0.7."""
    return (1 - S.sum(S.softmax(scores) * targets, axis=1) ** 0.7) / 0.7


def poly(scores: Any, targets: Any) -> Any:
    """Leng et al., arXiv:2204.12511: cross entropy plus 1 - p."""
    log_p = S.log_softmax(scores)
    return S.sum(targets * (1 - S.exp(log_p) - log_p), axis=-1, keepdims=True)


def margins(scores: Any, targets: Any) -> Any:
    """Everything that needs a value of the image in each class: a squared hinge about the mean and the maximum."""
    centred = S.broadcast_sub(scores, S.mean(scores, axis=1, keepdims=True))
    scaled = S.broadcast_div(centred, S.expand_dims(S.sum(S.abs(centred), axis=1), axis=1) + 0.5)
    hinge = S.square(S.relu(1.5 - scaled * (2 * targets - 1)))
    top = S.max(scores, axis=1)
    return S.sum(hinge, axis=1) + S.log1p(S.exp(top - S.sum(scores * targets, axis=1)))


def everything(scores: Any, targets: Any) -> Any:
    """Every other operator."""
    terms = [S.tanh(scores), S.sigmoid(scores), S.expm1(scores / 4), S.sqrt(S.square(scores) + 1),
             S.log(S.abs(scores) + 2), S.maximum(scores, targets), S.minimum(scores, 0.25 * targets),
             S.maximum(scores, 0.125), S.minimum(scores, -0.125), S.clip(scores, -0.5, 0.75),
             S.where(scores > 0.0625, scores * scores, targets - scores), 1 / (3 + S.square(scores)),
             S.reciprocal(2 + S.exp(scores)), 2 ** (scores / 8), (S.exp(scores) + 1) ** S.sigmoid(scores),
             S.broadcast_maximum(scores, S.mean(scores, axis=1, keepdims=True)), S.BlockGrad(scores) * scores,
             scores / (targets + 2), S.negative(scores) - S.identity(targets), S.ones_like(scores) * 3,
             S.zeros_like(scores) + S.Activation(scores, act_type="tanh"), S.sign(scores) * scores,
             (scores >= targets) * scores, (scores != targets) * scores, S.broadcast_lesser(scores, targets) * scores]
    return S.sum(sum(terms[1:], terms[0]), axis=1)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {each.__name__: each for each in (
    focal, binary, generalised, poly, margins, everything)}


def json_of(loss: Callable[[Any, Any], Any]) -> str:
    return loss(S.Variable("scores"), S.Variable("targets")).tojson()


def batch(rng: np.random.Generator, classes: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores, and targets that add up to 1, of odd numbers of images and classes."""
    n, classes = int(rng.integers(1, 8)), classes or int(rng.integers(2, 600))
    targets = rng.dirichlet(np.full(classes, 0.3), n)
    return rng.normal(0, 2, (n, classes)), targets


@pytest.mark.parametrize("loss", LOSSES)
def test_against_mxnet_and_differences(loss: str, rng: np.random.Generator) -> None:
    scores, targets = batch(rng)
    found = formula.read(json_of(LOSSES[loss]), "softmax")
    value, gradient = found.compute(["loss", "gradient"], scores, targets)
    assert value.shape == (len(scores), 1) and gradient.shape == scores.shape
    for _ in range(3):
        direction = rng.standard_normal(scores.shape)
        if loss == "everything":  # differences of values include the terms that BlockGrad takes out of the gradient
            break
        ends = [found.compute(["loss"], scores + sign * STEP * direction, targets)[0].sum() for sign in (1, -1)]
        assert (gradient * direction).sum() == pytest.approx((ends[0] - ends[1]) / (2 * STEP), rel=1e-5, abs=1e-6)
    given = [mx.nd.array(array, dtype="float64") for array in (scores, targets)]
    given[0].attach_grad()
    inputs = [S.Variable(name, dtype="float64") for name in ("scores", "targets")]
    of_mxnet = mx.gluon.SymbolBlock(S.load_json(json_of(LOSSES[loss])), inputs)
    with mx.autograd.record():
        losses = of_mxnet(*given)
    losses.backward()
    # MXNet's softrelu is x above 20, and its pow is float32's
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if loss in ("binary", "generalised", "everything") else {"rtol": 1e-9}
    np.testing.assert_allclose(value.ravel(), losses.asnumpy().ravel(), **tolerance)
    np.testing.assert_allclose(gradient, given[0].grad.asnumpy(), **{"atol": 1e-12} | tolerance)


def test_a_bound_symbol_with_many_readers_of_a_tensor(rng: np.random.Generator) -> None:
    """MXNet's gradients are right as common/mxnet_compat.py sets it up: not a matter of losses, but of networks."""
    scores, targets = batch(rng, classes=5)
    symbol = S.load_json(json_of(everything))
    given = {name: mx.nd.array(array) for name, array in (("scores", scores), ("targets", targets))}
    slopes = {"scores": mx.nd.zeros(scores.shape)}
    bound = symbol.bind(mx.cpu(), given, slopes, {"scores": "write", "targets": "null"})
    bound.forward(is_train=True)
    bound.backward(mx.nd.ones(len(scores)))
    (gradient,) = formula.read(json_of(everything), "softmax").compute(["gradient"], scores, targets)
    np.testing.assert_allclose(slopes["scores"].asnumpy(), gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("probabilities", formula.PROBABILITIES)
def test_probabilities(probabilities: str, rng: np.random.Generator) -> None:
    scores, targets = batch(rng)
    (found,) = formula.read(json_of(focal), probabilities).compute(["probabilities"], scores, targets)
    e = np.exp(scores)
    np.testing.assert_allclose(found, e / e.sum(axis=1, keepdims=True) if probabilities == "softmax" else e / (1 + e),
                               rtol=1e-12)


SHIM = """
#include <cmath>
#include <cstddef>
#define __device__
#define __global__
constexpr float INF = INFINITY, NOT_A_NUMBER = NAN;
struct { int x; } threadIdx{0}, blockDim{1}, blockIdx, gridDim;
struct Sum {}; struct Max {};
template <class Op> float block_reduce(float v, float, Op) { return v; }
inline float to_float(float x) { return x; }
template <class T> T from_float(float x) { return x; }
"""
DRIVER = """
extern "C" void run(int images, const float *scores, const float *bias, const float *labels, const float *share,
                    float *probabilities, float *gradient, float *loss, int *rank, const float *loss_scale, float scale,
                    float smoothing, int classes, int pitch) {
    gridDim.x = images;
    for (blockIdx.x = 0; blockIdx.x < images; ++blockIdx.x)
        custom_loss(scores, bias, labels, share, probabilities, gradient, loss, rank, loss_scale, scale, smoothing,
                    classes, pitch);
}
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")
@pytest.mark.parametrize("loss", LOSSES)
def test_the_kernel_compiled_for_the_cpu(loss: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Blocks have one thread. Targets are mixed and smoothed; there are a bias, padded rows, a loss scale, hits, and an
    invalid label."""
    from graph_passes.executors.cuda.kernel_library import SOURCES

    found = formula.read(json_of(LOSSES[loss]), "sigmoid")
    labels_of_row = (SOURCES / "labels.cuh").read_text().replace('#include "common.cuh"', "")
    text = SHIM + labels_of_row + found.cuda() + (SOURCES / "custom_loss.cuh").read_text() + DRIVER
    (tmp_path / "loss.cpp").write_text(text.replace("#pragma once", ""))
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", tmp_path / "loss.so", tmp_path / "loss.cpp"],
                   check=True)
    run = ctypes.CDLL(str(tmp_path / "loss.so")).run
    n, classes, pitch, share, smoothing = 5, 7, 8, 0.7, 0.1
    scores = rng.normal(0, 2, (n, pitch)).astype(np.float32)
    bias, label = rng.normal(0, 1, classes).astype(np.float32), rng.integers(0, classes, n).astype(np.float32)
    label[1] = 9
    made = {"probabilities": np.zeros((n, classes), np.float32), "gradient": np.full((n, pitch), 7, np.float32),
            "loss": np.zeros(n, np.float32), "rank": np.zeros(n, np.int32)}
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (
        scores, bias, label, np.float32([share]), *made.values(), np.float32([8]))]
    run(n, *pointers, ctypes.c_float(0.25), ctypes.c_float(smoothing), classes, pitch)
    sums = scores[:, :classes].astype(np.float64) + bias
    hits = np.eye(10)[label.astype(int)][:, :classes]
    targets = smoothing / (classes - 1) + (1 - smoothing - smoothing / (classes - 1)) * (
        share * hits + (1 - share) * hits[::-1])
    wanted = dict(zip(("probabilities", "gradient", "loss"), found.compute(
        ["probabilities", "gradient", "loss"], sums, targets), strict=True))
    valid = [0, 2, 4]  # the image in the middle is its own partner, and the second is that of the fourth
    np.testing.assert_allclose(made["probabilities"], wanted["probabilities"], rtol=1e-5)
    np.testing.assert_allclose(made["gradient"][valid, :classes], 2 * wanted["gradient"][valid], rtol=1e-3, atol=1e-4)
    assert not made["gradient"][:, classes:].any()
    np.testing.assert_allclose(made["loss"][valid], wanted["loss"][valid].ravel(), rtol=1e-4)
    assert np.isnan(made["loss"][[1, 3]]).all() and (made["rank"][[1, 3]] == classes).all()
    for image in valid:
        assert made["rank"][image] == (sums[image] > sums[image, int(label[image])]).sum()


@pytest.mark.parametrize("loss", LOSSES)
def test_the_kernel_compiles(loss: str) -> None:
    """NVRTC compiles the kernel for Hopper; this needs no GPU."""
    pytest.importorskip("cuda.core")
    from graph_passes.executors.cuda.kernel_library import Written, compile_kernel
    from graph_passes.executors.cuda.kernels.softmax import written

    source = written(formula.read(json_of(LOSSES[loss]), "softmax"))
    assert isinstance(source, Written)
    try:
        code, symbol = compile_kernel(source, "custom_loss<half>", "sm_90a")
    except RuntimeError as error:
        pytest.skip(f"NVRTC is missing: {error}")
    assert code and "custom_loss" in symbol


@pytest.mark.parametrize("loss, sentence", [
    (lambda s, t: S.sum(S.sin(s) * t, axis=1), r"^has the operator sin \(sin0\), which no loss can have here: make it "
                                               "of Activation, BlockGrad, abs, "),
    (lambda s, t: s * t, r"^returns \(N, C\): return a loss for each image, such as the sum over axis=1$"),
    (lambda s, t: S.sum(s * t), r"^has the operator sum \(sum0\), which has axis=all on the shape \(N, C\), which"),
    (lambda s, t: S.mean(s * t, axis=0), r"^has the operator mean .* axis=0 on the shape \(N, C\), which would mix"),
    (lambda s, t: S.sum(s, axis=1), "^does not read the targets: let the loss depend on scores and targets$"),
    (lambda s, t: S.sum(S.BlockGrad(s) * t, axis=1), "^has no gradient with regard to the scores"),
    (lambda s, t: S.sum(s * t * S.Variable("w"), axis=1), "^reads w: a loss reads scores and targets alone$"),
    (lambda s, t: S.sum(s - S.sum(t, axis=1), axis=1), r"elemwise_sub .* gets \(N, C\) and \(N,\): give equal shapes"),
    (lambda s, t: S.sum(S.broadcast_sub(s, S.sum(t, axis=1)), axis=1), r"broadcast_sub .* gets \(N, C\) and \(N,\)"),
    (lambda s, t: S.sum(S.softmax(s, axis=0) * t, axis=1), r"^has the operator softmax .* needs one input of the"),
    (lambda s, t: S.sum(S.Activation(s, act_type="softsign") * t, axis=1), "has act_type=softsign: use relu"),
    (lambda s, t: S.Group([S.sum(s * t, axis=1), S.sum(s, axis=1)]), "^returns 2 tensors: return one"),
    (lambda s, t: S.sum(S.where(S.sum(s, axis=1), s, t), axis=1), r"^has the operator where .* give equal shapes$"),
])
def test_what_is_no_loss(loss: Callable[[Any, Any], Any], sentence: str) -> None:
    with mx.name.NameManager(), pytest.raises(GraphError, match=sentence):
        formula.read(json_of(loss), "softmax")


def test_equal_steps_are_made_once() -> None:
    """The softmax of the loss is that of the probabilities."""
    found = formula.read(json_of(focal), "softmax")
    assert len(set(found.steps)) == len(found.steps)
    assert sum(step.op == "max" for step in found.steps) == 1
    assert json.loads(json_of(focal))["heads"]
