"""The configuration of a run: every knob is declared here, once, with its type, default and help text.

The knobs of one subject that the same commands take are a class, under whose docstring `--help` lists them. A preset
(train/configs/<name>.py) gives some knobs other defaults; the command line overrides both.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import realpath
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import train.configs
from common.command_line import given, given_value, nearest, option_name, part_of
from graph_passes import optimizers
from pipelines import transform
from pipelines.transform import Augmentation, CentreCrop, ImageTransform, Normalisation, SizeLimit
from train import models
from train.errors import TrainError

DEFAULT_PRESET = "cpu_sample"
CONFIG_FILE = "config.json"  # in a run's folder: its configuration
LIST_PRESETS = "?"  # value of `config` that asks which presets there are
LANGUAGE_MODEL = "language_model"  # what `config` is in a run of `language-model`
SAMPLES = "samples"  # value of `data` that stands for the built-in sample set
SYNTHETIC = "synthetic"  # value of `data` for generated images
REFERENCE_BATCH = 256  # images; learning rates are given for this global batch, as in Goyal et al. (arXiv:1706.02677)
LONGEST_WARMUP = 0.2  # part of a run that is shorter than its preset's
MAX_THREADS = 1024  # of a loader; a process cannot have any number of them
MAX_BN_GROUP = 16  # GPUs; of the kernels in which they write to each other
OF_A_SESSION = ("output", "weights", "resume", "max_steps", "time_limit")  # knobs that a run may go on with others of
MIN_IMAGE_SIZE = 32  # pixels; the network halves the image five times


@dataclass(frozen=True)
class DataOptions:
    """Data."""

    data: Annotated[str, "PATH"] = SAMPLES
    """Folder or file of images, in any form of docs/data.md: folders of classes, RecordIO, WebDataset, TFRecord,
    CIFAR-10's own files; samples: the built-in sample set; synthetic: generated images."""
    num_classes: int = 0
    """Classes of the network; 0: as many as the data has."""
    val_split: float = 0.0
    """Of data without images for validation: set this fraction of each class's aside for it, by a hash of the files'
    names, so that an image stays on its side when others come; 0: none."""


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
class NetworkOptions:
    """Network."""

    model: Annotated[str, "NAME"] = "resnet50"
    """Network, by its name: resnet18 to resnet152 (v1.5), resnet50d, resnext50_32x4d, wide_resnet50_2 and others;
    --model '?' names them all."""
    zero_init_residual: bool = True
    """Each residual block starts as its shortcut: the gamma of its last BatchNorm is initially 0, not 1
    (arXiv:1706.02677, section 5.1)."""


@dataclass(frozen=True)
class DroppingOptions:
    """Network."""

    stochastic_depth: float = 0.0
    """Leave out residual branches at random in training, with a probability that rises from 0 at the first block to
    this at the last (arXiv:1603.09382); 0: none."""
    stochastic_depth_mode: Literal["image", "block"] = "image"
    """With --stochastic-depth: image: a branch is left out for each image or not; block: for all of a batch at once."""
    dropout: float = 0.0
    """Set this part of what the classifier reads to 0 in training, at random; 0: none."""


@dataclass(frozen=True)
class FineTuningOptions:
    """Fine-tuning."""

    freeze: Annotated[str, "LAYERS"] = ""
    """Leave the beginning of the network as it is, up to the layers whose names begin so, such as stem, stage2 or
    stage3_block1; backbone: all but the classifier. BatchNorms there use their running statistics, and steps are
    faster."""
    backbone_lr_factor: float = 1.0
    """The learning rate of all layers but the classifier is multiplied by this."""


@dataclass(frozen=True)
class BatchOptions:
    """Images."""

    batch_size: int = 256
    """Images per process in one forward pass."""


@dataclass(frozen=True)
class SizeOptions:
    """Images."""

    image_size: int = 224
    """Height and width of the network's input, in pixels."""


@dataclass(frozen=True)
class ImageOptions(Augmentation, SizeOptions):
    """Images."""

    mixup: float = 0.0
    """Mix each image and its label with another of its batch, by a share sampled from Beta(MIXUP, MIXUP); 0: no mixup.
    Training loss and accuracy are then those of the mixed images."""
    cutmix: float = 0.0
    """Put a box of another image of its batch into each one, and of its label as much into the target; the box has the
    area 1 - lambda, sampled from Beta(CUTMIX, CUTMIX). 0: no CutMix. With --mixup, each batch has one of the two."""
    cutmix_share: float = 0.5
    """With --mixup and --cutmix: which part of the batches has CutMix."""
    balance: float = 0.0
    """For classes of unequal size: draw a class's images in proportion to their number to the power of 1 - BALANCE; 1:
    every class equally often, 0.5: by the root of its size, 0: every image once. An epoch stays as long."""
    repeated_augmentation: int = 0
    """Repeated augmentation (arXiv:1901.09335): a batch holds so many copies of each of its images, augmented
    differently, and an epoch, as long as before, so much the fewer images (with --balance: of those drawn); 0: no
    copies."""


