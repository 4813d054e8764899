"""The libraries with which graphs are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.disk_cache import Cache
from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.convolution import ConvolutionLibrary, import_cudnn
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernel_library import KernelLibrary
from graph_passes.executors.cuda.planner import Planner
from graph_passes.executors.cuda.recurrent import RecurrentLibrary
from graph_passes.executors.cuda.statistics_group import StatisticsGroup


@dataclass(frozen=True)
class Toolchain:
    """One library of each kind, shared by a training step and its inference at every image size."""

    gpu: Gpu
    kernels: KernelLibrary
    convolutions: ConvolutionLibrary
    recurrent: RecurrentLibrary
    planner: Planner
    arena: Arena
    group: StatisticsGroup | None = None  # the GPUs that share BatchNorm's statistics in training


def toolchain(gpu: Gpu, tf32: bool = True, deterministic: bool = False, group: StatisticsGroup | None = None,
              cache_folder: Path | None = None) -> Toolchain:
    """The toolchain for one GPU, with the fields of `StepOptions`. Raises GraphError if cuDNN is missing or too old."""
    cache, arena = Cache(_machine(gpu), cache_folder), Arena(gpu)
    convolutions = ConvolutionLibrary(gpu, cache, arena, tf32, deterministic)
    planner = Planner(gpu, cache, arena, convolutions.variant, deterministic)
    return Toolchain(gpu, KernelLibrary(gpu, cache), convolutions, RecurrentLibrary(gpu, arena, tf32), planner, arena,
                     group)


def _machine(gpu: Gpu) -> str:
    """The versions and the GPU that compiled kernels and timed plans depend on."""
    return f"{gpu.name} driver {gpu.driver_version} cudnn {import_cudnn().backend_version()}"
