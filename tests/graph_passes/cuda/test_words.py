"""A word language model on the GPU: the embedding's kernels, and whole steps, against NumPy in float64."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from gpu_arrays import DTYPES, PRECISION, Device, relative_error, rounded

from graph_passes import Ref
from graph_passes.executors.cuda.kernel_library import C_TYPES, count, threads
from graph_passes.executors.cuda.kernels.embedding import COLUMNS
from graph_passes.executors.cuda.options import StepOptions
from graph_passes.executors.cuda.training_step import TrainingStep
from graph_passes.executors.reference import backward, forward
from train.language_model import LanguageModel

pytestmark = pytest.mark.gpu

# Bound for the norm of the error relative to the norm, of a gradient through two recurrent layers of 6 steps.
TOLERANCE = {"float32": 2e-6, "float16": 5e-3, "bfloat16": 4e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words, channels, tokens", [(8, 8, 1), (24, 40, 77), (504, 1048, 1000)])
def test_embedding(device: Device, dtype: str, words: int, channels: int, tokens: int,
                   rng: np.random.Generator) -> None:
    """Invalid numbers become the nearest valid one; words that do not occur have a gradient of 0; the bits are equal
    again."""
    numbers = rng.integers(-1, words + 1, tokens).astype(np.float64)
    rows = np.clip(numbers, 0, words - 1).astype(int)
    weight = rounded(rng.standard_normal((words, channels)), dtype)
    dy = rounded(rng.standard_normal((tokens, channels)), dtype)
    ids, vectors = device.put(numbers), channels // 8
    y = device.poisoned((tokens, channels), dtype)
    device.run("embedding.cu", f"embedding<{C_TYPES[dtype]}>", *threads(tokens * vectors), ids,
               device.put(weight, dtype), y, count(tokens * vectors), count(vectors), ctypes.c_uint32(words))
    assert np.array_equal(device.get(y, (tokens, channels), dtype), weight[rows])
    wanted = np.zeros((words, channels))
    np.add.at(wanted, rows, dy)
    found = []
    for _ in range(2):
        dweight = device.poisoned((words, channels), dtype)
        device.run("embedding.cu", f"embedding_wgrad<{C_TYPES[dtype]}>", (words, -(-vectors // COLUMNS), 1),
                   (COLUMNS, 1, 1), device.put(dy, dtype), ids, dweight, count(tokens), count(vectors), count(words))
        found.append(device.get(dweight, (words, channels), dtype))
    assert relative_error(found[0], wanted) < PRECISION[dtype] and np.array_equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step(dtype: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Gradients of every parameter, loss, hits, and the probabilities of inference."""
    model = LanguageModel(words=40, hidden=48, layers=2, steps=6, sequences=5)
    step = TrainingStep(model.graph, model.shapes, StepOptions(dtype, tf32=False), cache_folder=tmp_path)
    params = {name: array if name.endswith("bias") else rounded(array, dtype).astype(np.float32)
              for name, array in model.initial_values(seed=1).items()}
    tokens, label = rng.integers(0, 40, (2, 30)).astype(np.float32)
    step.set_params(params, {})
    step.load(tokens.reshape(30, 1, 1, 1), label)
    step.forward_backward()
    gradients = step.get_gradients()
    values = {Ref(name): array.astype(np.float64) for name, array in params.items()}
    values |= {Ref("data"): tokens.reshape(30, 1, 1, 1).astype(np.float64), Ref("softmax_label"): label}
    tensors = forward(model.graph, values, training=True)
    wanted = backward(model.graph, tensors)
    for name in params:
        assert relative_error(gradients[name], wanted[Ref(name)]) < TOLERANCE[dtype], name
    metrics, probabilities = step.read_metrics(), tensors[Ref("softmax")]
    loss = -np.log(probabilities[np.arange(30), label.astype(int)]).sum()
    assert metrics.count == 30 and metrics.loss_sum == pytest.approx(loss, rel=TOLERANCE[dtype])
    step.infer()
    assert relative_error(step.probabilities(), probabilities) < TOLERANCE[dtype]
