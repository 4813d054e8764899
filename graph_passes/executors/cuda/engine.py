"""MXNet's engine and this executor's own GPU stream: memory that both use, and gates that keep their work in order.

A network (`network.py`) runs on its own stream, which the engine does not know. A gate is an operation that the engine
treats as a reader or writer of an array, and that ends when an event of the network's stream has fired. All later
operations of MXNet or Horovod on that array wait for the gate. A gate costs about 40 us of host time.

A gate waits in one of the engine's four threads for urgent work. The engine has only one thread for normal CPU work. A
gate in that thread would make all CPU work wait for the GPU, even the creation of an array in host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from common.mxnet_compat import mx
from graph_passes.errors import GraphError
from graph_passes.executors.base import parse_device
from graph_passes.executors.cuda.parameters import FlatArray

Array = Any  # mx.nd.NDArray; MXNet has no type stubs
_ENGINE_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_CPU_PRIORITIZED = ctypes.c_int(3)  # MXNet's FnProperty::kCPUPrioritized


class _Context(ctypes.Structure):
    """MXNet's Context in the layout of its C API."""

    _fields_ = (("device_type", ctypes.c_int), ("device_id", ctypes.c_int32))


class Engine:
    """MXNet's engine for one GPU, and the arrays on it that MXNet and a network share.

    Args: device: "gpu(0)", "gpu(1)", ...; raises GraphError for any other device. shared: names and dtypes of the
        buffers that are MXNet arrays.
    """

    def __init__(self, device: str, shared: Mapping[str, str]) -> None:
        kind, self.device_id = parse_device(device)
        if kind != "gpu":
            raise GraphError(f"the cuda executor cannot run on the device '{device}': give gpu(0), gpu(1), ...")
        self.context = mx.gpu(self.device_id)
        self.arrays: dict[str, Array] = {}
        self._shared = shared
        self._seen: list[Array] = []  # arrays that MXNet may still be reading or writing
        self._pending: dict[int, Any] = {}  # number of a gate that is still closed -> its CUDA event
        self._num_gates = 0
        self._pass_gate = _ENGINE_CALLBACK(lambda run_context, number: self._pending.pop(number).sync())

    # --- memory ---

    def allocate(self, name: str, num_bytes: int) -> int | None:
        """The address of a new MXNet array in `arrays`; None for a buffer that is not shared: plain memory is enough
        for it.
        """
        if name not in self._shared:
            return None
        dtype = self._shared[name]
        array = mx.nd.empty((max(1, num_bytes // np.dtype(dtype).itemsize),), ctx=self.context, dtype=dtype)
        self.arrays[name] = array
        return address(array)

    def here(self, array: Array) -> Array:
        """The array itself if it is on this GPU, otherwise a copy on this GPU."""
        return array if array.context == self.context else array.as_in_context(self.context)

    def views(self, name: str, tensors: FlatArray) -> dict[str, Array]:
        """Slices of one flat array. They share its memory, and MXNet's engine treats them as the same variable."""
        flat = self.arrays[name]
        return {tensor: flat[start : start + int(np.prod(tensors.slices[tensor].shape))].reshape(
                    tensors.slices[tensor].shape) for tensor, start in tensors.starts.items()}

    # --- order ---

    def gate(self, event: Any, arrays: Sequence[Array], reading: bool = False, is_seen: bool = True) -> None:
        """Make MXNet's later work on the arrays wait for a CUDA event: all work, or with `reading` only writes. Do not
        pass an array twice, nor a slice together with the array that contains it: the engine treats both as one
        variable and would wait for itself. `is_seen`: `wait` must wait for MXNet's work on the arrays.
        """
        self._num_gates += 1
        self._pending[self._num_gates] = event
        handles = (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays))
        read, written = ((handles, len(arrays)), (None, 0)) if reading else ((None, 0), (handles, len(arrays)))
        cpu = _Context(1, 0)  # a CPU thread waits, so that MXNet's GPU thread stays free
        _call("MXEnginePushSyncND", self._pass_gate, ctypes.c_void_p(self._num_gates), None, ctypes.byref(cpu),
              *read, *written, ctypes.byref(_CPU_PRIORITIZED), 0, b"gate")
        if is_seen and not reading:
            self._seen += arrays

    def wait(self) -> None:
        """Wait until MXNet has finished its work on the arrays of gates with `is_seen`."""
        for array in self._seen:
            _call("MXNDArrayWaitToWrite", array.handle)
        self._seen.clear()


def address(array: Array) -> int:
    """Address of an array on the GPU, after MXNet has written it."""
    array.wait_to_read()
    found = ctypes.c_void_p()
    _call("MXNDArrayGetData", array.handle, ctypes.byref(found))
    return int(found.value or 0)


def _call(function: str, *arguments: Any) -> None:
    """Call a function of MXNet's C API."""
    mx.base.check_call(getattr(mx.base._LIB, function)(*arguments))
