"""The emulation of plain kernels: it computes what they mean, and it catches each kind of mistake in a kernel."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import COMPILER, EmulatedGpu, EmulatedKernels, Fault, steps, translated
from emulation.steps import emulate_builders, emulate_steps, emulated_toolchain
from gpu_arrays import Device, rounded
from step_networks import NEWEST, convnext, efficient, elements, hidden_layers, mobile, narrow, preferring
from test_convnet_kernels import OPERATORS, check_operator, normal
from test_depthwise import attributes
from test_dropout_kernels import test_factors  # noqa: F401, which compares all bits of random numbers
from test_training_step import CLASSES, small_network, test_small_network_against_the_reference

from graph_passes import GraphError
from graph_passes.choice import fewest
from graph_passes.executors.cuda import prices
from graph_passes.executors.cuda.kernel_library import C_TYPES, SOURCES, threads
from graph_passes.executors.cuda.prices import Prices

check_network = test_small_network_against_the_reference
del test_small_network_against_the_reference  # pytest would collect it

pytestmark = pytest.mark.skipif(not COMPILER, reason="there is no g++")


@pytest.fixture
def device(seed: int) -> Device:
    return device_of(seed=seed)


def device_of(folder: Path = SOURCES, seed: int = 0, orders: tuple[str, ...] = ("frx",)) -> Device:
    gpu = EmulatedGpu(seed, orders)
    kernels: Any = EmulatedKernels(gpu, folder)
    return Device(gpu, kernels)


# --- arithmetic ---


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversions_are_those_of_numpy(dtype: str, rng: np.random.Generator) -> None:
    """All 16-bit values to fp32. From fp32: those, the ties between them, their neighbours, and any bits."""
    device = device_of(orders=("f",))
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits.view(np.float16).astype(np.float32) if dtype == "float16" else (bits.astype(np.uint32) << 16).view(
        np.float32)
    wide = device.poisoned((1 << 16,))
    device.run("elementwise.cu", f"widen<{C_TYPES[dtype]}>", *threads(1 << 13), device.put(bits, "uint16"), wide,
               ctypes.c_uint32(1 << 13))
    assert np.array_equal(device.get(wide, (1 << 16,)), values, equal_nan=True)

    finite = np.sort(values[np.isfinite(values)])
    ties = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    beyond = np.float32([65519.996, 65520, 1e30, 3.4e38, np.inf, -np.inf, 1e-8, 2.0**-25])
    given = np.concatenate([finite, ties, np.nextafter(ties, np.float32(np.inf)), beyond,
                            rng.integers(0, 1 << 32, 4000, np.uint32).view(np.float32)])
    narrow = device.poisoned((given.size, 1), dtype)
    device.run("elementwise.cu", f"convert_input<float, {C_TYPES[dtype]}>", *threads(given.size), device.put(given),
               narrow, ctypes.c_int64(given.size), ctypes.c_int(1), ctypes.c_int(1))
    got = device.get(narrow, (given.size,), dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = np.where(np.isnan(given), np.nan, rounded(given, dtype))
    assert np.array_equal(got, wanted, equal_nan=True)


# --- mistakes ---

ROW_SUMS = """
#include "common.cuh"
__global__ void row_sums(const float *x, float *y, int columns) {
    __shared__ float parts[64];
    const int lane = threadIdx.x;
    float own = 0;
    for (int c = lane; c < columns; c += 64) own += x[blockIdx.x * columns + c];
    parts[lane] = own;
    __syncthreads();
    if (lane >= 32) return;
    own = parts[lane] + parts[lane + 32];
    for (int d = 16; d; d /= 2) own += __shfl_down_sync(0xffffffff, own, d);
    if (lane == 0) y[blockIdx.x] = own;
}
"""
MISTAKES = {
    "no barrier": ("    __syncthreads();\n", "", "races: .*, with no barrier between"),
    "no barrier of the warp": ("own = parts[lane] + parts[lane + 32];",
                               "parts[lane] = own;\n    own = parts[lane ^ 1];", "races: .*, with no barrier between"),
    "reads beyond": ("c < columns", "c <= columns", "reads 4 bytes outside of every buffer"),
    "writes before": ("y[blockIdx.x] =", "y[int(blockIdx.x) - 1] =", "writes 4 bytes outside of every buffer"),
    "array in shared memory": ("parts[lane + 32]", "parts[lane + 33]", r"takes element 64 of a smaller array.*:11"),
    "all threads write": ("if (lane == 0) y", "y", "races: it writes 4 bytes that thread .* has written"),
    "all blocks write": ("y[blockIdx.x] =", "y[0] =", "another block has written in the same launch"),
    "a block reads what another writes": ("own += x[", "own += y[0] * x[", "another block has"),
    "a barrier for some": ("(lane >= 32) return;", "(lane >= 32) return;\n    if (lane < 9) __syncthreads();",
                           "waits for ever at a barrier"),
    "a lane that has ended": ("if (lane >= 32) return;", "if (lane >= 31) return;",
                              "for ever at an exchange of its warp"),
    "a lane outside of the mask": ("__shfl_down_sync(0xffffffff", "__shfl_down_sync(0xffff",
                                   "(a lane outside|is no part) of the mask"),
    "misaligned": ("own = parts[lane] +", "own = ((float2 *)(parts + lane))->x +", "at a misaligned address .*:11"),
    "sums in any order": ("if (lane == 0) y[blockIdx.x] = own;", "if (lane == 0) atomicAdd(y, own);",
                          "depend on the order in which threads and blocks run"),
    "PTX": ("__syncthreads();", "team_sync<64>(0);", r"executes bar\.sync, which is not emulated"),
}


def run_row_sums(folder: Path, text: str, rng: np.random.Generator) -> np.ndarray:
    shutil.copy(SOURCES / "common.cuh", folder)
    (folder / "row_sums.cu").write_text(text)
    device = device_of(folder)
    x = rng.normal(0, 1, (40, 99)).astype(np.float32)
    y = device.zeros(40 * 4)
    device.run("row_sums.cu", "row_sums", (40, 1, 1), (64, 1, 1), device.put(x), y, ctypes.c_int(99))
    return np.abs(device.get(y, (40,)) - x.sum(1, dtype=np.float64)) / np.abs(x).sum(1)


def test_a_kernel_without_a_mistake(tmp_path: Path, rng: np.random.Generator) -> None:
    assert run_row_sums(tmp_path, ROW_SUMS, rng).max() < 1e-6


def test_a_barrier_of_the_warp_orders_its_accesses(tmp_path: Path, rng: np.random.Generator) -> None:
    before, after, _ = MISTAKES["no barrier of the warp"]
    ordered = after.replace("own;", "own + parts[lane + 32];\n    __syncwarp();").replace("lane ^ 1", "lane")
    assert run_row_sums(tmp_path, ROW_SUMS.replace(before, ordered), rng).max() < 1e-6


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str, tmp_path: Path, rng: np.random.Generator) -> None:
    before, after, message = MISTAKES[mistake]
    assert before in ROW_SUMS
    with pytest.raises(Fault, match=message):
        run_row_sums(tmp_path, ROW_SUMS.replace(before, after), rng)


SHAPE, WEIGHT = (2, 9, 7, 24), (24, 3, 3, 1)
CASES = (*OPERATORS, ("DepthwiseStatistics", attributes(3, 1, "same", 24) | {"no_bias": True}, SHAPE, WEIGHT),
         ("reverse", {"axis": (1, 2)}, SHAPE),
         ("DepthwiseWgrad", attributes(3, 1, "same", 24) | {"no_bias": True}, SHAPE, SHAPE))
# Mutations of single kernels: name -> (file, text, replacement, an operator that shows the change).
MUTATIONS = {
    "sums are read too early": ("common.cuh", "of_warp[warp] = v;\n    __syncthreads();", "of_warp[warp] = v;", "races",
                                "SumTo"),
    "sums are overwritten too early": ("common.cuh", "__syncthreads();  // the next call", "// the next call", "races",
                                       "SumTo"),
    "a vector too many": ("pointwise.cu", "if (at >= vectors) return;", "if (at > vectors) return;",
                          "outside of every buffer", "relu"),
    "a channel too many": ("layer_norm.cu", "c < channels", "c <= channels", "races",
                           "LayerNormBackward"),
    "a pixel is left out": ("broadcast.cu", "pixel = threadIdx.x;", "pixel = threadIdx.x + 1;", None, "SumTo"),
    "a row is left out": ("depthwise.cu", "begin + i >= LAST", "begin + i > LAST", None, "DepthwiseStatistics"),
    "sums of weights are read too early": ("depthwise.cu", "sum[tap][k];\n        __syncthreads();", "sum[tap][k];",
                                           "races", "DepthwiseWgrad"),
    "backwards from beyond the end": ("transpose.cu", "from = order.first", "from = order.first + 1",
                                      "outside of every buffer", "reverse"),
    "an output is not written": ("layer_norm.cu", "means[row] = of.x;", ";", None, "LayerNorm"),
}


def mutated(tmp_path: Path, file: str, before: str, after: str) -> Path:
    """The folder of a copy of the CUDA sources, with a change in one file."""
    folder = tmp_path / "kernels"
    shutil.copytree(SOURCES, folder)
    text = (folder / file).read_text()
    assert before in text
    (folder / file).write_text(text.replace(before, after))
    return folder


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_of_a_kernel_is_caught(mutation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          rng: np.random.Generator) -> None:
    file, before, after, message, op = MUTATIONS[mutation]
    folder = mutated(tmp_path, file, before, after)
    emulate_builders(monkeypatch)
    tools = emulated_toolchain(EmulatedGpu(0), folder=folder)
    attrs, *shapes = [case for name, *case in CASES if name == op][-1]
    with pytest.raises(AssertionError, match=message) as caught:
        check_operator(tools, "float32", op, attrs, shapes, rng, normal)
    assert isinstance(caught.value, Fault) == bool(message)


def test_kernels_with_other_instructions_are_named() -> None:
    with pytest.raises(GraphError, match=r"stem\.cu has PTX instructions that are not emulated"):
        device_of().kernels.get("stem.cu", "stem_forward<half>")
    assert translated('asm volatile("cp.async.ca [%0], %1;" :: "r"(a), "l"(b));') == 'emulated_refusal("cp.async.ca");'


# --- whole networks: the test of GPUs, in test_training_step.py ---

NETWORKS = {"squeeze and excitation": efficient(classes=CLASSES, squeeze=8), "hard swish": mobile(classes=CLASSES),
            "LayerNorm and GELU": convnext(classes=CLASSES), "elements": elements(classes=CLASSES, prelu=False),
            "hidden layers": hidden_layers(classes=CLASSES), "narrow": narrow(classes=CLASSES),
            "narrow residuals": small_network(6)}


@pytest.mark.long(but=["squeeze*", "LayerNorm*", "hidden*"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_plain_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    emulate_steps(monkeypatch, seed)
    channels = 3 if name.startswith("narrow") else 4
    check_network(tmp_path, NETWORKS[name], (3, 11, 9, channels), 5, "float16")


# Mutations seen in whole steps: name -> (file, text, replacement, network, words of the error in the network's test).
OF_NETWORKS = {
    # This mutation does not reach the results of this step, only the padding of weights, and so the results of the next
    # step.
    "padding is not zero": ("channels.cu", "V v = {};", "V v = from[0];", "hidden layers", "the padding of hidden"),
    "a row of a gradient is left out": ("scale_channels.cu", "blockIdx.y * REDUCE_ROWS + threadIdx.y",
                                        "blockIdx.y * REDUCE_ROWS + threadIdx.y + 1", "LayerNorm and GELU",
                                        "scale_gamma|narrow_weight"),  # wrong sums, or NaN in what they are added to
    "sums of rows overflow": ("batch_norm.cuh", "(WARPS > SPLITS ? WARPS : SPLITS)", "WARPS", "LayerNorm and GELU",
                              "outside of every buffer"),
}


@pytest.mark.long(but=["padding*"])
@pytest.mark.parametrize("mutation", OF_NETWORKS)
def test_a_mutation_is_caught_in_a_network(mutation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           seed: int) -> None:
    file, before, after, name, message = OF_NETWORKS[mutation]
    emulate_steps(monkeypatch, seed, mutated(tmp_path, file, before, after))
    with pytest.raises(AssertionError, match=message):
        check_network(tmp_path, NETWORKS[name], (2, 11, 9, 4), 5, "float32")


@pytest.mark.parametrize("name, kernels", [
    ("squeeze and excitation", {"forward", "dgrad", "wgrad", "statistics", "moments", "sum"}),
    ("LayerNorm and GELU", {"forward", "dgrad", "wgrad", "sum"})])
def test_a_network_with_depthwise_kernels(name: str, kernels: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          seed: int) -> None:
    """Depthwise convolutions run by our own kernels, not by NumPy."""
    seen = set()

    class Seen(EmulatedKernels):
        def get(self, source: str, expression: str) -> Any:
            seen.add(expression.partition("<")[0])
            return super().get(source, expression)

    emulate_steps(monkeypatch, seed)
    monkeypatch.setattr(steps, "EmulatedKernels", Seen)
    monkeypatch.setattr(prices, "deterministic", preferring(fewest, *NEWEST))
    monkeypatch.setattr(Prices, "_times", Prices._ranks)
    check_network(tmp_path, NETWORKS[name], (3, 11, 9, 4), 5, "float16")
    assert {kernel.removeprefix("depthwise_") for kernel in seen if kernel.startswith("depthwise_")} == kernels
