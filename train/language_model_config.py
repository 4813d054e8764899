"""The configuration of a language model's run: its own options, and what they mean to the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from train.config import Config, check_known
from train.errors import TrainError
from train.options.language_model import LANGUAGE_MODEL, LanguageModelOptions
from train.options.limits import shown
from train.options.optimizer import REFERENCE_BATCH

VALIDATION_SHARE = 0.1  # of the text, its end
FIXED = ("seed", "vocabulary", "hidden", "layers", "sequences", "steps")  # options that a run goes on with as they were


@dataclass(frozen=True)
class LanguageModelConfig(Config):
    """As the loop takes it: a batch's examples are words, and its learning rate is that of `options` as it is."""

    options: LanguageModelOptions = field(default_factory=LanguageModelOptions)

    @classmethod
    def of(cls, options: LanguageModelOptions) -> LanguageModelConfig:
        """The configuration that these options mean."""
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
        """Raise TrainError where a run of `before`, which `checkpoint` is of, cannot go on as this one."""
        for name in FIXED:
            then, now = before.chosen[name], self.chosen[name]
            if then != now:
                raise TrainError(f"{checkpoint} is of a run with --{name} {shown(then)}, and this one has --{name} "
                                 f"{shown(now)}: leave it out, or begin a new run with another --output",
                                 on_all_ranks=True)
