"""The NVIDIA GPUs that this process may use, asked from the driver alone: no CUDA library need be installed."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute in CUDA's driver API


class Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


def find_gpus() -> list[Gpu]:
    """In the order of their numbers; empty where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    gpus = []
    for ordinal in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        major, minor = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        driver.cuDeviceGetName(name, len(name), device)
        driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
        gpus.append(Gpu(name.value.decode(), (major.value, minor.value)))
    return gpus
