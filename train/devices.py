"""Chooses the device and executor of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from common.command_line import part_of
from common.mxnet_compat import mx
from common.nvidia_gpus import GpuInfo, find_gpus
from common.phases import DEVICE, phase
from graph_passes import GraphError
from graph_passes.executors.cuda.requirements import check_requirements
from pipelines.options import SAMPLES
from train.config import Config
from train.errors import TrainError
from train.options.run import DEFAULT_PRESET, FINE_TUNING_PRESET, DeviceOptions
from train.presets import load_preset

# MXNet 1.9.1's GPU wheels hold machine code for these compute capabilities only (and no PTX for newer ones).
STOCK_MXNET_GPUS = ((5, 0), (8, 9))
IMAGENET_PRESET = "resnet50_90ep"


class Placement(NamedTuple):
    executor: str  # argument of create_executor
    device: str  # argument of create_executor: "cpu(0)"
    note: str  # a remark on the choice for the user, or ""


@phase(DEVICE)
def default_config(values: Mapping[str, Any], local_rank: int) -> Config:
    """The preset that the command line names. If the command line names none: fine-tuning with --weights, ImageNet's
    recipe for the user's own data on a GPU, otherwise the preset of the sample set.
    """
    if "config" in values:
        return load_preset(values["config"])
    if values.get("weights"):
        return load_preset(FINE_TUNING_PRESET)
    if values.get("data", SAMPLES) == SAMPLES:
        return load_preset(DEFAULT_PRESET)
    try:
        on_gpu = _place(part_of(DeviceOptions, values), local_rank).device.startswith("gpu")
    except TrainError:  # `choose` raises the error again
        on_gpu = False
    return load_preset(IMAGENET_PRESET if on_gpu else DEFAULT_PRESET)


@phase(DEVICE)
def choose(config: Config, local_rank: int) -> Placement:
    """The device and executor of this process. Raises TrainError if the requested device or executor is not available.
    """
    placement = _place(config, local_rank)
    if placement.executor != "cuda" and config.dtype in ("float16", "bfloat16"):
        raise TrainError(
            f"--dtype {config.dtype} needs the cuda executor, and this run has the {placement.executor} executor, "
            "which computes in float32 only; use --dtype auto"
        )
    return placement


def for_int8(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with the device for an INT8 network: the cuda executor on a GPU if a usable GPU exists,
    otherwise the reference executor on the CPU. `values`: the given options. Raises TrainError for an option that does
    not apply to INT8.
    """
    check_int8(values)
    device, executor = values.get("device", "auto"), values.get("executor", "auto")
    if executor == "auto":
        has_gpu = device == "gpu" or (device == "auto" and bool(find_gpus()) and not _cuda_obstacle(0))
        executor = "cuda" if has_gpu else "reference"
    return replace(config, dtype="auto", device="cpu" if executor == "reference" and device == "auto" else device,
                   executor=executor)


def check_int8(values: Mapping[str, Any]) -> None:
    """Raise TrainError for a given option that does not apply to INT8."""
    if values.get("executor") == "mxnet":
        raise TrainError("--executor mxnet has no INT8: use --executor auto")
    if (dtype := values.get("dtype", "auto")) != "auto":
        raise TrainError(f"--dtype {dtype} is not for --int8, which computes with integers: leave out one of the two")


def _place(wanted: DeviceOptions, local_rank: int) -> Placement:
    gpus = [] if wanted.device == "cpu" else find_gpus()
    if wanted.device == "gpu" and len(gpus) <= local_rank:
        found = f"only {len(gpus)} NVIDIA GPU{'s' * (len(gpus) > 1)}" if gpus else "no NVIDIA GPU"
        if local_rank == 0:
            raise TrainError(f"--device gpu: {found} was found here; use --device cpu")
        raise TrainError(f"--device gpu: process {local_rank} found {found} here; use --device cpu or fewer processes")
    if wanted.executor == "reference" and wanted.device == "gpu":
        raise TrainError("--executor reference is NumPy and runs on the CPU only; use --device cpu")
    if wanted.executor == "cuda" and len(gpus) <= local_rank:
        reason = "but --device is cpu" if wanted.device == "cpu" else "and there is none here"
        raise TrainError(f"--executor cuda needs an NVIDIA GPU, {reason}; use --executor auto")

    on_cpu = "reference" if wanted.executor == "reference" else "mxnet"
    if wanted.executor == "reference" or wanted.device == "cpu":
        return Placement(on_cpu, "cpu(0)", "")
    if len(gpus) <= local_rank:
        return Placement(on_cpu, "cpu(0)", "no NVIDIA GPU found: running on the CPU")
    obstacles = []
    for executor in ("cuda", "mxnet") if wanted.executor == "auto" else (wanted.executor,):
        obstacle = _cuda_obstacle(local_rank) if executor == "cuda" else _stock_mxnet_obstacle(gpus[local_rank])
        if not obstacle:
            return Placement(executor, f"gpu({local_rank})", "")
        obstacles.append(obstacle)
    if wanted.executor == "cuda":
        raise TrainError(f"--executor cuda: {obstacles[0]}")
    if wanted.device == "gpu":
        raise TrainError(f"--device gpu: {'; '.join(obstacles)}; or use --device cpu")
    return Placement(on_cpu, "cpu(0)", f"running on the CPU: {obstacles[0]}")


def _cuda_obstacle(local_rank: int) -> str:
    """The reason why the cuda executor cannot use this process's GPU, with the remedy; "" if it can."""
    try:
        check_requirements(local_rank)
    except GraphError as error:
        return str(error)
    return ""


def _stock_mxnet_obstacle(gpu: GpuInfo) -> str:
    """The reason why the mxnet executor cannot use the GPU; "" if it can."""
    first, last = STOCK_MXNET_GPUS
    if not first <= gpu.capability <= last:
        return f"MXNet {mx.__version__} has no kernels for {gpu}, only for {first[0]}.{first[1]} to {last[0]}.{last[1]}"
    if not mx.runtime.Features().is_enabled("CUDA"):
        return f"MXNet is installed without GPU support, so it cannot use {gpu}"
    return ""
