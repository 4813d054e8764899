"""Options of a run: folder, length, starting point, device, processes, checkpoints and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from common.command_line import REPEATABLE
from common.limits import AT_LEAST_1, FRACTION, NOT_NEGATIVE, Limit, between

DEFAULT_PRESET = "cpu_sample"
FINE_TUNING_PRESET = "finetune"  # for runs with --weights
LIST_PRESETS = "?"  # value of `config` that lists the presets
MAX_EPOCHS = 100_000  # limited because the image sizes of all epochs are computed at the start
MAX_BN_GROUP = 16  # GPUs; a limit of the kernels that exchange statistics


@dataclass(frozen=True)
class PresetOptions:
    """The run."""

    config: str = DEFAULT_PRESET
    """Preset, which sets the defaults shown here: a file of train/configs/; ? lists them."""


@dataclass(frozen=True)
class FolderOptions:
    """The run."""

    output: Annotated[str, "FOLDER"] = ""
    """Folder of the run; default: runs/<name>-<date>, with the name of the preset, or language_model."""
    seed: int = 0
    """Seed of everything random: the initial weights, the order of the training data, augmentation, generated text."""


@dataclass(frozen=True)
class RunOptions(FolderOptions, PresetOptions):
    """The run."""


@dataclass(frozen=True, kw_only=True)
class PluginOptions:
    """Plug-ins."""

    plugin: Annotated[tuple[str, ...], "FILE", REPEATABLE] = ()
    """Python file that adds models, augmentations, metrics, schedules or callbacks, or the name of an installed plug-in
    (docs/extending.md). May be repeated. A trained network finds the files of its run again by itself, as long as they
    are unchanged."""


@dataclass(frozen=True)
class LengthOptions:
    """The run."""

    epochs: int = 90
    """Passes over the training data."""
    max_steps: int = 0
    """Stop after this many optimizer steps, counted from the run's start; 0: no limit. The schedule is not
    shortened."""


@dataclass(frozen=True)
class StoppingOptions(LengthOptions):
    """The run."""

    time_limit: float = 0.0
    """Save a checkpoint and stop after this many minutes; 0: no limit."""
    target_accuracy: float = 0.0
    """Stop when the validation top-1 reaches this fraction; 0: no target."""
    patience: int = 0
    """Stop after this many consecutive validations without a better top-1; 0: never. The best weights are kept in any
    case."""


@dataclass(frozen=True)
class WeightsOptions:
    """The run."""

    weights: Annotated[str, "PATH"] = ""
    """Trained weights to start from: a run folder, a checkpoint, a state_dict of torchvision or timm (.pth, .pt,
    .safetensors), MXNet's .params, or an ONNX file. They also set the default of --model. Their
    classifier is used if it has all classes of the data, by name; otherwise a new one is made (docs/fine_tuning.md)."""


@dataclass(frozen=True)
class ResumeOptions:
    """The run."""

    resume: Annotated[str, "PATH"] = ""
    """Run folder or checkpoint file to resume; options that are not given keep their values. auto: the newest
    checkpoint in --output, or a new run if there is none yet, so that one command begins and resumes a run."""


@dataclass(frozen=True)
class BeginningOptions(ResumeOptions, WeightsOptions):
    """The run."""


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """The command."""

    profile_start: bool = False
    """Print on standard error where the seconds went, from the start of the process. (Training always prints it.)"""


@dataclass(frozen=True)
class ComputeOptions:
    """Device and precision."""

    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Device; auto: the GPU if there is one that the executor can use."""
    executor: Literal["auto", "mxnet", "reference", "cuda"] = "auto"
    """Executor; auto: the fastest for the device. reference is NumPy, for tests."""
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Type of the network's tensors; master weights and statistics are always float32. auto: float16 with the executor
    cuda, float32 with the others, which have no other type."""
    tf32: bool = True
    """Executor cuda with dtype float32: convolutions and matrix products round their inputs to TF32, so that tensor
    cores can compute them."""


@dataclass(frozen=True)
class DeviceOptions(ComputeOptions):
    """Device and precision."""

    deterministic: bool = False
    """Equal runs on equal machines give bit-identical results, also if interrupted and resumed (--resume). The executor
    cuda then avoids convolution kernels that sum in a varying order and choices by timing, so steps are slower."""


@dataclass(frozen=True)
class DistributedOptions:
    """Several GPUs."""

    buckets: int = 2
    """Executor cuda on several GPUs: number of parts in which gradients are averaged during the backward pass."""
    wire_dtype: Literal["auto", "float32"] = "auto"
    """Executor cuda on several GPUs: type in which gradients are averaged; auto: float16 if --dtype is float16."""
    bn_group: int = 1
    """Executor cuda on several GPUs: number of neighbouring GPUs of a machine that share each batch's BatchNorm
    statistics, for small batches per GPU; 1: each GPU has its own."""


@dataclass(frozen=True)
class ElasticOptions:
    """Several GPUs."""

    commit_every: int = 100
    """Elastic runs: optimizer steps between two commits. The other processes resume from a commit when one is lost."""


@dataclass(frozen=True)
class CheckpointOptions:
    """Validation, checkpoints and logs."""

    validate_every: int = 1
    """Epochs between two validations; the last epoch always has one. 0: no validation."""
    checkpoint_minutes: float = 10.0
    """Minutes between two checkpoints; 0: only at the end, at a new best accuracy and on signals."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep, besides the best one."""


@dataclass(frozen=True)
class LogLineOptions:
    """Validation, checkpoints and logs."""

    log_every: int = 10
    """Optimizer steps between two log lines."""


@dataclass(frozen=True)
class LogOptions(LogLineOptions):
    """Validation, checkpoints and logs."""

    price_per_hour: float = 0.0
    """Price of an hour of the run's machines, in any currency, for the report; 0: unknown."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    mlperf: bool = False
    """Write MLPerf log lines."""


PRICE: Limit = (lambda value: value == 0 or 1e-4 <= value <= 1e9, "0, or from 0.0001 to 1000000000")

LIMITS: dict[str, Limit] = {
    "epochs": between(1, MAX_EPOCHS),
    **dict.fromkeys(("buckets", "commit_every", "keep_checkpoints", "log_every"), AT_LEAST_1),
    **dict.fromkeys(("seed", "max_steps", "time_limit", "patience", "validate_every", "checkpoint_minutes"),
                    NOT_NEGATIVE),
    "price_per_hour": PRICE,
    "target_accuracy": FRACTION,
    "bn_group": between(1, MAX_BN_GROUP),
}
