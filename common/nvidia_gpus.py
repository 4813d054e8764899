"""The NVIDIA GPUs that this process may use. Only the driver is asked, so no CUDA library needs to be installed."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # values of CUdevice_attribute in CUDA's driver API


class GpuInfo(NamedTuple):
    """Properties of a GPU, read from the driver."""

    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


def find_gpus() -> list[GpuInfo]:
    """The GPUs in the order of their device numbers; an empty list if no GPU is available."""
    driver = _driver()
    count = ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    gpus = []
    for ordinal in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        major, minor = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        driver.cuDeviceGetName(name, len(name), device)
        driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
        gpus.append(GpuInfo(name.value.decode(), (major.value, minor.value)))
    return gpus


def driver_cuda_version() -> int:
    """The newest CUDA version that the driver supports, as an integer: 12080 for 12.8; 0 without a driver."""
    driver = _driver()
    version = ctypes.c_int(0)
    if driver is not None:
        driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _driver() -> ctypes.CDLL | None:
    """CUDA's driver library, initialised; None if it is missing or finds no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None
