"""Options of a run's course: its folder, length, beginning and device, several processes, checkpoints, logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from common.limits import AT_LEAST_1, FRACTION, NOT_NEGATIVE, Limit, between

DEFAULT_PRESET = "cpu_sample"
FINE_TUNING_PRESET = "finetune"  # for runs with --weights
LIST_PRESETS = "?"  # value of `config` that asks which presets there are
MAX_EPOCHS = 100_000  # the image size of each is made out at the start
MAX_BN_GROUP = 16  # GPUs; of the kernels in which they write to each other


@dataclass(frozen=True)
class RunOptions:
    """The run."""

    config: str = DEFAULT_PRESET
    """Preset that gives the defaults, which are shown here: a file of train/configs/; ? lists them."""
    output: Annotated[str, "FOLDER"] = ""
    """Folder of the run; default: runs/<config>-<date>."""
    seed: int = 0
    """Seed of the initial weights, the order of the images and their augmentation."""


@dataclass(frozen=True)
class LengthOptions:
    """The run."""

    epochs: int = 90
    """Passes over the training images."""
    max_steps: int = 0
    """Stop after this many optimizer steps, counted from the run's first; 0: no limit. The schedule stays that of all
    epochs."""
    time_limit: float = 0.0
    """Stop after this many minutes, with a checkpoint; 0: no limit."""
    target_accuracy: float = 0.0
    """Stop when the validation top-1 reaches this fraction; 0: no target."""
    patience: int = 0
    """Stop when so many validations in a row have not raised the best top-1; 0: no such limit. The best weights are
    kept in any case."""


@dataclass(frozen=True)
class BeginningOptions:
    """The run."""

    weights: Annotated[str, "PATH"] = ""
    """Trained weights to start from: a run folder, a checkpoint, a state_dict of torchvision or timm (.pth, .pt,
    .safetensors), Gluon's .params, or an ONNX export of this program. --model is theirs by default. The classifier is
    theirs where they have all classes of the data, by their names, else a new one (docs/fine_tuning.md)."""
    resume: Annotated[str, "PATH"] = ""
    """Run folder or checkpoint file to go on from; auto: the newest checkpoint in --output, or the start where there is
    none yet: the same command then begins a run and goes on with it."""


@dataclass(frozen=True)
class DeviceOptions:
    """Device and precision."""

    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to compute; auto: on the GPU if there is one that the executor can use."""
    executor: Literal["auto", "mxnet", "reference", "cuda"] = "auto"
    """What computes; auto: the fastest that runs on the device. reference is NumPy, for tests."""
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Type of the network's tensors (master weights and statistics are float32 in any case); auto: float16 with the
    executor cuda, float32 with the others, which have no other."""
    tf32: bool = True
    """Executor cuda with dtype float32: convolutions round their inputs to TF32, which tensor cores compute with."""
    deterministic: bool = False
    """Equal runs on equal machines give equal bits, also in parts (--resume). Executor cuda: convolution kernels that
    sum in a varying order are left out, and nothing is chosen by timing it, which makes steps slower."""


@dataclass(frozen=True)
class DistributedOptions:
    """Several GPUs."""

    buckets: int = 2
    """Executor cuda on several GPUs: parts in which the gradients are averaged during the backward pass."""
    wire_dtype: Literal["auto", "float32"] = "auto"
    """Executor cuda on several GPUs: type in which gradients are averaged; auto: float16 where --dtype is."""
    bn_group: int = 1
    """Executor cuda on several GPUs: this many neighbouring GPUs of a machine share the BatchNorm statistics of each
    batch, for small batches per GPU; 1: each GPU has its own."""


@dataclass(frozen=True)
class ElasticOptions:
    """Several GPUs."""

    commit_every: int = 100
    """Elastic runs: optimizer steps between two commits, from which the others go on when a process is lost."""


@dataclass(frozen=True)
class CheckpointOptions:
    """Validation, checkpoints and logs."""

    validate_every: int = 1
    """Epochs between two validations, the last epoch always having one; 0: none at all."""
    checkpoint_minutes: float = 10.0
    """Minutes between two checkpoints; 0: only at the end, on a new best accuracy and on signals."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints are kept, besides the best."""


@dataclass(frozen=True)
class LogOptions:
    """Validation, checkpoints and logs."""

    log_every: int = 10
    """Optimizer steps between two log lines."""
    price_per_hour: float = 0.0
    """What an hour of the run's machines costs, in any currency; the report then has the price of the run. 0: not
    known."""
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
