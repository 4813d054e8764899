"""1x1 convolutions with a stride, asked of cuDNN as views of x: all that it offers for them, against float64."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gpu_arrays import DTYPES, PRECISION, Device, relative_error, rounded

from common.disk_cache import Cache
from graph_passes import GraphError
from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.convolution import VIEW, ConvolutionLibrary, Plan, Problem

SECONDS = 1.0  # for the plans of one problem, of which cuDNN compiles some when they are built
# (N, H, W, C), with rows and columns behind the last one that is read, and without.
SHAPES = {(2, 2): [(3, 15, 13, 64), (2, 14, 9, 48)], (2, 1): [(3, 12, 7, 64)], (3, 2): [(3, 13, 10, 64)]}
FILTERS = 72


def wanted(kind: str, x: np.ndarray, w: np.ndarray, y: np.ndarray, bias: np.ndarray) -> list[np.ndarray]:
    """What the problem writes, of the pixels `x` and in the order of `Plan.enqueue`. `y`: dy, or what is added."""
    if kind == "wgrad":
        return [np.einsum("nhwk,nhwc->kc", y, x)[:, None, None]]
    result = np.einsum("nhwc,kc->nhwk", x, w[:, 0, 0])
    if kind == "fprop_stats":
        return [result, result.sum((0, 1, 2)), (result**2).sum((0, 1, 2))]
    if "bias" in kind:
        result += bias
    if "add" in kind:
        result += y
    return [np.maximum(result, 0) if "relu" in kind else result]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stride", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["fprop", "fprop_stats", "fprop_bias_relu", "fprop_bias_add_relu", "wgrad"])
def test_every_plan_for_a_view(device: Device, tmp_path: Path, kind: str, stride: tuple[int, int], dtype: str) -> None:
    """Pixels that a stride passes over are NaN. Skipped where cuDNN has no plan: then the strided form is all there is.
    """
    library = ConvolutionLibrary(device.gpu, Cache("tests", tmp_path), Arena(device.gpu), tf32=False)
    names = [name for shape in SHAPES[stride] for name in checked(device, library, kind, shape, stride, dtype)]
    print(f"\n{kind}, stride {stride}, {dtype}: {len(names)} plans for views")
    if not names:
        pytest.skip("cuDNN has no plan for this view")


def checked(device: Device, library: ConvolutionLibrary, kind: str, shape: tuple[int, int, int, int],
            stride: tuple[int, int], dtype: str) -> list[str]:
    """Names of the plans that have been built and run."""
    (n, h, w, channels), (down, right) = shape, stride
    y_shape = (n, -(-h // down), -(-w // right), FILTERS)
    problem = Problem(kind, shape, (FILTERS, 1, 1, channels), y_shape, (0, 0), stride, (1, 1), dtype)
    random = np.random.default_rng(h)
    x, weight, y = (rounded(random.normal(0, 1, of), dtype) for of in (shape, problem.w, y_shape))
    bias = rounded(random.normal(0, 1, FILTERS), "float32")
    pixels = x[:, ::down, ::right].copy()
    x[...] = np.nan
    x[:, ::down, ::right] = pixels
    results = wanted(kind, pixels, weight, y, bias)
    inputs = [device.put(x, dtype), device.put(y if kind == "wgrad" else weight, dtype)]
    if "bias" in kind:
        inputs.append(device.put(bias))
    if "add" in kind:
        inputs.append(device.put(y, dtype))
    names = []
    for name, plan in built(library, problem):
        types = [dtype, "float32", "float32"][: len(results)]
        outputs = [device.poisoned(result.shape, of) for result, of in zip(results, types, strict=True)]
        plan.enqueue(*inputs, *outputs, workspace=device.zeros(max(1, plan.workspace_bytes)))
        for address, result, of in zip(outputs, results, types, strict=True):
            # What is stored is rounded once; sums in fp32 are of some hundred values.
            bound = PRECISION[dtype] * (8 if dtype == "float32" else 1)
            assert relative_error(device.get(address, result.shape, of), result) < bound, f"{problem}: {name}"
        names.append(name)
    return names


def built(library: ConvolutionLibrary, problem: Problem) -> Iterator[tuple[str, Plan]]:
    """Name and plan of each proposal for the view that cuDNN builds, in the time that there is."""
    try:
        plan = Plan(library, problem)
    except GraphError:  # as sums in bfloat16, of either form
        return
    ends_at = time.monotonic() + SECONDS
    views = [(place, name) for place, name in enumerate(plan.names()) if name.startswith(VIEW)]
    for place, name in itertools.takewhile(lambda _: time.monotonic() < ends_at, views):
        with contextlib.suppress(Exception):  # cuDNN refuses some of its own proposals
            plan.select(place)
        if plan.name == name:
            yield name, plan
