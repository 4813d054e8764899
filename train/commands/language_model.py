"""The command `language-model`: train a small word language model by the loop that trains classifiers of images."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common.command_line import part_of
from graph_passes.executors import create_executor
from pipelines import LoaderConfig
from pipelines.text import UNKNOWN, TextLoader, generated_words, numbered, read_words, vocabulary
from train import checkpoint
from train.build import network_dtype
from train.checkpoint import Checkpoint
from train.commands.session import checkpoint_to_resume, open_recorder, prepare, run_folder_of
from train.errors import TrainError
from train.language_model import LanguageModel
from train.language_model_config import VALIDATION_SHARE, LanguageModelConfig
from train.loop import Trainer
from train.options.language_model import GENERATED, LanguageModelOptions
from train.processes.distributed import Workers
from train.processes.invocation import launcher
from train.reporting.recorder import Recorder

GENERATED_WORDS, GENERATED_DIFFERENT = 200_000, 200
MAX_EXPONENT = math.log(sys.float_info.max)


def main(values: Mapping[str, Any]) -> None:
    """Train, and print the perplexity after each epoch. Raises UserError and StoppedBySignal."""
    workers = Workers()
    with workers.agreement():
        config, folder, start = begin(values)
        options = config.options
        placement = prepare(config, workers)
        on_gpu = placement.device.startswith("gpu")
        if options.text == GENERATED:
            words, floor = generated_words(GENERATED_WORDS, GENERATED_DIFFERENT, options.seed)
            if workers.rank == 0:
                print(f"generated text of {len(words):,} words, {GENERATED_DIFFERENT} different ones: who knows how it "
                      f"was made has a perplexity of {floor:.2f}", flush=True)
        else:
            words = read_words(Path(options.text))
        end = len(words) - round(VALIDATION_SHARE * len(words))
        known = vocabulary(words[:end], options.vocabulary)
        if start and start.class_names != known:
            raise TrainError(f"the checkpoint is of a run with another vocabulary than that of {options.text}: give "
                             "--text as it was, or begin a new run with another --output")
        tokens = numbered(words, known)
        loading = LoaderConfig(data=options.text, batch_size=config.batch_size, seed=config.seed,
                               device="gpu" if on_gpu else "cpu", device_id=workers.local_rank if on_gpu else 0)
        loaders = [TextLoader(replace(loading, split=split), (workers.rank, workers.size), part, known, options.steps)
                   for split, part in (("train", tokens[:end]), ("val", tokens[end:]))]
        model = LanguageModel(len(known), options.hidden, options.layers, options.steps, options.sequences)
        settings: dict[str, Any] = {}
        if placement.executor == "cuda":
            settings = {"dtype": network_dtype(config, placement), "tf32": config.tf32}
        executor = create_executor(placement.executor, model.graph, model.shapes, placement.device, **settings)
        executor.set_params(start.params if start else model.initial_values(config.seed), {})
        trainer = Trainer(config, workers, executor, loaders[0], loaders[1], folder, start)
    trainer.go_on = f"{launcher()} language-model --resume {shlex.quote(str(folder))}"
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


def begin(values: Mapping[str, Any]) -> tuple[LanguageModelConfig, Path, Checkpoint | None]:
    """The configuration and folder of a new run, or of one that is gone on with, and then what it goes on from. Raises
    TrainError."""
    file = checkpoint_to_resume(values)
    if not file:
        config = LanguageModelConfig.of(part_of(LanguageModelOptions, values))
        return config, run_folder_of(config), None
    start = checkpoint.load(file)
    if not isinstance(start.config, LanguageModelConfig):
        raise TrainError(f"{file} is of a network for images, and not of a language model: give another one, or go on "
                         "with that one by python -m train --resume")
    # The limit was that of the session before.
    of_run = replace(start.config.options, output=checkpoint.run_folder(file), max_steps=0)
    config = LanguageModelConfig.of(replace(of_run, **values))
    config.check_goes_on(start.config)
    return config, run_folder_of(config, file), start


def perplexities(recorder: Recorder) -> list[str]:
    """A line for each epoch: exp of the mean loss of a word."""
    return [f"epoch {row.epoch}: perplexity {_exp(row.train_loss):.2f}, in validation {_exp(row.val_loss):.2f}"
            for row in recorder.record.epochs if row.train_loss is not None and row.val_loss is not None]


def _exp(loss: float) -> float:
    """Infinite where a float has no room for it."""
    return math.exp(loss) if loss < MAX_EXPONENT else math.inf
