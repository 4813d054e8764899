"""Options of language models: the text, the network, and its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from common.limits import AT_LEAST_1, Limit
from train.options.optimizer import ClippingOptions
from train.options.run import ComputeOptions, FolderOptions, LengthOptions, LogLineOptions, ResumeOptions

LANGUAGE_MODEL = "language_model"  # the value of `config` in the configuration of a language model's run
GENERATED = "generated"  # value of --text


@dataclass(frozen=True)
class LanguageModelOptions(LogLineOptions, ClippingOptions, ComputeOptions, ResumeOptions, LengthOptions,
                           FolderOptions):
    """Train a small word language model: embedding, LSTM layers, softmax with the embedding's weights."""

    text: Annotated[str, "PATH"] = GENERATED
    """Text file in UTF-8. Words are separated by spaces, and the end of a line counts as a word; the last tenth is for
    validation. generated: 200,000 random words, each of which depends on the one before."""
    vocabulary: int = 10_000
    """Maximum size of the vocabulary, which holds the most frequent words."""
    hidden: int = 200
    """Units of each LSTM layer, and length of a word's vector."""
    layers: int = 2
    """Number of LSTM layers."""
    sequences: int = 32
    """Sequences per batch."""
    steps: int = 32
    """Words per sequence in a batch, through which gradients flow. Each batch starts from states of 0."""
    learning_rate: float = 0.02
    """Peak learning rate of AdamW."""
    # options of training with other defaults
    epochs: int = 5
    log_every: int = 50
    clip_norm: float = 1.0


# Limits of the options that `train` does not have.
LIMITS: dict[str, Limit] = {
    "vocabulary": (lambda value: value >= 2, "at least 2"),  # one word is <unk>, which stands for all others
    **dict.fromkeys(("hidden", "layers", "sequences", "steps"), AT_LEAST_1),
}
