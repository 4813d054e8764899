"""Records all kernels, copies and fills that run on the GPU during a part of a program, with their times.

    with KernelTrace() as trace:
        ...
    trace.launches  # the work of this block

It uses NVIDIA's CUPTI, which comes with the CUDA toolkit or as the package nvidia-cuda-cupti-cu12, and reads CUPTI's
activity records in place (cupti_activity.h). Recording slows the host down, so a traced block should not be timed.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from common.errors import UserError

_COPY, _FILL, _KERNEL = _KINDS = 1, 2, 10  # CUpti_ActivityKind
_TIMES, _NAME = 16, 104  # byte offsets in a record: of its start and end times, and of a kernel's name
_BUFFER_BYTES = 4 << 20
_REQUESTED = ctypes.CFUNCTYPE(None, *3 * [ctypes.POINTER(ctypes.c_size_t)])
_COMPLETED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)


class Launch(NamedTuple):
    """One kernel, copy or fill."""

    name: str  # a kernel's mangled name; otherwise "copy" or "fill"
    start: int  # nanoseconds
    end: int


class KernelTrace:
    """A context that records the work on all GPUs of this process; only one at a time.

    Raises UserError if CUPTI is missing or refuses.
    """

    _registered: Any = None  # CUPTI keeps the callbacks for the life of the process, and so do we

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __enter__(self) -> KernelTrace:
        cupti = _cupti()
        if KernelTrace._registered is None:
            KernelTrace._registered = _Buffers(cupti)
        cupti.cuptiActivityFlushAll(1)
        KernelTrace._registered.launches = self.launches
        for kind in _KINDS:
            _check(cupti, cupti.cuptiActivityEnable(kind))
        return self

    def __exit__(self, *_: object) -> None:
        cupti = _cupti()
        for kind in _KINDS:
            _check(cupti, cupti.cuptiActivityDisable(kind))
        _check(cupti, cupti.cuptiActivityFlushAll(1))
        KernelTrace._registered.launches = []

    @property
    def kernels(self) -> list[Launch]:
        return [launch for launch in self.launches if launch.name not in ("copy", "fill")]


class _Buffers:
    """The memory that CUPTI writes records to, and the callbacks that read them."""

    def __init__(self, cupti: Any) -> None:
        self._cupti = cupti
        self._buffers: dict[int, Any] = {}
        self.launches: list[Launch] = []
        self._callbacks = _REQUESTED(self._give), _COMPLETED(self._read)
        _check(cupti, cupti.cuptiActivityRegisterCallbacks(*self._callbacks))

    def _give(self, buffer: Any, size: Any, most_records: Any) -> None:
        memory = (ctypes.c_uint64 * (_BUFFER_BYTES // 8))()
        self._buffers[ctypes.addressof(memory)] = memory
        buffer[0], size[0], most_records[0] = ctypes.addressof(memory), _BUFFER_BYTES, 0

    def _read(self, _context: int, _stream: int, buffer: int, _size: int, valid: int) -> None:
        record = ctypes.c_void_p()
        while self._cupti.cuptiActivityGetNextRecord(ctypes.c_void_p(buffer), ctypes.c_size_t(valid),
                                                     ctypes.byref(record)) == 0:
            self.launches.append(parsed(record.value or 0))
        del self._buffers[buffer]


def parsed(record: int) -> Launch:
    """Parse the activity record at an address."""
    kind = ctypes.c_uint32.from_address(record).value
    start, end = (ctypes.c_uint64 * 2).from_address(record + _TIMES)
    if kind != _KERNEL:
        return Launch("copy" if kind == _COPY else "fill", start, end)
    return Launch((ctypes.c_char_p.from_address(record + _NAME).value or b"").decode(), start, end)


def _cupti() -> Any:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib("cupti").abs_path)
    except Exception as error:  # several types of errors mean that it was not found
        raise UserError("CUPTI, which traces the work of a GPU, is missing: install the CUDA toolkit, or "
                        f"nvidia-cuda-cupti-cu12 ({type(error).__name__})") from None


def _check(cupti: Any, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        cupti.cuptiGetResultString(status, ctypes.byref(text))
        raise UserError(f"CUPTI cannot record here: {(text.value or b'').decode()} ({status})")
