"""The one place through which Horovod is imported: `from train.processes.horovod_mxnet import hvd`.

Raises ImportError where it is missing.

Horovod opens its library to the whole process (RTLD_GLOBAL), and with it all that MXNet links: CUDA 11's NVRTC, cuBLAS
and cuDNN 8. Newer ones that are loaded later, such as the cuda executor's, then call the old ones' functions of equal
names: NVRTC 13 crashed in its first compilation. Nobody but allreduce.cc needs Horovod's symbols, and it links the
library by name, so here it is opened for itself alone.

An operation of Horovod that fails is not an error to MXNet: when a process is lost many fail at once, and MXNet notes
errors without a lock, which has corrupted its heap. Horovod keeps the first reason (scripts/build_horovod.py), and each
of MXNet's functions that wait asks for it and raises HorovodInternalError. So nobody gets the values of an operation
that failed.
"""

from __future__ import annotations

import ctypes
from typing import Any

from common.mxnet_compat import mx

_for_all, ctypes.RTLD_GLOBAL = ctypes.RTLD_GLOBAL, ctypes.RTLD_LOCAL  # type: ignore[misc]  # a constant by its name
try:
    import horovod.mxnet as hvd
    from horovod.common.exceptions import HorovodInternalError
    from horovod.mxnet.mpi_ops import MPI_MXNET_LIB_CTYPES as LIBRARY
finally:
    ctypes.RTLD_GLOBAL = _for_all  # type: ignore[misc]

__all__ = ["forget_failure", "hvd"]

# A Horovod that scripts/build_horovod.py has not built tells MXNet.
KEEPS_FAILURE = hasattr(LIBRARY, "horovod_mxnet_keep_failures")
WAITS = ("MXNDArraySyncCopyToCPU", "MXNDArrayWaitToRead", "MXNDArrayWaitToWrite", "MXNDArrayWaitAll")


def forget_failure() -> None:
    """Waits do not raise any more what has failed so far."""
    if KEEPS_FAILURE:
        LIBRARY.horovod_mxnet_forget_failure()


def _raise_failure(result: int, function: Any, arguments: Any) -> int:
    """After a call of one of WAITS; `result` is MXNet's."""
    if reason := LIBRARY.horovod_mxnet_failure():
        raise HorovodInternalError(f"an operation of Horovod failed: {reason.decode(errors='replace')}")
    return result


if KEEPS_FAILURE:
    LIBRARY.horovod_mxnet_keep_failures()
    LIBRARY.horovod_mxnet_failure.restype = ctypes.c_char_p
    for _name in WAITS:
        getattr(mx.base._LIB, _name).errcheck = _raise_failure
