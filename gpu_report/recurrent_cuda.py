"""Recurrent layers on an NVIDIA GPU, with the cuDNN algorithms that the cuda executor chooses."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import numpy as np

from gpu_report.kernels_cuda import DTYPES, LEAST_CAPABILITY, MAX_LAUNCHES, SAMPLE_MS
from gpu_report.recurrent import TRAINING, Layer, layer_graph
from graph_passes import passes
from graph_passes.executors.base import parse_device
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.function import DeviceFunction
from graph_passes.executors.cuda.toolchain import toolchain
from graph_passes.pipeline import cover
from train.devices import Placement


def open_machine(placement: Placement) -> CudaMachine:
    """The GPU, ready to time layers. Raises GraphError if a library is missing."""
    return CudaMachine(parse_device(placement.device)[1])


class CudaMachine:
    """Implements `recurrent.Machine` on a GPU."""

    def __init__(self, device_id: int) -> None:
        self.gpu = Gpu(device_id)
        self._tools = {is_tf32: toolchain(self.gpu, is_tf32) for is_tf32 in (False, True)}
        self.precisions = tuple(precision for precision in ("fp16", "tf32", "bf16", "fp32")
                                if self.gpu.capability >= LEAST_CAPABILITY.get(precision, (0, 0)))

    def close(self) -> None:
        """Free the memory, so that the next sections can use it."""
        self.gpu.free_all()

    @contextlib.contextmanager
    def layer(self, layer: Layer, use: str, precision: str) -> Iterator[Callable[[], float]]:
        dtype, is_training = DTYPES[precision], use == TRAINING
        graph = passes.precision(layer_graph(layer.mode, layer.hidden, is_training), dtype)
        shape = (layer.steps, layer.batch, layer.hidden)
        shapes = {"data": shape, **({"head": shape} if is_training else {})}
        function = DeviceFunction(lambda price: cover(graph, price), shapes, dtype,
                                  self._tools[precision != "fp32"])
        try:
            self._fill(function, layer)
            yield self._sampler(function)
        finally:
            function.close()

    def _fill(self, function: DeviceFunction, layer: Layer) -> None:
        """Fill in random data, weights small enough to keep the states in range, and initial states of 0."""
        rng = np.random.default_rng(0)
        for name, buffer in function.variables.items():
            if name.startswith("state"):
                self.gpu.fill(buffer.address, 0, buffer.num_bytes)
                continue
            largest = 1 / math.sqrt(layer.hidden) if name == "parameters" else 1.0
            values = rng.uniform(-largest, largest, buffer.shape).astype(np.float32)
            if buffer.dtype == "bfloat16":
                values = (values.view(np.uint32) >> 16).astype(np.uint16)
            self.gpu.upload(buffer.address, values if buffer.dtype == "bfloat16" else values.astype(buffer.dtype))

    def _sampler(self, function: DeviceFunction) -> Callable[[], float]:
        """A function that takes one sample: the mean ms per call over a series of calls that takes SAMPLE_MS in all."""
        start, end = self.gpu.timing_event(), self.gpu.timing_event()

        def timed(calls: int) -> float:
            self.gpu.record(start)
            for _ in range(calls):
                function()
            self.gpu.record(end)
            self.gpu.synchronize()
            return self.gpu.elapsed_ms(start, end) / calls

        timed(1)
        calls = min(MAX_LAUNCHES, max(1, round(SAMPLE_MS / max(timed(1), 1e-3))))
        return lambda: timed(calls)
