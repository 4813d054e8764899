"""The configuration of a language model's run: its own options, translated for the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from train.config import Config, check_known
from train.errors import TrainError
from train.options.language_model import LANGUAGE_MODEL, LanguageModelOptions
from train.options.limits import shown
from train.options.optimizer import REFERENCE_BATCH

VALIDATION_SHARE = 0.1  # share of the text, at its end, that is used for validation
# options that must not change when a run is resumed
FIXED = ("seed", "vocabulary", "hidden", "layers", "sequences", "steps")


@dataclass(frozen=True)
class LanguageModelConfig(Config):
    """The configuration for the training loop: a batch's examples are words, and the learning rate is not scaled."""

    options: LanguageModelOptions = field(default_factory=LanguageModelOptions)

    @classmethod
    def of(cls, options: LanguageModelOptions) -> LanguageModelConfig:
        """Translate the options to a configuration for the training loop."""
        words = options.sequences * options.steps
        same = {each.name for each in fields(options)} & {each.name for each in fields(Config)}
        return cls(**{name: getattr(options, name) for name in same} | {
            "options": options, "config": LANGUAGE_MODEL, "data": options.text, "val_split": VALIDATION_SHARE,
            "batch_size": words, "optimizer": "adamw", "weight_decay": 0.0, "label_smoothing": 0.0,
            "learning_rate": options.learning_rate * REFERENCE_BATCH / words, "warmup_epochs": 0.1,
            "tensorboard": False})

    @property
    def chosen(self) -> Mapping[str, Any]:
        return {"config": LANGUAGE_MODEL, **vars(self.options)}

    @property
    def shown_rate(self) -> str:
        return f"{self.options.learning_rate:g}"

    @property
    def divergence_advice(self) -> str:
        return f"lower --learning-rate (now {self.shown_rate})"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LanguageModelConfig:
        options = {name: value for name, value in values.items() if name != "config"}
        check_known(options, LanguageModelOptions)
        return cls.of(LanguageModelOptions(**options))

    def check_goes_on(self, before: LanguageModelConfig, checkpoint: str) -> None:
        """Raise TrainError if a run of `checkpoint` with the configuration `before` cannot be resumed with this
        configuration."""
        for name in FIXED:
            then, now = before.chosen[name], self.chosen[name]
            if then != now:
                raise TrainError(f"{checkpoint} belongs to a run with --{name} {shown(then)}, but this one has "
                                 f"--{name} {shown(now)}: leave it out, or begin a new run with another --output",
                                 on_all_ranks=True)
