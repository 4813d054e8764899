"""Dropout on a GPU: NumPy's random bits, and the products with the masks."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import DTYPES, PRECISION, Device, relative_error, rounded

from graph_passes.executors.cuda.kernel_library import C_TYPES, threads
from graph_passes.executors.cuda.kernels.dropout import Rates
from graph_passes.operators.dropout import keep_factors, kept_scale, threshold, words_of

pytestmark = pytest.mark.gpu

SEED = 0xFEDCBA9876543210


@pytest.mark.parametrize("per_batch", [False, True])
def test_factors(device: Device, per_batch: bool) -> None:
    images, drawn, rates = 300, [0.0, 0.1, 0.5, 0.999999], Rates()
    for row, rate in enumerate(drawn):
        rates.threshold[row], rates.scale[row], rates.number[row] = threshold(rate), kept_scale(rate), 2 * row + 1
    factors = device.poisoned((len(drawn), images))
    device.run("dropout.cu", "dropout_factors", *threads(len(drawn) * images), device.put(words_of(SEED), "uint32"),
               factors, rates, ctypes.c_uint32(len(drawn)), ctypes.c_uint32(images), ctypes.c_bool(per_batch))
    numbers = np.arange(images) * (not per_batch)
    wanted = [keep_factors(rate, 2 * row + 1, numbers, words_of(SEED)) for row, rate in enumerate(drawn)]
    assert np.array_equal(device.get(factors, (len(drawn), images)), np.stack(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
def test_images_and_elements(device: Device, dtype: str, rng: np.random.Generator) -> None:
    images, size, row, p = 7, 8 * 37, 2, 0.3
    x = rounded(rng.normal(0, 1, (images, size)), dtype)
    factors = rng.choice([0, 1 / 0.7], (4, images)).astype(np.float32)
    vectors = ctypes.c_uint32(images * size // 8)
    for in_place in (False, True):
        data = device.put(x, dtype)
        y = data if in_place else device.poisoned(x.shape, dtype)
        device.run("dropout.cu", f"dropout_images<{C_TYPES[dtype]}>", *threads(vectors.value), data,
                   device.put(factors), y, ctypes.c_uint32(row * images), vectors, ctypes.c_uint32(size // 8))
        assert relative_error(device.get(y, x.shape, dtype), x * factors[row][:, None]) < PRECISION[dtype]

        data = device.put(x, dtype)
        y = data if in_place else device.poisoned(x.shape, dtype)
        device.run("dropout.cu", f"dropout_elements<{C_TYPES[dtype]}>", *threads(vectors.value), data,
                   device.put(words_of(SEED), "uint32"), y, ctypes.c_uint32(threshold(p)),
                   ctypes.c_float(kept_scale(p)), ctypes.c_uint32(5), vectors)
        kept = keep_factors(p, 5, np.arange(x.size).reshape(x.shape), words_of(SEED))
        got = device.get(y, x.shape, dtype)
        assert np.array_equal(got == 0, kept == 0) and relative_error(got, x * kept) < PRECISION[dtype]