@dataclass(frozen=True)
class ResizingOptions:
    """Images."""

    first_image_size: int = 0
    """Progressive resizing: image size of the first epochs, which then rises to --image-size in multiples of 32
    pixels; 0: --image-size from the start."""
    resize_epochs: tuple[float, float] = (0.0, 0.0)
    """Progressive resizing: the epochs between which the image size rises, linearly."""


@dataclass(frozen=True)
class InferenceImageOptions(Normalisation, CentreCrop):
    """Images."""

    val_image_size: int = 0
    """Image size in validation and prediction, in pixels; 0: that of --image-size. A network sees objects larger in
    random crops than in whole images, so it does better on images about 1.15 to 1.3 times as large
    (arXiv:1906.06423)."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions(SizeLimit):
    """Loader."""

    num_threads: int = 0
    """Threads of the loader per process; 0: one for each core that the process may use."""
    hw_decoder_load: float = -1.0
    """On a GPU, the part of the JPEGs that its JPEG engine decodes, from 0 to 1; -1: the largest that is nearly the
    fastest for this GPU, data and number of threads, found by a sweep of five seconds at the first start; 0.65 with
    --deterministic."""
    on_bad_image: Literal["skip", "error"] = "error"
    """What to do with an image that cannot be decoded."""


@dataclass(frozen=True)
class CacheOptions:
    """Loader."""

    cache: float = -1.0
    """GiB of host memory, per process and split, in which the images are kept decoded, so that each is decoded only
    once; a split that takes more is decoded in every epoch. -1: splits of up to 0.25 GiB; 0: none."""


@dataclass(frozen=True)
class OptimizerOptions:
    """Optimizer and schedule."""

    learning_rate: float = 0.256
    """Peak learning rate for a global batch of 256 images; it is scaled linearly with the global batch."""
    optimizer: Annotated[str, "NAME"] = "sgd"
    """sgd: with momentum; adamw: arXiv:1711.05101; lars and lamb: the same two with a learning rate for each layer, for
    large batches (arXiv:1708.03888, arXiv:1904.00962); lion: arXiv:2302.06675. Where the preset has another optimizer,
    adamw, lamb and lion bring a learning rate and a weight decay of their own (docs/training.md)."""
    momentum: float = 0.875
    """Optimizers sgd and lars: momentum."""
    nesterov: bool = False
    """Optimizers sgd and lars: Nesterov's momentum."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Optimizers adamw and lamb: what the moving averages of the gradient and of its square keep in each step.
    Optimizer lion: what is kept of the average for the step, and in the average; it brings 0.9 and 0.99."""
    epsilon: float = 1e-8
    """Optimizers adamw and lamb: added to the root of the mean square that gradients are divided by."""
    weight_decay: float = 1 / 32768
    """Weight decay; never applied to BatchNorm parameters and biases."""
    trust_coefficient: float = 0.001
    """Optimizer lars: the learning rate of a layer is multiplied by this times |weights| / |decayed gradient|."""
    clip_norm: float = 0.0
    """Clip gradients: where the norm of all of them together is larger than this, they are scaled down to it before the
    optimizer sees them (arXiv:1211.5063); 0: no clipping. metrics.jsonl and TensorBoard have the norm before."""
    label_smoothing: float = 0.1
    """Share of the target that goes to the wrong classes."""
    loss: Literal["softmax", "bce"] = "softmax"
    """softmax: cross entropy of the scores' softmax; bce: binary cross entropy, the mean over the classes, each of
    which is then a yes or no by itself: an image's probabilities need not add up to 1 (arXiv:2110.00476)."""
    bce_threshold: float = 0.0
    """Loss bce: targets above this, smoothed and mixed, become 1 and others 0; 0: they stay as they are."""
    class_weights: float = 0.0
    """Loss softmax, for classes of unequal size: weigh a class's targets in proportion to its number of images to the
    power of -CLASS_WEIGHTS; 0: all alike. The mean weight of the images is 1. (--balance draws them more often.)"""
    accumulate: int = 1
    """Batches whose gradients are averaged into one optimizer step."""
    ema_decay: float = 0.0
    """Keep an exponential moving average of the weights with this decay per optimizer step, and validate and export
    that; 0: no average. The decay of the first steps is lower, so that the average soon leaves the initial weights."""


