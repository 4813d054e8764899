"""Reads the GPUs of this machine from NVML: memory, NVLink and the cores beside each GPU. Also computes each process's
share of the cores.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from train.errors import TrainError

CORES_VARIABLE = "RESNET_CORES"  # environment variable: the number of cores for a process
MIN_FREE_BYTES = 2 * 2**30  # least free memory of a usable GPU; ResNet-50 needs more
MAX_IN_USE = 0.1  # share of a GPU's memory; above it another program is using the GPU


class GpuPlace(NamedTuple):
    """A GPU and its place in this machine."""

    visible: str  # the GPU's name in CUDA_VISIBLE_DEVICES
    name: str
    free_bytes: int
    total_bytes: int
    cores: frozenset[int]  # CPU cores on the GPU's NUMA node; empty if unknown
    num_nvlinks: int  # active NVLinks
    processes: tuple[int, ...]  # ids of processes that use the GPU; a container does not see processes outside

    def __str__(self) -> str:
        links = f"{self.num_nvlinks} NVLinks" if self.num_nvlinks else "no NVLink"
        return f"{self.name}, {self.free_bytes / 2**30:.1f} of {self.total_bytes / 2**30:.1f} GiB free, {links}"


def check_host_name() -> None:
    """Raise TrainError if this machine's own name has no address. Gloo looks up this name for any network interface,
    and crashes if it has no address (Horovod 0.28.1, GlooContext::InitializeForProcessSet).
    """
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        reason = error.strerror or error
        raise TrainError(f"this machine's name, {name}, has no address ({reason}), and several processes need an "
                         f"address to reach each other: add the line '127.0.0.1 {name}' to /etc/hosts") from None


def read_gpus(nvml: Any = None) -> list[GpuPlace]:
    """The GPUs visible through CUDA_VISIBLE_DEVICES, in its order, or else in PCI bus order; an empty list without NVML
    or a driver.

    `nvml` is the module pynvml; tests pass a substitute.

    Raises TrainError for an entry of CUDA_VISIBLE_DEVICES that is not a GPU of this machine.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        count = nvml.nvmlDeviceGetCount()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).replace(" ", "")
        # CUDA ignores all entries after it
        names = itertools.takewhile(lambda name: name not in ("", "-1"), visible.split(","))
        return [_read(nvml, name, count) for name in names]
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, visible: str, count: int) -> GpuPlace:
    try:
        if not visible.isdecimal():
            handle = nvml.nvmlDeviceGetHandleByUUID(visible)
        elif int(visible) < count:
            handle = nvml.nvmlDeviceGetHandleByIndex(int(visible))
        else:
            raise TrainError(f"CUDA_VISIBLE_DEVICES names GPU {visible}, but this machine has {count}; correct it")
    except nvml.NVMLError:
        raise TrainError(f"CUDA_VISIBLE_DEVICES names {visible!r}, which is not a GPU here; correct it") from None
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    cores: frozenset[int] = frozenset()
    with contextlib.suppress(nvml.NVMLError):
        words = nvml.nvmlDeviceGetCpuAffinity(handle, -(-(os.cpu_count() or 1) // 64))
        cores = frozenset(64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1)
    num_nvlinks = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            num_nvlinks += nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED
        except nvml.NVMLError:  # the GPU has fewer NVLinks, or none
            break
    processes: tuple[int, ...] = ()
    with contextlib.suppress(nvml.NVMLError):
        processes = tuple(process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    name = nvml.nvmlDeviceGetName(handle)
    return GpuPlace(visible, name, memory.free, memory.total, cores, num_nvlinks, processes)


def check(gpus: Sequence[GpuPlace], num_processes: int) -> list[str]:
    """Remarks, as sentences, on starting `num_processes` processes on the first GPUs.

    Raises TrainError if the processes cannot work on these GPUs.
    """
    if num_processes > len(gpus):
        names = ", ".join(sorted({gpu.name for gpu in gpus}))
        found = f"only {len(gpus)} GPU{'s' * (len(gpus) > 1)} here ({names})"
        raise TrainError(f"-n {num_processes} needs {num_processes} GPUs, but there {'are' if len(gpus) > 1 else 'is'} "
                         f"{found}: give -n {len(gpus)}, or --device cpu")
    notes = []
    gpus = gpus[:num_processes]
    for gpu in gpus:
        others = f" (processes {', '.join(map(str, gpu.processes))})" if gpu.processes else ""
        free, total = gpu.free_bytes / 2**30, gpu.total_bytes / 2**30
        if gpu.free_bytes < MIN_FREE_BYTES:
            raise TrainError(f"GPU {gpu.visible} has only {free:.1f} of {total:.1f} GiB free{others}: end the programs "
                             f"that use it, or choose other GPUs with CUDA_VISIBLE_DEVICES")
        if total - free > MAX_IN_USE * total:
            notes.append(f"GPU {gpu.visible} is in use by another program{others}, which may slow all processes: "
                         f"{free:.1f} of {total:.1f} GiB are free")
    if num_processes > 1 and not all(gpu.num_nvlinks for gpu in gpus):
        notes.append("not every GPU has an active NVLink: gradients cross PCIe or the host's memory, which is slower")
    if len({gpu.name for gpu in gpus}) > 1:
        notes.append(f"the GPUs differ ({', '.join(gpu.name for gpu in gpus)}): every step waits for the slowest")
    return notes


def assign_cores(gpus: Sequence[GpuPlace], num_processes: int) -> list[frozenset[int]]:
    """CPU cores for each process: an equal share of the cores beside its GPU that this process may use.

    If a GPU's cores are unknown or unavailable, or without GPUs, the share is taken from all cores. Processes share
    cores if they outnumber them.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    near = [gpu.cores & allowed or allowed for gpu in gpus[:num_processes]] or [allowed] * num_processes
    shares = []
    for number, cores in enumerate(near):
        sharing = [other for other, others in enumerate(near) if others == cores]
        ordered, place, count = sorted(cores), sharing.index(number), len(sharing)
        first, last = place * len(ordered) // count, (place + 1) * len(ordered) // count
        shares.append(frozenset(ordered[first:last] or [ordered[place % len(ordered)]]))
    return shares


def cores_of_process(local_size: int) -> int:
    """The number of cores for this process on a machine with `local_size` processes."""
    return int(os.environ.get(CORES_VARIABLE, 0)) or max(1, len(os.sched_getaffinity(0)) // local_size)


def format_cores(cores: frozenset[int]) -> str:
    """Core numbers in the Linux kernel's notation: 0-3,8."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
