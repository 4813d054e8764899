"""The command `language-model`: train a small word-level language model in the training loop of image classifiers."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from common.command_line import part_of
from graph_passes import Ref
from graph_passes.executors import create_executor
from graph_passes.passes.precision import ITEM_BYTES
from pipelines import LoaderConfig
from pipelines.text import UNKNOWN, TextLoader, generated_words, num_known, numbered, read_words, vocabulary
from train import checkpoint
from train.build import network_dtype
from train.checkpoint import Checkpoint
from train.commands.session import checkpoint_to_resume, lost_process, prepare, run_folder_of, steps_allowed, train
from train.config import Config
from train.devices import Placement
from train.errors import TrainError
from train.language_model import LanguageModel
from train.language_model_config import VALIDATION_SHARE, LanguageModelConfig
from train.loop import Trainer
from train.options.language_model import GENERATED, LanguageModelOptions
from train.processes.distributed import Workers, is_lost_process
from train.processes.invocation import launcher
from train.recording.recorder import Recorder
from train.report import language_model
from train.report.language_model import Facts

GENERATED_WORDS, GENERATED_DIFFERENT = 200_000, 200


def main(values: Mapping[str, Any]) -> None:
    """Train the model and write the report. Raises UserError and StoppedBySignal."""
    workers = Workers()
    with workers.agreement():
        config, folder, start = begin(values)
        options = config.options
        placement = prepare(config, workers)
        words, best_possible = _text(options, quiet=workers.rank > 0)
        end = len(words) - round(VALIDATION_SHARE * len(words))
        known = vocabulary(words[:end], options.vocabulary)
        if start and start.class_names != known:
            raise TrainError(f"{start.named} belongs to a run with another vocabulary than that of {options.text}: "
                             "give the original --text, or begin a new run with another --output")
        tokens = numbered(words, known)
        on_gpu = placement.device.startswith("gpu")
        loading = LoaderConfig(data=options.text, batch_size=config.batch_size, seed=config.seed,
                               device="gpu" if on_gpu else "cpu", device_id=workers.local_rank if on_gpu else 0)
        loaders = [TextLoader(replace(loading, split=split), (workers.rank, workers.size), part, known, options.steps)
                   for split, part in (("train", tokens[:end]), ("val", tokens[end:]))]
        model = LanguageModel(len(known), options.hidden, options.layers, options.steps, options.sequences)
        _check_memory(model)
        settings: dict[str, Any] = {}
        if placement.executor == "cuda":
            settings = {"dtype": network_dtype(config, placement), "tf32": config.tf32}
        executor = create_executor(placement.executor, model.graph, model.shapes, placement.device, **settings)
        params = start.params if start else model.initial_values(config.seed)
        executor.set_params(params, {})
        trainer = Trainer(config, workers, executor, loaders[0], loaders[1], folder, start)
    trainer.saver.resume_command = f"{launcher()} language-model --resume {shlex.quote(str(folder))}"
    unknown = float(np.mean(tokens[end:] == 0))  # accuracy of a network that always answers <unk>
    facts = Facts(_precision(config, placement), sum(array.size for array in params.values()), num_known(known),
                  loaders[0].num_images, loaders[1].num_images, unknown, best_possible)
    try:
        train(trainer, partial(_note, facts, len(words)))
    except Exception as error:
        if not is_lost_process(error):
            raise
        raise lost_process(trainer) from None


def _check_memory(model: LanguageModel) -> None:
    """Raise TrainError if the parameters, their gradients and AdamW's averages do not fit into memory."""
    shapes = model.graph.infer_shapes(model.shapes)
    count = sum(math.prod(shapes[Ref(name)]) for name in model.graph.arguments if name not in model.shapes)
    needed, free = 4 * ITEM_BYTES["float32"] * count, psutil.virtual_memory().available
    if needed > free:
        raise TrainError(f"a network of {count:,} parameters needs {needed / 2**30:,.1f} GiB of memory to train, and "
                         f"{free / 2**30:.1f} GiB are free: lower --hidden, --layers or --vocabulary")


def _text(options: LanguageModelOptions, quiet: bool) -> tuple[list[str], float | None]:
    """The words of the text, and the best possible perplexity if it is known. Raises DataError."""
    if options.text != GENERATED:
        return read_words(Path(options.text)), None
    words, best_possible = generated_words(GENERATED_WORDS, GENERATED_DIFFERENT, options.seed)
    if not quiet:
        print(f"generated text of {len(words):,} words, {GENERATED_DIFFERENT} different ones: the best possible "
              f"perplexity is {best_possible:.2f}", flush=True)
    return words, best_possible


def _precision(config: Config, placement: Placement) -> str:
    dtype = network_dtype(config, placement)
    is_tf32 = placement.executor == "cuda" and dtype == "float32" and config.tf32
    return "float32, products in TF32" if is_tf32 else dtype


def _note(facts: Facts, num_words: int, trainer: Trainer, recorder: Recorder) -> None:
    """Report the properties of network and text before the first step."""
    recorder.say(f"{num_words:,} words, {facts.vocabulary:,} in the vocabulary; {facts.training_words:,} are learned "
                 f"in an epoch, {facts.validation_words:,} are for validation")
    if facts.unknown_share:
        recorder.say(f"{facts.unknown_shown} of the words for validation are not in the vocabulary: perplexity "
                     f"counts them as one word, {UNKNOWN}")
    recorder.event(language_model.EVENT, **asdict(facts))


def begin(values: Mapping[str, Any]) -> tuple[LanguageModelConfig, Path, Checkpoint | None]:
    """The configuration and folder of a new or resumed run, and the checkpoint to resume from. Raises TrainError."""
    file = checkpoint_to_resume(values)
    if not file:
        config = LanguageModelConfig.of(part_of(LanguageModelOptions, values))
        return config, run_folder_of(config), None
    start = checkpoint.load(file)
    if not isinstance(start.config, LanguageModelConfig):
        raise TrainError(f"{file} belongs to a network for images, not to a language model: give another "
                         "checkpoint, or resume this run with python -m train --resume")
    of_run = replace(start.config.options, output=checkpoint.run_folder(file), max_steps=steps_allowed(start))
    config = LanguageModelConfig.of(replace(of_run, **values))
    config.check_goes_on(start.config, start.named)
    return config, run_folder_of(config, file), start