@dataclass(frozen=True)
class ScheduleOptions:
    """Optimizer and schedule."""

    schedule: Literal["cosine", "step", "polynomial"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_epochs: float = 5.0
    """Epochs over which the learning rate first rises linearly. Where --epochs makes a run shorter than its preset, the
    default is a fifth of the epochs at most."""
    final_learning_rate: float = 0.0
    """Schedules cosine and polynomial: learning rate at the end, scaled like --learning-rate."""
    decay_epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    """Schedule step: epochs at which the learning rate is multiplied by --decay-factor."""
    decay_factor: float = 0.1
    """Schedule step: see --decay-epochs."""
    decay_power: float = 2.0
    """Schedule polynomial: exponent."""


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


# A dataclass has the fields of its last base first.
@dataclass(frozen=True)
class TrainingOptions(LogOptions, CheckpointOptions, ElasticOptions, DistributedOptions, ScheduleOptions,
                      OptimizerOptions, CacheOptions, LoaderOptions, InferenceImageOptions, ResizingOptions,
                      ImageOptions, BatchOptions, FineTuningOptions, DroppingOptions, NetworkOptions, DeviceOptions,
                      LengthOptions, DataOptions, RunOptions):
    """What a training run is, wherever it begins."""


@dataclass(frozen=True)
class Config(BeginningOptions, TrainingOptions):
    """Train a network; what happens without a command."""

    @property
    def inference_image_size(self) -> int:
        """Image size in validation and prediction, in pixels."""
        return self.val_image_size or self.image_size

    @property
    def transform(self) -> ImageTransform:
        """What is done to images, in training and in validation."""
        return part_of(ImageTransform, vars(self))

    def global_batch(self, num_processes: int) -> int:
        """Images of one optimizer step."""
        return self.batch_size * self.accumulate * num_processes

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """The inverse of `to_dict`; knobs that `values` does not name keep their defaults.

        Raises TrainError for a knob that there is not: another version of this program has written them.
        """
        values = {name: value for name, value in values.items() if name not in _WITHOUT_EFFECT}
        if "depth" in values:  # of earlier versions, which had ResNets alone
            values["model"] = f"resnet{values.pop('depth')}"
        known = {field.name for field in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise TrainError(f"its run had the option {option_name(name)}, which this version of the program "
                                 "does not know: use the version that the run was made with")
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**fields)


# Knobs of earlier versions that changed no result, which checkpoints of then may have.
_WITHOUT_EFFECT = ("all_reduce",)  # gradients were averaged by NCCL, or by the GPUs themselves


# What a value must be, by name of the knob: a test and its words.
_LIMITS = {
    **dict.fromkeys(("batch_size", "epochs", "accumulate", "buckets", "commit_every", "keep_checkpoints", "log_every",
                     "min_steps", "limit_steps", "top", "vocabulary", "hidden", "layers", "sequences", "steps"),
                    (lambda value: value >= 1, "at least 1")),
    "batch_sizes": (lambda value: min(value, default=1) >= 1, "at least 1 each"),
    "bn_group": (lambda value: 1 <= value <= MAX_BN_GROUP, f"from 1 to {MAX_BN_GROUP}"),
    "image_size": (lambda value: value >= MIN_IMAGE_SIZE, f"at least {MIN_IMAGE_SIZE} pixels"),
    **dict.fromkeys(("first_image_size", "val_image_size"),
                    (lambda value: value == 0 or value >= MIN_IMAGE_SIZE, f"0, or at least {MIN_IMAGE_SIZE} pixels")),
    "resize_epochs": (lambda value: 0 <= value[0] <= value[1], "two numbers of epochs from 0 on, the smaller first"),
    **dict.fromkeys(("learning_rate", "decay_factor", "decay_power", "limit_minutes", "minutes", "trust_coefficient",
                     "epsilon", "backbone_lr_factor"),
                    (lambda value: value > 0, "above 0")),
    "num_threads": (lambda value: 0 <= value <= MAX_THREADS, f"from 0 to {MAX_THREADS}"),
    **dict.fromkeys(("num_classes", "seed", "max_steps", "patience", "validate_every", "weight_decay", "clip_norm",
                     "warmup_epochs", "mixup", "cutmix", "price_per_hour", "final_learning_rate", "time_limit",
                     "checkpoint_minutes", "warmup_steps"),
                    (lambda value: value >= 0, "0 or more")),
    **dict.fromkeys(("label_smoothing", "momentum", "ema_decay", "val_split", "bce_threshold", "stochastic_depth",
                     "dropout"),
                    (lambda value: 0 <= value < 1, "at least 0 and below 1")),
    **dict.fromkeys(("balance", "class_weights", "cutmix_share"),
                    (lambda value: 0 <= value <= 1, "a fraction from 0 to 1")),
    "repeated_augmentation": (lambda value: value == 0 or value >= 2, "0, or at least 2"),
    "cache": (lambda value: value == -1 or value >= 0, "0 or more, or -1"),
    "hw_decoder_load": (lambda value: value == -1 or 0 <= value <= 1, "a fraction from 0 to 1, or -1"),
    "target_accuracy": (lambda value: 0 <= value <= 1, "a fraction from 0 to 1"),
    "betas": (lambda value: min(value) >= 0 and max(value) < 1, "two fractions below 1"),
    "max_pixels": (lambda value: value >= 1, "at least 1"),
    **transform.LIMITS,
}

def _constants_of_optimizers() -> dict[str, tuple[str, tuple[str, ...]]]:
    """The knobs that not all optimizers have, with those that do, for `_ONLY_WITH`."""
    having: dict[str, list[str]] = {}
    for optimizer in optimizers.names():
        for field in dataclasses.fields(optimizers.rule_of(optimizer)):
            having.setdefault(field.name, []).append(optimizer)
    return {name: ("optimizer", tuple(found)) for name, found in having.items() if found != optimizers.names()}


# Knobs that do nothing without another one: that, and the values of it with which they do something.
_ONLY_WITH = {
    **dict.fromkeys(("decay_epochs", "decay_factor"), ("schedule", ("step",))),
    "decay_power": ("schedule", ("polynomial",)),
    **dict.fromkeys(("randaugment_operations", "randaugment_magnitude"),
                    ("auto_augment", ("randaugment", "randaugment-timm"))),
    "randaugment_magnitude_std": ("auto_augment", ("randaugment-timm",)),
    "bce_threshold": ("loss", ("bce",)),
    "class_weights": ("loss", ("softmax",)),
    "final_learning_rate": ("schedule", ("cosine", "polynomial")),
    **_constants_of_optimizers(),
}


def check(config: Config) -> None:
    """Raise TrainError for a value that makes no sense, or that does not go together with another one."""
    _check_limits(vars(config))
    config.transform.check()
    models.check(config.model)
    _check_optimizer(config.optimizer)
    if config.schedule == "step" and list(config.decay_epochs) != sorted(config.decay_epochs):
        raise TrainError(f"--decay-epochs {_shown(config.decay_epochs)} must rise")
    if config.first_image_size > config.image_size:
        raise TrainError(
            f"--first-image-size {config.first_image_size} is larger than --image-size {config.image_size}, to which "
            f"it is to rise; lower it"
        )
    if config.resize_epochs[1] > 0 and not config.first_image_size:
        raise TrainError("--resize-epochs is given without --first-image-size, from which the size is to rise; add it")
    if config.balance and config.class_weights:
        raise TrainError(f"--balance {config.balance:g} and --class-weights {config.class_weights:g} would both "
                         "raise what rare classes count: leave out one of them")
    if config.bce_threshold >= 1 - config.label_smoothing:
        raise TrainError(f"--bce-threshold {config.bce_threshold:g} is not below {1 - config.label_smoothing:g}, the "
                         f"largest target with --label-smoothing {config.label_smoothing:g}: no target would become 1; "
                         "lower one of them")
    if config.warmup_epochs > config.epochs:
        raise TrainError(
            f"--warmup-epochs {config.warmup_epochs:g} is longer than the run of {config.epochs} epochs; lower it"
        )


def _check_optimizer(name: str) -> None:
    if name not in optimizers.names():
        raise TrainError(f"there is no optimizer {name!r}{nearest(name, optimizers.names())}")


def _check_limits(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        is_good, words = _LIMITS.get(name, (lambda _: True, ""))
        if not is_good(value):
            raise TrainError(f"{option_name(name)} {_shown(value)} must be {words}")
        if value in (math.inf, -math.inf):
            raise TrainError(f"{option_name(name)} {value} must be a finite number")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def changes(before: Config, now: Config) -> list[str]:
    """The knobs that differ where a run goes on, with both values, those of a session left out."""
    return [f"{option_name(name)} {_shown(value)} (before: {_shown(getattr(before, name))})"
            for name, value in vars(now).items() if value != getattr(before, name) and name not in OF_A_SESSION]


def presets() -> list[str]:
    """Names of all presets."""
    return sorted(module.name for module in pkgutil.iter_modules(train.configs.__path__))


def load_preset(name: str) -> Config:
    """The configuration of train/configs/<name>.py. Raises TrainError for an unknown name."""
    if name not in presets():
        raise TrainError(f"there is no preset {name!r} in train/configs/{nearest(name, presets())}")
    module = importlib.import_module(f"train.configs.{name}")
    return dataclasses.replace(module.CONFIG, config=name)


def default_warmup(default: Config, epochs: int) -> float:
    """Epochs of warm-up of a run with so many epochs, where `default`'s may be meant for more."""
    if epochs >= default.epochs:
        return default.warmup_epochs
    return min(default.warmup_epochs, LONGEST_WARMUP * epochs)


def describe_presets() -> str:
    """Each preset with the first sentence of its docstring."""
    lines = []
    for name in presets():
        text = " ".join((importlib.import_module(f"train.configs.{name}").__doc__ or "").split("\n\n")[0].split())
        lines.append(f"{name}\n    {text.partition('. ')[0].removesuffix('.')}")
    return "\n".join(lines)


# --- a command line ---


def read(options: type, arguments: Sequence[str], *, command: str) -> dict[str, Any]:
    """The values that a command line gives to `options`, each of them checked; what is left out is not in the result.

    Args:
        options: the dataclass of a command's options.
        arguments: what follows the command's name on the command line.
        command: 'train', 'validate', ...: whose help `--help` shows.

    Raises:
        UserError: an unknown option or preset, or a value that is not allowed.
        SystemExit: after `--help`, and after the list of presets for `--config ?`.
    """
    if (depth := given_value(arguments, "--depth")) is not None:
        raise TrainError(f"--depth has become the name of a network: give --model resnet{depth or 50}")
    default: object | None = None
    if issubclass(options, RunOptions):
        preset = given_value(arguments, "--config")
        if preset == LIST_PRESETS:
            print(describe_presets())
            raise SystemExit(0)
        default = load_preset(preset or DEFAULT_PRESET)
    elif issubclass(options, DeviceOptions):  # the defaults are in a checkpoint, and help does not tell them
        default = SimpleNamespace(**{field.name: "" for field in dataclasses.fields(options)})
    values = given(options, arguments, prog=f"python -m train {command}", default=default)
    _check_limits(values)
    for name in (*values.get("models", ()), *([values["model"]] if "model" in values else [])):
        models.check(name)
    if "optimizer" in values:
        _check_optimizer(values["optimizer"])
    return values


def configure(values: Mapping[str, Any], default: Config) -> Config:
    """The checked configuration of a run: `default`, and over it what the command line gives.

    Raises TrainError for values that do not go together.
    """
    optimizer = values.get("optimizer", default.optimizer)
    recipe = optimizers.rule_of(optimizer).recipe if optimizer != default.optimizer else {}
    of_run = {name: values[name] for name in vars(default).keys() & values}
    if realpath(of_run.get("data", default.data)) != realpath(default.data):
        of_run = {"val_split": 0.0} | of_run  # was that of other images
    config = dataclasses.replace(default, **{**recipe, **of_run})
    if "warmup_epochs" not in values:
        config = dataclasses.replace(config, warmup_epochs=default_warmup(default, config.epochs))
    check(config)
    for name in _ONLY_WITH.keys() & values:  # in a preset they wait for the command line to change the other one
        other, useful = _ONLY_WITH[name]
        if (value := getattr(config, other)) not in useful:
            raise TrainError(f"{option_name(name)} is for {option_name(other)} {' or '.join(useful)}, and this run has "
                             f"{value}: leave it out, or give {option_name(other)} {useful[0]}")
    if "cutmix_share" in values and not (config.mixup and config.cutmix):
        missing = " and ".join(option_name(name) for name in ("mixup", "cutmix") if not getattr(config, name))
        raise TrainError(f"--cutmix-share {config.cutmix_share:g} is for runs with both mixup and CutMix: leave it "
                         f"out, or give {missing}")
    for name in ("patience", "target_accuracy"):
        if values.get(name) and not config.validate_every:
            raise TrainError(f"{option_name(name)} {values[name]:g} needs the accuracy in validation, and "
                             "--validate-every 0 has none: leave out one of them")
    return config
