"""What a stretch of a program runs on the GPU, whoever launched it: kernels, copies and fills, and how long each took.

    with KernelTrace() as trace:
        ...
    trace.launches  # of this stretch

From NVIDIA's CUPTI, which comes with the CUDA toolkit, or as the package nvidia-cuda-cupti-cu12; its activity records
are read in place (cupti_activity.h). Recording slows the host down, so what is traced is not timed as well.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from common.errors import UserError

_COPY, _FILL, _KERNEL = _KINDS = 1, 2, 10  # CUpti_ActivityKind
_TIMES, _NAME = 16, 104  # where in a record its start and end are, and a kernel's name
_BUFFER_BYTES = 4 << 20
_REQUESTED = ctypes.CFUNCTYPE(None, *3 * [ctypes.POINTER(ctypes.c_size_t)])
_COMPLETED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)


class Launch(NamedTuple):
    """One kernel, copy or fill."""

    name: str  # a kernel's, mangled; else "copy" or "fill"
    start: int  # nanoseconds
    end: int


class KernelTrace:
    """Records what runs on all GPUs of this process between begin and end of the context. One at a time. Raises
    UserError where CUPTI is missing or refuses."""

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
    """The memory that CUPTI writes records to, and what reads them."""

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
    """The activity record at an address."""
    kind = ctypes.c_uint32.from_address(record).value
    start, end = (ctypes.c_uint64 * 2).from_address(record + _TIMES)
    if kind != _KERNEL:
        return Launch("copy" if kind == _COPY else "fill", start, end)
    return Launch((ctypes.c_char_p.from_address(record + _NAME).value or b"").decode(), start, end)


def _cupti() -> Any:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib("cupti").abs_path)
    except Exception as error:  # of several kinds, where it is found nowhere
        raise UserError("CUPTI is missing, which sees what runs on a GPU: install the CUDA toolkit, or "
                        f"nvidia-cuda-cupti-cu12 ({type(error).__name__})") from None


def _check(cupti: Any, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        cupti.cuptiGetResultString(status, ctypes.byref(text))
        raise UserError(f"CUPTI does not record here: {(text.value or b'').decode()} ({status})")
