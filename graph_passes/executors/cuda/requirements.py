"""Whether the cuda executor can run here, found out before anything is built."""

from __future__ import annotations

from common.mxnet_compat import mx
from graph_passes.errors import GraphError
from graph_passes.executors.cuda.convolution import import_cudnn
from graph_passes.executors.cuda.device import INSTALL, Gpu


def check_requirements(device_id: int) -> None:
    """Raise GraphError, in one sentence with the way out, where the GPU, the driver or a library is missing or too old.
    """
    if not mx.runtime.Features().is_enabled("CUDA"):
        raise GraphError(f"MXNet is installed without GPU support: {INSTALL}")
    Gpu(device_id)
    import_cudnn()
    _find_nvrtc()


def _find_nvrtc() -> None:
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        load_nvidia_dynamic_lib("nvrtc")
    except DynamicLibNotFoundError:
        raise GraphError(f"NVRTC (libnvrtc.so) is missing, which compiles the kernels: {INSTALL}") from None
