"""The only place that imports Horovod: `from train.processes.horovod_mxnet import hvd`.

Raises ImportError if Horovod is missing.

Horovod loads its library with global symbols (RTLD_GLOBAL). This also makes the symbols of MXNet's libraries global:
CUDA 11's NVRTC, cuBLAS and cuDNN 8. Newer libraries that are loaded later, such as the cuda executor's, then call the
old functions of the same names; NVRTC 13 crashed in its first compilation. Only allreduce.cc needs Horovod's symbols,
and it links the library by name. Therefore the library is loaded with local symbols here.

A failed Horovod operation is not reported to MXNet as an error. When a process is lost, many operations fail at once,
and MXNet records errors without a lock, which has corrupted the heap. Instead Horovod stores the first failure
(scripts/build_horovod.py). Each MXNet function that waits checks for a stored failure and raises HorovodInternalError,
so the values of a failed operation are never used.
"""

from __future__ import annotations

import ctypes
from typing import Any

from common.mxnet_compat import mx

# temporarily assigns to a constant of ctypes
_for_all, ctypes.RTLD_GLOBAL = ctypes.RTLD_GLOBAL, ctypes.RTLD_LOCAL  # type: ignore[misc]
try:
    import horovod.mxnet as hvd
    from horovod.common.exceptions import HorovodInternalError
    from horovod.mxnet.mpi_ops import MPI_MXNET_LIB_CTYPES as LIBRARY
finally:
    ctypes.RTLD_GLOBAL = _for_all  # type: ignore[misc]

__all__ = ["forget_failure", "hvd"]

# False for a Horovod that scripts/build_horovod.py has not built. That Horovod reports failures to MXNet.
KEEPS_FAILURE = hasattr(LIBRARY, "horovod_mxnet_keep_failures")
WAITS = ("MXNDArraySyncCopyToCPU", "MXNDArrayWaitToRead", "MXNDArrayWaitToWrite", "MXNDArrayWaitAll")


def forget_failure() -> None:
    """Forget past failures, so that waits do not raise them."""
    if KEEPS_FAILURE:
        LIBRARY.horovod_mxnet_forget_failure()


def _raise_failure(result: int, function: Any, arguments: Any) -> int:
    """Raise HorovodInternalError if an operation has failed; called after each function of WAITS with MXNet's
    `result`."""
    if reason := LIBRARY.horovod_mxnet_failure():
        raise HorovodInternalError(f"an operation of Horovod failed: {reason.decode(errors='replace')}")
    return result


if KEEPS_FAILURE:
    LIBRARY.horovod_mxnet_keep_failures()
    LIBRARY.horovod_mxnet_failure.restype = ctypes.c_char_p
    for _name in WAITS:
        getattr(mx.base._LIB, _name).errcheck = _raise_failure
