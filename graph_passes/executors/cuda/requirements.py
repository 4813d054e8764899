"""Check whether the cuda executor can run here, before anything is built."""

from __future__ import annotations

from common.mxnet_compat import mx
from common.nvidia_gpus import driver_cuda_version, find_gpus
from graph_passes.errors import GraphError
from graph_passes.executors.cuda.convolution import import_cudnn
from graph_passes.executors.cuda.device import INSTALL, MIN_COMPUTE_CAPABILITY, MIN_DRIVER_CUDA, Gpu


def check_requirements(device_id: int) -> None:
    """Raise GraphError, in one sentence with the way out, if the GPU, the driver or a library is missing or too old."""
    if not mx.runtime.Features().is_enabled("CUDA"):
        raise GraphError(_too_old(device_id) or f"MXNet is installed without GPU support: {INSTALL}")
    Gpu(device_id)
    import_cudnn()
    _find_nvrtc()


def _too_old(device_id: int) -> str:
    """The reason why setup installed no GPU packages on this machine; "" if it installed them."""
    gpus, version = find_gpus(), driver_cuda_version()
    if device_id >= len(gpus):
        return ""
    if version < MIN_DRIVER_CUDA:
        return (f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10} only, the cuda executor "
                "needs 12.0 or newer: update the driver, then run make setup")
    if gpus[device_id].capability < MIN_COMPUTE_CAPABILITY:
        return f"{gpus[device_id]} is older than 7.5, which cuDNN 9 needs"
    return ""


def _find_nvrtc() -> None:
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        load_nvidia_dynamic_lib("nvrtc")
    except DynamicLibNotFoundError:
        raise GraphError(f"NVRTC (libnvrtc.so) is missing, which compiles the kernels: {INSTALL}") from None
