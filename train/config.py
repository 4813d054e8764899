"""The configuration of a run: the values of all options (train/options), checks across options, and JSON.

A preset (train/presets.py) gives some options other defaults; the command line overrides both.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import realpath
from typing import Any

from common import plugins
from common.command_line import nearest, option_name, part_of
from common.limits import Limit
from graph_passes import optimizers
from pipelines.options import AUTO
from pipelines.transform import OF_POLICIES, ImageTransform
from train import models
from train.errors import TrainError
from train.options import language_model
from train.options.limits import check_limits, shown
from train.options.optimizer import BCE, LOSSES, REFERENCE_BATCH, SCHEDULES, SOFTMAX
from train.options.run import FINE_TUNING_PRESET, BeginningOptions
from train.options.training import LIMITS, TrainingOptions

CONFIG_FILE = "config.json"  # the configuration, in a run's folder
LONGEST_WARMUP = 0.2  # share of the epochs that warm-up may take in a run with fewer epochs than its preset
# options that may differ when a run is resumed
OF_A_SESSION = ("output", "weights", "resume", "max_steps", "time_limit")

# Options whose "auto" a run replaces by a value found in its data, and the possible values.
FOUND_IN_DATA: Mapping[str, tuple[str, ...]] = {"first_label": ("0", "1"), "labels": ("fine",)}


@dataclass(frozen=True)
class Config(BeginningOptions, TrainingOptions):
    """Train a network; the default command."""

    @property
    def inference_image_size(self) -> int:
        """Image size in validation and prediction, in pixels."""
        return self.val_image_size or self.image_size

    @property
    def transform(self) -> ImageTransform:
        """The image transform of training and validation."""
        return part_of(ImageTransform, vars(self))

    @property
    def shown_rate(self) -> str:
        """The learning rate as text, in the form of --learning-rate, with its unit."""
        return f"{self.learning_rate:g} per {REFERENCE_BATCH} images"

    @property
    def divergence_advice(self) -> str:
        """The advice to print if the training diverges."""
        return f"lower --learning-rate (now {self.shown_rate}) or lengthen --warmup-epochs"

    def global_batch(self, num_processes: int) -> int:
        """Images per optimizer step."""
        return self.batch_size * self.accumulate * num_processes

    @property
    def chosen(self) -> Mapping[str, Any]:
        """Option values by field name."""
        return vars(self)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON values."""
        return json.loads(json.dumps(dict(self.chosen)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """The inverse of `to_dict`; options missing from `values` keep their defaults.

        Raises TrainError for an unknown option, which another version of this program has written.
        """
        values = {name: value for name, value in values.items() if name not in _WITHOUT_EFFECT}
        if "depth" in values:  # earlier versions had only ResNets
            values["model"] = f"resnet{values.pop('depth')}"
        check_known(values, cls)
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**fields)


_ALL_LIMITS = LIMITS | language_model.LIMITS  # limits of the options of all runs that write checkpoints


def check_known(values: Mapping[str, Any], options: type) -> None:
    """Raise TrainError for an option that the dataclass `options` lacks, which another version has written. Also raise
    TrainError for a value that has another type than the option's default, or is outside the option's limits.
    """
    known = {field.name: field.default for field in dataclasses.fields(options)}
    for name, value in values.items():
        if name not in known:
            raise TrainError(f"its run had the option {option_name(name)}, which this version of the program does not "
                             "know: use the version that the run was made with")
        if not _can_be(value, known[name], _ALL_LIMITS.get(name)):
            raise TrainError(f"its run had {option_name(name)} {value!r}, which is not valid; use another "
                             "checkpoint in its folder")


def _can_be(value: Any, default: Any, limit: Limit | None) -> bool:
    """Whether a JSON value is valid for an option with this default and limit."""
    try:
        return _kind(value) == _kind(default) and (not limit or limit[0](value))
    except (TypeError, ValueError, LookupError):  # raised by a limit if a list has elements of another type, or too few
        return False


def _kind(value: Any) -> type:
    """The value's type. JSON does not distinguish some types, so int counts as float, and list as tuple."""
    return {int: float, list: tuple}.get(type(value), type(value))


# Options of earlier versions that changed no result; old checkpoints may have them.
_WITHOUT_EFFECT = ("all_reduce",)  # gradients were averaged by NCCL, or by the GPUs themselves


def configure(values: Mapping[str, Any], default: Config) -> Config:
    """The checked configuration of a run: `default`, overridden by the command line.

    Raises TrainError for values that contradict each other.
    """
    optimizer = values.get("optimizer", default.optimizer)
    recipe = optimizers.rule_of(optimizer).recipe if optimizer != default.optimizer else {}
    of_run = {name: values[name] for name in vars(default).keys() & values}
    of_run["plugin"] = plugins.together(default.plugin, values.get("plugin", ()))
    if realpath(of_run.get("data", default.data)) != realpath(default.data):
        of_run = {"val_split": 0.0, "val_group_by": "image"} | of_run  # the values of the default belong to other data
    config = dataclasses.replace(default, **{**recipe, **of_run})
    if values.get("model") in models.OTHER_IMAGE_SIZES and "image_size" not in values and (
            config.image_size == models.IMAGE_SIZE):  # a preset with another image size keeps this size
        config = dataclasses.replace(config, image_size=models.image_size(config.model))
    if "warmup_epochs" not in values:
        config = dataclasses.replace(config, warmup_epochs=default_warmup(default, config.epochs))
    check(config)
    # a preset may set these options in advance, for command lines that change the other option
    for name in _ONLY_WITH.keys() & values:
        other, useful = _ONLY_WITH[name]
        if (value := getattr(config, other)) not in useful:
            raise TrainError(f"{option_name(name)} is for {option_name(other)} {' or '.join(useful)}, and this run has "
                             f"{value}: leave it out, or give {option_name(other)} {useful[0]}")
    if "cutmix_share" in values and not (config.mixup and config.cutmix):
        missing = " and ".join(option_name(name) for name in ("mixup", "cutmix") if not getattr(config, name))
        raise TrainError(f"--cutmix-share {config.cutmix_share:g} is for runs with both mixup and CutMix: leave it "
                         f"out, or give {missing}")
    if "stochastic_depth_mode" in values and not config.stochastic_depth:
        raise TrainError(f"--stochastic-depth-mode {config.stochastic_depth_mode} has no effect without "
                         "--stochastic-depth: leave it out, or give --stochastic-depth 0.1")
    if "val_group_by" in values and not config.val_split:
        raise TrainError(f"--val-group-by {config.val_group_by} has no effect without --val-split: leave it out, or "
                         "give --val-split 0.1")
    for name in ("random_area", "random_ratio"):
        if name in values and config.crop_padding:
            raise TrainError(f"{option_name(name)} {shown(values[name])} is for crops of a random area, and "
                             f"--crop-padding {config.crop_padding} takes crops of a fixed size: leave it out, or give "
                             "--crop-padding 0")
    given = values.keys()  # a resumed run is not checked for options that it already had
    if (not given.isdisjoint(("schedule", "decay_epochs", "epochs")) and config.schedule == "step"
            and min(config.decay_epochs) >= config.epochs):
        raise TrainError(f"--decay-epochs {shown(config.decay_epochs)} is beyond the run of {config.epochs} epochs, "
                         "whose learning rate would never fall; lower --decay-epochs")
    if (not given.isdisjoint(("first_image_size", "resize_epochs")) and config.first_image_size
            # checked only if the option is given, because a preset may be tried with fewer epochs
            and config.resize_epochs[0] >= config.epochs):
        raise TrainError(f"--resize-epochs {shown(config.resize_epochs)} is beyond the run of {config.epochs} epochs, "
                         f"whose images would all have the {config.first_image_size} pixels of --first-image-size; "
                         "lower --resize-epochs")
    for name in ("patience", "target_accuracy"):
        if values.get(name) and not config.validate_every:
            raise TrainError(f"{option_name(name)} {values[name]:g} needs the accuracy in validation, and "
                             "--validate-every 0 has none: leave out one of them")
    return config


def check_untrained(values: Mapping[str, Any]) -> None:
    """Raise TrainError if an option for trained weights is given and the run would begin with random weights."""
    given = [name for name in ("freeze", "backbone_lr_factor") if name in values]
    if values.get("config") == FINE_TUNING_PRESET:
        given.append("config")
    if given and not values.get("weights"):
        raise TrainError(f"{option_name(given[0])} {shown(values[given[0]])} is for trained weights (--weights), and "
                         "this run would begin with random ones: leave it out, or add --weights")


def default_warmup(default: Config, epochs: int) -> float:
    """Warm-up epochs of a run with `epochs` epochs; the warm-up of `default` is shortened if `default` has more epochs.
    """
    if epochs >= default.epochs:
        return default.warmup_epochs
    return min(default.warmup_epochs, LONGEST_WARMUP * epochs)


def changes(before: Config, now: Config) -> list[str]:
    """The options that differ in a resumed run, each with both values. Options that concern only one session are left
    out.
    """
    def in_words(name: str, value: Any) -> str:
        return ", ".join(map(plugins.brief, value)) or "none" if name == "plugin" else shown(value)

    return [f"{option_name(name)} {in_words(name, value)} (before: {in_words(name, before.chosen[name])})"
            for name, value in now.chosen.items() if value != before.chosen[name] and name not in OF_A_SESSION
            and not (name in FOUND_IN_DATA and before.chosen[name] == AUTO)]  # an older run has not recorded the value


# --- checks across options ---


def _constants_of_optimizers() -> dict[str, tuple[str, tuple[str, ...]]]:
    """The options that only some optimizers have, with the names of these optimizers, in the form of `_ONLY_WITH`."""
    having: dict[str, list[str]] = {}
    for optimizer in optimizers.names():
        for field in dataclasses.fields(optimizers.rule_of(optimizer)):
            having.setdefault(field.name, []).append(optimizer)
    return {name: ("optimizer", tuple(found)) for name, found in having.items() if found != optimizers.names()}


# Options that have an effect only with certain values of another option: (other option, these values).
_ONLY_WITH = {
    **dict.fromkeys(("decay_epochs", "decay_factor"), ("schedule", ("step",))),
    "decay_power": ("schedule", ("polynomial",)),
    **{name: ("auto_augment", policies) for name, policies in OF_POLICIES.items()},
    "bce_threshold": ("loss", (BCE,)),
    "class_weights": ("loss", (SOFTMAX,)),
    "final_learning_rate": ("schedule", ("cosine", "polynomial")),
    **_constants_of_optimizers(),
}


def check(config: Config) -> None:
    """Raise TrainError for a value that is invalid, or that contradicts another option."""
    check_limits(vars(config), LIMITS)
    config.transform.check()
    models.check(config.model)
    check_optimizer(config.optimizer)
    if config.schedule == "step" and list(config.decay_epochs) != sorted(config.decay_epochs):
        raise TrainError(f"--decay-epochs {shown(config.decay_epochs)} must rise")
    if config.final_learning_rate > config.learning_rate and config.schedule != "step":
        raise TrainError(f"--final-learning-rate {config.final_learning_rate:g} is above --learning-rate "
                         f"{config.learning_rate:g}, from which the learning rate is to fall; lower "
                         "--final-learning-rate")
    if config.first_image_size > config.image_size:
        raise TrainError(
            f"--first-image-size {config.first_image_size} is larger than --image-size {config.image_size}, to which "
            "the size is to rise; lower --first-image-size"
        )
    if config.resize_epochs[1] > 0 and not config.first_image_size:
        raise TrainError("--resize-epochs is given without --first-image-size, from which the size is to rise; add "
                         "--first-image-size")
    if config.balance and config.class_weights:
        raise TrainError(f"--balance {config.balance:g} and --class-weights {config.class_weights:g} would both "
                         "raise the weight of rare classes: leave out one of them")
    if config.bce_threshold >= 1 - config.label_smoothing:
        raise TrainError(f"--bce-threshold {config.bce_threshold:g} is not below {1 - config.label_smoothing:g}, the "
                         f"largest target with --label-smoothing {config.label_smoothing:g}: no target would become 1; "
                         "lower --bce-threshold or --label-smoothing")
    if config.warmup_epochs > config.epochs:
        raise TrainError(
            f"--warmup-epochs {config.warmup_epochs:g} is longer than the run of {config.epochs} epochs; lower "
            "--warmup-epochs"
        )


def check_plugged(config: Config) -> None:
    """Raise UserError for a loss, a schedule or an augmentation that neither this program nor a loaded plug-in has; for
    runs that train."""
    check_loss(config.loss)
    check_schedule(config.schedule)
    for name in config.augment:
        plugins.get("augmentation", name)


def check_loss(name: str) -> None:
    """Raise UserError if there is no loss of this name."""
    if name not in LOSSES:
        plugins.get("loss", name, LOSSES)


def check_schedule(name: str) -> None:
    """Raise UserError if there is no schedule of this name."""
    if name not in SCHEDULES:
        plugins.get("schedule", name, SCHEDULES)


def check_optimizer(name: str) -> None:
    """Raise TrainError if there is no optimizer of this name."""
    if name not in optimizers.names():
        raise TrainError(f"there is no optimizer {name!r}{nearest(name, optimizers.names())}")
