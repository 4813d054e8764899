"""The command `language-model`: train a small word language model by the loop that trains classifiers of images."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common.command_line import part_of
from graph_passes.executors import create_executor
from pipelines import LoaderConfig
from pipelines.text import UNKNOWN, TextLoader, generated_words, numbered, read_words, vocabulary
from train import checkpoint
from train.checkpoint import Checkpoint
from train.commands.options import GENERATED, LanguageModelOptions
from train.commands.session import open_recorder, prepare, run_folder_of
from train.config import Config
from train.errors import TrainError
from train.language_model import LanguageModel
from train.loop import Trainer
from train.options.optimizer import REFERENCE_BATCH
from train.options.run import LANGUAGE_MODEL
from train.processes.distributed import Workers
from train.processes.invocation import command_line
from train.reporting.recorder import Recorder

GENERATED_WORDS, GENERATED_DIFFERENT = 200_000, 200
VALIDATION_SHARE = 0.1  # of the text, its end
MAX_EXPONENT = math.log(sys.float_info.max)


def main(values: Mapping[str, Any]) -> None:
    """Train, and print the perplexity after each epoch. Raises UserError and StoppedBySignal."""
    options, workers = part_of(LanguageModelOptions, values), Workers()
    config = configuration(options)
    file = checkpoint.find(options.resume) if options.resume else None
    folder = run_folder_of(config, file)
    placement = prepare(config, workers)
    on_gpu = placement.device.startswith("gpu")
    if options.text == GENERATED:
        words, floor = generated_words(GENERATED_WORDS, GENERATED_DIFFERENT, options.seed)
        print(f"generated text of {len(words):,} words, {GENERATED_DIFFERENT} different ones: who knows how it was "
              f"made has a perplexity of {floor:.2f}", flush=True)
    else:
        words = read_words(Path(options.text))
    end = len(words) - round(VALIDATION_SHARE * len(words))
    known = vocabulary(words[:end], options.vocabulary)
    tokens = numbered(words, known)
    loading = LoaderConfig(data=options.text, batch_size=config.batch_size, seed=config.seed,
                           device="gpu" if on_gpu else "cpu", device_id=workers.local_rank if on_gpu else 0)
    loaders = [TextLoader(replace(loading, split=split), (workers.rank, workers.size), part, known, options.steps)
               for split, part in (("train", tokens[:end]), ("val", tokens[end:]))]
    model = LanguageModel(len(known), options.hidden, options.layers, options.steps, options.sequences)
    settings: dict[str, Any] = {}
    if placement.executor == "cuda":
        settings = {"dtype": "float16" if config.dtype == "auto" else config.dtype, "tf32": config.tf32}
    executor = create_executor(placement.executor, model.graph, model.shapes, placement.device, **settings)
    initial, start = model.initial_values(config.seed), None
    if file:
        start = checkpoint.load(file)
        _check_same(file, start, known, initial)
        initial = start.params
    executor.set_params(initial, {})
    trainer = Trainer(config, workers, executor, loaders[0], loaders[1], folder, start)
    trainer.go_on = command_line() + ("" if file else f" --resume {shlex.quote(str(folder))}")
    trainer.join()
    with open_recorder(trainer, config.epochs) as recorder:
        recorder.say(f"{len(words):,} words, {len(known):,} in the vocabulary; {loaders[0].num_images:,} are learned "
                     f"in an epoch, {loaders[1].num_images:,} are for validation")
        unknown = float(np.mean(tokens[end:] == 0))  # a network that always says <unk> is right with these
        if unknown:
            recorder.say(f"{unknown:.1%} of the words for validation are not in the vocabulary: perplexity counts them "
                         f"as one word, {UNKNOWN}")
        trainer.run(recorder)
    print(*perplexities(recorder), sep="\n", flush=True)


def configuration(options: LanguageModelOptions) -> Config:
    """As the loop takes it. A batch's examples are words, and its learning rate is that of `options` as it is."""
    examples = options.sequences * options.steps
    return Config(
        config=LANGUAGE_MODEL, data=options.text, val_split=VALIDATION_SHARE,
        output=options.output or options.resume, seed=options.seed, epochs=options.epochs, batch_size=examples,
        max_steps=options.max_steps, device=options.device, executor=options.executor, dtype=options.dtype,
        tf32=options.tf32, optimizer="adamw", learning_rate=options.learning_rate * REFERENCE_BATCH / examples,
        weight_decay=0.0, clip_norm=options.clip_norm, label_smoothing=0.0, warmup_epochs=0.1,
        log_every=options.log_every, tensorboard=False)


def _check_same(file: Path, start: Checkpoint, known: Sequence[str], initial: Mapping[str, np.ndarray]) -> None:
    """Raise TrainError where the checkpoint is of another vocabulary or network."""
    if start.class_names != list(known):
        raise TrainError(f"{file} was trained with another vocabulary: give --text, --vocabulary and --seed as they "
                         "were, or begin a new run")
    if {name: array.shape for name, array in start.params.items()} != {
            name: array.shape for name, array in initial.items()}:
        raise TrainError(f"{file} is of another network: give --hidden and --layers as they were, or begin a new run")


def perplexities(recorder: Recorder) -> list[str]:
    """A line for each epoch: exp of the mean loss of a word."""
    return [f"epoch {row.epoch}: perplexity {_exp(row.train_loss):.2f}, in validation {_exp(row.val_loss):.2f}"
            for row in recorder.record.epochs if row.train_loss is not None and row.val_loss is not None]


def _exp(loss: float) -> float:
    """Infinite where a float has no room for it."""
    return math.exp(loss) if loss < MAX_EXPONENT else math.inf
