"""Options of language models: the text, the network, and its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from common.limits import AT_LEAST_1, Limit

LANGUAGE_MODEL = "language_model"  # the value of `config` in the configuration of a language model's run
GENERATED = "generated"  # value of --text


@dataclass(frozen=True)
class LanguageModelOptions:
    """Train a small word language model: embedding, LSTM layers, softmax with the embedding's weights."""

    text: Annotated[str, "PATH"] = GENERATED
    """Text file in UTF-8. Words are separated by spaces, and the end of a line counts as a word; the last tenth is for
    validation. generated: 200,000 random words, each of which depends on the one before."""
    output: Annotated[str, "FOLDER"] = ""
    """Folder of the run; default: runs/language_model-<date>."""
    resume: Annotated[str, "PATH"] = ""
    """Run folder or checkpoint file to resume; options that are not given keep their values. auto: the newest
    checkpoint in --output, or a new run if there is none yet."""
    seed: int = 0
    """Seed of the initial weights, of the sequences' beginnings and of generated text."""
    epochs: int = 5
    """Passes over the text."""
    max_steps: int = 0
    """Stop after this many optimizer steps; 0: no limit."""
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
    clip_norm: float = 1.0
    """Scale gradients down to this norm if theirs is larger; 0: never."""
    log_every: int = 50
    """Optimizer steps between two log lines."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Device, as in training."""
    executor: Literal["auto", "mxnet", "reference", "cuda"] = "auto"
    """Executor, as in training."""
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Precision, as in training."""
    tf32: bool = True
    """Executor cuda with dtype float32: matrix products round their inputs to TF32."""


# Limits of the options that `train` does not have.
LIMITS: dict[str, Limit] = {
    "vocabulary": (lambda value: value >= 2, "at least 2"),  # one word is <unk>, which stands for all others
    **dict.fromkeys(("hidden", "layers", "sequences", "steps"), AT_LEAST_1),
}
