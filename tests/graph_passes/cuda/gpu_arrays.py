"""Arrays on the GPU for tests: values representable in the dtype, and outputs that are poisoned beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np

from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernel_library import KernelLibrary

POISON = 0xFF  # byte value: NaN in all floating-point types, -1 or 255 in integers
DTYPES = ("float16", "bfloat16", "float32")
# Largest relative distance of neighbouring values; rounding to a dtype changes a value by at most half of it.
PRECISION = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """The values rounded to the dtype, in float64."""
    if dtype == "bfloat16":
        return (_bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(dtype).astype(np.float64)


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """The array as it lies on the GPU."""
    return _bfloat16_bits(values) if dtype == "bfloat16" else np.ascontiguousarray(values.astype(dtype))


def _bfloat16_bits(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Device:
    """A GPU with kernels and a list of allocations to free."""

    def __init__(self, gpu: Gpu, kernels: KernelLibrary) -> None:
        self.gpu, self.kernels = gpu, kernels

    def put(self, values: np.ndarray, dtype: str = "float32") -> int:
        array = stored(values, dtype)
        address = self.gpu.allocate(array.nbytes)
        self.gpu.upload(address, array)
        return address

    def set(self, address: int, values: np.ndarray, dtype: str = "float32") -> None:
        self.gpu.upload(address, stored(values, dtype))

    def poisoned(self, shape: tuple[int, ...], dtype: str = "float32") -> int:
        num_bytes = int(np.prod(shape)) * (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize)
        address = self.gpu.allocate(num_bytes)
        self.gpu.fill(address, POISON, num_bytes)
        return address

    def zeros(self, num_bytes: int) -> int:
        address = self.gpu.allocate(num_bytes)
        self.gpu.fill(address, 0, num_bytes)
        return address

    def get(self, address: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
        if dtype == "bfloat16":
            bits = self.gpu.download(address, shape, np.uint16)
            return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        values = self.gpu.download(address, shape, dtype)
        return values.astype(np.float64) if values.dtype.kind == "f" else values

    def run(self, source: str, kernel: str, grid: Any, block: Any, *arguments: Any, shared_bytes: int = 0) -> None:
        self.kernels.get(source, kernel).launch(grid, block, *arguments, shared_bytes=shared_bytes)


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """Norm of the difference over the norm; NaN fails every comparison."""
    return float(np.linalg.norm(got - wanted) / max(float(np.linalg.norm(wanted)), 1e-30))
