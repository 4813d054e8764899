"""Whole networks on an emulated GPU: each launch is the kernel's own, of kernels/NAME.py; NumPy stands in for cuDNN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_arrays import Device, rounded

from emulation import EmulatedGpu, EmulatedKernels
from graph_passes import GraphError, Node
from graph_passes.executors.cuda import function, lowering, network, prices
from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.builder import Builder
from graph_passes.executors.cuda.convolution import Problem
from graph_passes.executors.cuda.kernel_library import SOURCES, Size
from graph_passes.executors.cuda.operands import In, InOut, Out, Scratch
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.executors.cuda.planner import Lower
from graph_passes.executors.cuda.program import Buffer
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.operators.convolution import convolution, convolution_dgrad, convolution_wgrad


def emulate_steps(monkeypatch: pytest.MonkeyPatch, seed: int, folder: Path = SOURCES) -> list[EmulatedGpu]:
    """Have each network run on an emulated GPU of its own, with the kernels of a folder. Returns the GPUs, as they will
    be made."""
    made: list[EmulatedGpu] = []

    def make(device_id: int) -> EmulatedGpu:
        made.append(EmulatedGpu(seed))
        return made[-1]

    monkeypatch.setattr(network, "Gpu", make)
    monkeypatch.setattr(network, "toolchain", partial(emulated_toolchain, folder=folder))
    emulate_builders(monkeypatch)
    return made


def emulate_builders(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lowering, prices, function):
        monkeypatch.setattr(module, "Builder", CheckedBuilder)


class CheckedBuilder(Builder):
    """Checks that each launch accesses only its operands, and writes only operands declared as written. Before a
    launch, its outputs in the arena are filled with NaN.
    """

    def launch(self, node: Node, source: str, kernel: str, grid: Size, block: Size, *operands: Any,
               shared_bytes: int = 0, flops: int = 0) -> None:
        super().launch(node, source, kernel, grid, block, *operands, shared_bytes=shared_bytes, flops=flops)
        launch, gpu = self.program.launches[-1], self.gpu
        enqueue_kernel = launch.enqueue
        given = [each for each in operands if isinstance(each, In | Out | InOut | Scratch) and each.buffer]

        def enqueue() -> None:
            assert isinstance(gpu, EmulatedGpu)
            # A tensor is whole vectors: what lies behind it, up to the next vector, is its padding.
            gpu.permits = [(each.buffer.address, _whole_vectors(each.buffer), not isinstance(each, In))
                           for each in given]
            taken = [each.buffer.address for each in given if not isinstance(each, Out)]
            for each in given:
                if isinstance(each, Out) and each.buffer.address not in taken and not each.buffer.persistent:
                    gpu.fill(each.buffer.address, 0xFF, each.buffer.num_bytes)
            try:
                enqueue_kernel()
            finally:
                gpu.permits = []

        launch.enqueue = enqueue


def _whole_vectors(buffer: Buffer) -> int:
    elements = max(math.prod(buffer.shape), 1)
    return buffer.num_bytes // elements * (-(-elements // VECTOR) * VECTOR)


class NumpyConvolutions:
    """In place of cuDNN: the operators' own NumPy, in float64."""

    variant, deterministic = "NumPy", False

    def __init__(self, device: Device) -> None:
        self._device = device

    def save(self) -> None: ...

    def plan(self, problem: Problem) -> Any:
        node = Node("Convolution", "NumPy", (), {
            "kernel": problem.w[1:3], "stride": problem.stride, "pad": problem.pad, "dilate": problem.dilate,
            "num_filter": problem.w[0], "num_group": problem.x[3] // problem.w[3], "layout": "NHWC", "no_bias": True})

        def enqueue(*addresses: int, workspace: int) -> None:
            left = iter(addresses)

            def read(shape: tuple[int, ...], dtype: str = problem.dtype) -> np.ndarray:
                return self._device.get(next(left), shape, dtype)

            def write(values: np.ndarray, dtype: str = problem.dtype) -> None:
                self._device.set(next(left), values, dtype)

            if problem.kind == "dgrad":
                write(convolution_dgrad(node, read(problem.y), read(problem.w), problem.x))
            elif problem.kind == "wgrad":
                x, dy = read(problem.x), read(problem.y)
                write(convolution_wgrad(node, dy, x))
            else:
                y = convolution(node, read(problem.x), read(problem.w))
                if "_bias" in problem.kind:
                    y = y + read((problem.y[3],), "float32")
                if "_add" in problem.kind:
                    y = y + read(problem.y)
                if "_relu" in problem.kind:
                    y = np.maximum(y, 0)
                write(y)
                if "_stats" in problem.kind:
                    y = rounded(y, problem.dtype)  # as BatchNorm's own kernel would find it
                    write(y.sum((0, 1, 2)), "float32")
                    write((y * y).sum((0, 1, 2)), "float32")

        return SimpleNamespace(workspace_bytes=0, time_ms=1.0, enqueue=enqueue)


class EvenPlanner:
    """A planner that gives equal times to all problems that can be emulated, so that the fewest nodes are chosen."""

    deterministic = False

    def save(self) -> None: ...

    def transient_error(self, problem: str) -> None: ...

    def times(self, problems: Mapping[str, Lower], others: Any = ()) -> dict[str, float]:
        return {name: self._time(lower) for name, lower in problems.items()}

    def _time(self, lower: Lower) -> float:
        try:
            return float(len(lower().launches))
        except GraphError:
            return math.inf


def emulated_toolchain(gpu: EmulatedGpu, *_options: Any, folder: Path = SOURCES) -> Toolchain:
    """In place of `toolchain`."""
    kernels: Any = EmulatedKernels(gpu, folder)
    standing_in: Any = NumpyConvolutions(Device(gpu, kernels)), None, EvenPlanner()
    return Toolchain(gpu, kernels, *standing_in, Arena(gpu))

