"""The command `train`, the default of `python -m train`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common import plugins
from common.files import shown_size
from common.phases import FIRST_BATCH, NETWORK, phase
from graph_passes.executors import Executor
from train import checkpoint, demonstration, devices, losses
from train.build import (
    build_executor,
    check_memory,
    class_remarks,
    class_weights,
    evaluated_images,
    join_bn_group,
    open_split,
)
from train.callbacks import check_callbacks
from train.checkpoint import Checkpoint
from train.commands.session import (
    checkpoint_to_resume,
    lost_process,
    name_preset,
    of_network,
    prepare,
    run_folder_of,
    steps_allowed,
    train,
)
from train.config import FOUND_IN_DATA, Config, check_plugged, check_untrained, configure
from train.errors import TrainError
from train.loop import Trainer
from train.presets import load_preset
from train.processes.distributed import Workers, is_elastic, is_lost_process
from train.recording.metrics import TRAINING_IMAGES, VALIDATION
from train.recording.recorder import Recorder
from train.schedule import image_sizes
from train.statistics import without_variance
from train.weights import Weights, settings, starting_point
from train.weights import read as read_weights

if TYPE_CHECKING:
    from graph_passes.executors.cuda.statistics_group import StatisticsGroup
    from train.processes.elastic import RunState  # needs Horovod


class Beginning(NamedTuple):
    """The state from which a session of a run starts."""

    config: Config
    run_folder: Path
    checkpoint: Checkpoint | None  # None: a new run begins
    weights: Weights | None = None  # weights to begin with; None: the network's initial weights
    fit_machine: bool = False  # choose the number of epochs by the machine's speed


def main(values: Mapping[str, Any]) -> None:
    """Train. Raises UserError, StoppedBySignal, and LostProcessError."""
    if is_elastic():
        from train.processes import elastic  # needs Horovod

        elastic.run(partial(_elastic_session, values))
        return
    run(values)


def run(values: Mapping[str, Any], callbacks: Sequence[Any] = ()) -> Path:
    """Train, and return the run's folder. Raises UserError, StoppedBySignal, and LostProcessError.

    `values`: the given options of the command. `callbacks`: see `Callbacks.add`.
    """
    check_callbacks(callbacks)
    workers = Workers()
    beginning = begin(values, workers)
    with open_trainer(beginning, workers) as (trainer, bn_group):
        trainer.callbacks.add(callbacks)
        try:
            train(trainer, _note)
        except Exception as error:
            if not is_lost_process(error):
                raise
            if bn_group:
                bn_group.give_up()  # otherwise the GPU would wait forever for the lost process
            raise lost_process(trainer) from None
    return beginning.run_folder


def _elastic_session(values: Mapping[str, Any], state: RunState) -> None:
    """Train until the run ends, or until processes join or leave. `state` then holds the state from which the next
    session starts, and the executor with its compiled graphs.
    """
    workers = Workers()
    if not state.beginning:
        state.beginning = begin(values, workers)
    with open_trainer(state.beginning, workers, state.executor, state.commit) as (trainer, _):
        state.capture, state.executor = trainer.saver.capture, trainer.executor
        train(trainer, _note)


def begin(values: Mapping[str, Any], workers: Workers) -> Beginning:
    """The start of a new or resumed run. A collective operation; raises TrainError."""
    with workers.agreement():
        file = checkpoint_to_resume(values)
        if not file:
            config, weights = new_config(values, workers.local_rank)
            name_preset(config, values, workers)
            return Beginning(config, run_folder_of(config), None, weights, demonstration.is_one(config, values))
        start = checkpoint.load_checked(file)
        checkpoint.load_plugins(start)
        default = load_preset(values["config"]) if "config" in values else _resumed_config(file, start)
        if values.get("weights"):  # the file with the weights from which this command began the run
            default = replace(default, **settings(start.config))
        config = of_network(configure(values, default), values, start)
        config = replace(config, plugin=plugins.together(start.config.plugin, config.plugin))
        check_plugged(config)
        losses.check(config.loss)
        return Beginning(config, run_folder_of(config, file), start)


def new_config(values: Mapping[str, Any], local_rank: int) -> tuple[Config, Weights | None]:
    """The configuration of a new run, and the weights with which the run begins (None: the network's initial weights).
    Raises TrainError.
    """
    check_untrained(values)
    default = devices.default_config(values, local_rank)
    weights = read_weights(values["weights"], values.get("model", "")) if values.get("weights") else None
    if weights:
        default = replace(default, **settings(weights.trained.config, with_sizes="config" not in values))
    config = configure(values, default)
    check_plugged(config)
    losses.check(config.loss)
    return config, weights


def _resumed_config(file: Path, start: Checkpoint) -> Config:
    """The configuration of a resumed run, without the limit that ended the run."""
    return replace(start.config, output=checkpoint.run_folder(file), max_steps=steps_allowed(start))


@contextlib.contextmanager
def open_trainer(
    beginning: Beginning, workers: Workers, executor: Executor | None = None, commit: Callable[[], None] | None = None
) -> Iterator[tuple[Trainer, StatisticsGroup | None]]:
    """A context with a trainer that has joined the other processes, and the group of GPUs that share BatchNorm's
    statistics.

    A collective operation; raises UserError.

    Args:
        executor: the executor of an elastic run's earlier session; None: a new executor is built.
        commit: see `Trainer`.
    """
    config, run_folder, start, weights, fit_machine = beginning
    with contextlib.ExitStack() as loaders:
        with workers.agreement():
            plugins.restore(config.plugin, "the run that this process joins")
            placement = prepare(config, workers)
            bn_group = join_bn_group(config, placement, workers)
            known = (start.classes, "the network of the resumed run") if start else ()
            train_loader = loaders.enter_context(open_split(config, "train", placement, workers, *known))
            config = replace(config, **{name: getattr(train_loader.config, name) for name in FOUND_IN_DATA})
            if config.accumulate > train_loader.num_batches:  # the learning rate assumes full steps
                raise TrainError(f"--accumulate {config.accumulate} is more than the {train_loader.num_batches} "
                                 "batches of an epoch, but a step cannot span epochs: lower --accumulate")
            val_loader = None
            if config.validate_every:
                val_loader = loaders.enter_context(open_split(config, "val", placement, workers, train_loader.classes,
                                                              "the training images"))
                if workers.rank == 0 and evaluated_images(config) == VALIDATION:
                    val_loader.remarks = [*val_loader.remarks,
                                          *class_remarks(config.data, train_loader, val_loader)]
            if not start and placement.device.startswith("gpu"):
                # The network checks how much memory is left, so both loaders must have allocated their memory before.
                for loader in (train_loader, val_loader):
                    if loader:
                        with phase(FIRST_BATCH):
                            loader.prepare()
            origin: list[str] = []
            if executor and start:
                executor.set_params(start.params, start.aux)
                executor.read_metrics()  # discards the metrics of steps that were undone
            else:
                initial, origin = starting_point(weights, train_loader.classes, config) if weights else (start, [])
                num_classes, sizes = len(train_loader.class_names), image_sizes(config)
                largest_size = max(sizes)
                for size in sorted(set(sizes), reverse=True):
                    check_memory(config, num_classes, size, placement)
                if val_loader:
                    check_memory(config, num_classes, config.inference_image_size, placement, training=False)
                image_size = train_loader.config.size_in(start.progress.epoch if start else 0)
                executor = build_executor(config, num_classes, image_size, placement, initial, not workers.alone,
                                          bn_group, largest_size, class_weights(config, train_loader))
            if val_loader:  # built now, so that an error appears before the first step, and no step waits for it
                with phase(NETWORK):
                    executor.prepare_inference((config.inference_image_size,) * 2)
        # a GPU trains the full number of epochs in seconds, so only CPUs shorten the run
        if fit_machine and placement.device.startswith("cpu"):
            config = demonstration.fit(config, executor, train_loader.num_images, workers)
        with workers.agreement():
            trainer = Trainer(config, workers, executor, train_loader, val_loader, run_folder, start, commit)
            trainer.origin = origin
        yield trainer, bn_group


def _note(trainer: Trainer, recorder: Recorder) -> None:
    """Report the run's properties before its first step."""
    _note_origin(trainer, recorder)
    _note_frozen(trainer, recorder)
    _note_lone_values(trainer, recorder)
    _note_memory(trainer, recorder)
    _note_data(trainer, recorder)


def _note_origin(trainer: Trainer, recorder: Recorder) -> None:
    for note in trainer.origin:
        recorder.say(note)
    if trainer.origin:
        recorder.event("weights", notes=trainer.origin)


def _note_frozen(trainer: Trainer, recorder: Recorder) -> None:
    executor, layers = trainer.executor, trainer.config.freeze
    if layers:
        sizes = {name: math.prod(array.shape) for name, array in executor.params.items()}
        trained = sum(size for name, size in sizes.items() if name not in executor.frozen)
        recorder.say(f"{trained:,} of {sum(sizes.values()):,} parameters are trained (--freeze {layers})")


def _note_lone_values(trainer: Trainer, recorder: Recorder) -> None:
    """Warn about a BatchNorm that sees a single value per channel: without a variance the loss would never fall."""
    config = trainer.config
    size = min(image_sizes(config))
    if names := without_variance(trainer.executor, size, config.bn_group):
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        recorder.say(f"{names[-1]}{others} normalise a single value per channel, in batches of one image of {size} "
                     "pixels, so that all images look the same after them and the network hardly learns: raise "
                     "--batch-size or --image-size")


def _note_memory(trainer: Trainer, recorder: Recorder) -> None:
    if largest_batch := trainer.executor.largest_batch():
        recorder.event("memory", largest_batch=largest_batch)
    loaders = (trainer.train_loader, trainer.val_loader)
    if cached := sum(loader.cache_bytes for loader in loaders if loader):
        recorder.say(f"decoded images stay in memory: {shown_size(cached)} per process (--cache)")


def _note_data(trainer: Trainer, recorder: Recorder) -> None:
    """Report the training and validation data. Warn if the accuracy is measured on training images, because it then
    tells nothing about unseen images.
    """
    if not recorder.enabled:
        return
    config, train_loader, val_loader = trainer.config, trainer.train_loader, trainer.val_loader
    for remark in dict.fromkeys((*train_loader.remarks, *(val_loader.remarks if val_loader else ()))):
        recorder.say(remark)
    on_training_images = recorder.evaluated == TRAINING_IMAGES
    found = f"{train_loader.num_images:,} training images of {len(train_loader.classes):,} classes"
    if val_loader and not on_training_images:
        found += f", {val_loader.num_images:,} for validation"
    if config.val_split:
        found += f" (--val-split {config.val_split:g})"
    if config.labels != Config.labels:
        found += f" (--labels {config.labels})"
    recorder.say(found)
    for remark in train_loader.remarks_on_same_images(None if on_training_images else val_loader):
        recorder.say(remark)
    if on_training_images:
        recorder.say(f"{config.data} has no validation images of its own (docs/data.md): accuracy after an epoch is "
                     f"measured on the {TRAINING_IMAGES}, which is no validation")
        recorder.say("--val-split 0.1 would set a tenth of the images aside for validation")
