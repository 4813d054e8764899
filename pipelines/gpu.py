"""Compiles and runs the loader's kernels on a GPU.

Only this module of the package calls CUDA libraries. It imports them when a device is made, so the package can be
imported on a machine without them.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import numpy as np

from common.disk_cache import Cache
from common.mxnet_compat import mx
from common.nvidia_gpus import find_gpus
from pipelines.errors import DataError


class GpuDevice:
    """A GPU with MXNet's memory and a separate stream, which has priority over the training step's stream.

    Raises DataError if the package that compiles the kernels is missing.
    """

    def __init__(self, device_id: int, source: str) -> None:
        try:
            from cuda.bindings import driver
            from cuda.core import Device as CudaDevice
            from cuda.core import LaunchConfig, ObjectCode, StreamOptions, launch
        except ImportError as error:
            raise DataError(f"batches on the GPU need cuda-core ({error}): `make setup`, or pip install '.[gpu]' in "
                            "this project's folder") from None
        self._context = mx.gpu(device_id)
        gpu = CudaDevice(device_id)
        gpu.set_current()
        self._stream = gpu.create_stream(options=StreamOptions(priority=-1))
        self._launch, self._config, self._driver = launch, LaunchConfig, driver
        major, minor = find_gpus()[device_id].capability
        self._code = ObjectCode.from_cubin(compiled(source, f"sm_{major}{minor}"))
        self._kernels: dict[str, Any] = {}

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return mx.nd.empty(shape, ctx=self._context, dtype=dtype)

    def address(self, array: Any) -> int:
        address = ctypes.c_void_p()
        mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
        return int(address.value or 0)

    def upload(self, array: Any, values: np.ndarray) -> None:
        # The caller may overwrite `values` after this call: CUDA copies memory that is not pinned to an internal buffer
        # during the call.
        status, = self._driver.cuMemcpyHtoDAsync(
            self.address(array), values.ctypes.data, values.nbytes, int(self._stream.handle))
        if int(status):
            raise DataError(f"the loader cannot copy {values.nbytes} bytes to the GPU (CUDA error {int(status)})")

    def launch(self, kernel: str, grid: tuple[int, int], block: int, *arguments: int | np.int32) -> None:
        if kernel not in self._kernels:
            self._kernels[kernel] = self._code.get_kernel(kernel)
        self._launch(self._stream, self._config(grid=grid, block=block), self._kernels[kernel], *arguments)

    def synchronize(self) -> None:
        self._stream.sync()


def compiled(source: str, architecture: str) -> bytes:
    """Compile CUDA C++ for an architecture such as 'sm_90' to machine code; done once on each machine, then cached."""
    from cuda.core import Program, ProgramOptions

    cache = Cache("loader kernels")
    entry = hashlib.sha256(f"{architecture} {source}".encode()).hexdigest()[:32]
    if code := cache.read(entry):
        return code
    options = ProgramOptions(arch=architecture, std="c++17", name="augment.cu")
    code = bytes(Program(source, "c++", options).compile("cubin").code)
    cache.write(entry, code)
    return code
