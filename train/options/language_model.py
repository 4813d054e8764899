"""Options of language models: the text, the network, and its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from common.limits import AT_LEAST_1, Limit

LANGUAGE_MODEL = "language_model"  # what `config` is in the configuration of such a run
GENERATED = "generated"  # value of --text


@dataclass(frozen=True)
class LanguageModelOptions:
    """Train a small word language model: embedding, LSTM layers, softmax with the embedding's weights."""

    text: Annotated[str, "PATH"] = GENERATED
    """Text file in UTF-8, words being what spaces separate, and the end of each line one more; generated: 200,000
    random words that depend on the one before. Its last tenth is for validation."""
    output: Annotated[str, "FOLDER"] = ""
    """Folder of the run; default: runs/language_model-<date>."""
    resume: Annotated[str, "PATH"] = ""
    """Run folder or checkpoint file to go on from, with that run's options where no others are given; auto: the newest
    checkpoint in --output, or the start where there is none yet."""
    seed: int = 0
    """Seed of the initial weights, of where sequences begin and of generated text."""
    epochs: int = 5
    """Passes over the text."""
    max_steps: int = 0
    """Stop after this many optimizer steps; 0: no limit."""
    vocabulary: int = 10_000
    """Words that are told apart, at most: the most frequent ones."""
    hidden: int = 200
    """Units of each LSTM layer, and of a word's vector."""
    layers: int = 2
    """LSTM layers."""
    sequences: int = 32
    """Sequences in a batch."""
    steps: int = 32
    """Words of each sequence in a batch, through which gradients flow; each batch begins from states of 0."""
    learning_rate: float = 0.02
    """Peak learning rate of AdamW."""
    clip_norm: float = 1.0
    """Scale gradients down to this norm where they have a larger one; 0: never."""
    log_every: int = 50
    """Optimizer steps between two log lines."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to compute, as in training."""
    executor: Literal["auto", "mxnet", "reference", "cuda"] = "auto"
    """What computes, as in training."""
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Precision, as in training."""
    tf32: bool = True
    """Executor cuda with dtype float32: products round their inputs to TF32."""


# Of those that `train` has not.
LIMITS: dict[str, Limit] = {
    "vocabulary": (lambda value: value >= 2, "at least 2"),  # one alone is what stands for all the others
    **dict.fromkeys(("hidden", "layers", "sequences", "steps"), AT_LEAST_1),
}
