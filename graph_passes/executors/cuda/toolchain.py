"""What graphs are compiled with."""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.convolution import ConvolutionLibrary
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernels import KernelLibrary
from graph_passes.executors.cuda.planner import Planner
from graph_passes.executors.cuda.statistics_group import StatisticsGroup


@dataclass(frozen=True)
class Toolchain:
    """One of each for a training step and its inference, at every size of images."""

    gpu: Gpu
    kernels: KernelLibrary
    convolutions: ConvolutionLibrary
    planner: Planner
    arena: Arena
    trial_kernels: bool = False  # as StepOptions has it
    group: StatisticsGroup | None = None  # the GPUs that BatchNorm's statistics are shared with in training
