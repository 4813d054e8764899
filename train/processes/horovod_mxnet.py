"""The one place through which Horovod is imported: `from train.processes.horovod_mxnet import hvd`.

Raises ImportError where it is missing.

Horovod opens its library to the whole process (RTLD_GLOBAL), and with it all that MXNet links: CUDA 11's NVRTC, cuBLAS
and cuDNN 8. Newer ones that are loaded later, such as the cuda executor's, then call the old ones' functions of equal
names: NVRTC 13 crashed in its first compilation. Nobody but allreduce.cc needs Horovod's symbols, and it links the
library by name, so here it is opened for itself alone.
"""

from __future__ import annotations

import ctypes

_for_all, ctypes.RTLD_GLOBAL = ctypes.RTLD_GLOBAL, ctypes.RTLD_LOCAL  # type: ignore[misc]  # a constant by its name
try:
    import horovod.mxnet as hvd
finally:
    ctypes.RTLD_GLOBAL = _for_all  # type: ignore[misc]

__all__ = ["hvd"]
