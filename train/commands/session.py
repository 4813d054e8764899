"""Code shared by the commands that train or validate: the run's folder, device, recorder and report."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from common import files, plugins
from common.errors import ProgramError
from common.phases import described, phases
from common.program import REPORT, start_of
from pipelines import DataError, Loader
from pipelines.options import SAMPLES
from pipelines.samples import SAMPLES_FOLDER, make_samples
from pipelines.sources import has_label_sets
from train import checkpoint, demonstration, devices, run_folder
from train.build import evaluated_images
from train.checkpoint import Checkpoint
from train.config import CONFIG_FILE, Config
from train.errors import LostProcessError, TrainError
from train.loop import Trainer
from train.options.data import SYNTHETIC
from train.options.run import LIST_PRESETS
from train.processes.distributed import Workers, drain_engine, is_elastic
from train.processes.pulse import Activity, pulse
from train.processes.signals import StoppedBySignal, is_first
from train.recording.metrics import IMAGES, METRICS_FILE, VALIDATION
from train.recording.recorder import IMAGE_EVENTS, Recorder
from train.report import predictions
from train.report.inspection import describe, sample
from train.report.page import write_report
from train.report.plots import prepare as prepare_report
from train.saver import best_outcomes

LOADER_SECONDS = 2.0  # longest measurement of the loader running alone
LOADER_SHARE = 0.05  # share of the training's time: a short run must not wait long for that measurement
AUTO = "auto"  # value of --resume: resume the run in --output, or begin it


def name_preset(config: Config, values: Mapping[str, Any], workers: Workers) -> None:
    """Report the default preset, if the user chose no preset."""
    if workers.rank == 0 and "config" not in values:
        most = "up to " * demonstration.is_one(config, values)
        recipe = f"{most}{config.epochs} epoch{'s' * (config.epochs > 1)} at {config.image_size} pixels"
        print(f"preset {config.config}: {recipe} (--config takes another one, --config {LIST_PRESETS} lists them)",
              flush=True)


def checkpoint_to_resume(values: Mapping[str, Any]) -> Path | None:
    """The checkpoint file for --resume; None: begin a new run. Raises TrainError."""
    place = values.get("resume")
    if place and place != AUTO and values.get("weights"):
        raise TrainError(f"--weights {values['weights']} begins a run, but --resume {place} continues one with its "
                         "own weights: leave out one of them")
    if place == AUTO:
        if "output" not in values:
            raise TrainError("--resume auto needs --output with the folder of the run; or give that folder to --resume")
        return checkpoint.in_folder(Path(values["output"]))
    return checkpoint.find(place) if place else None


def steps_allowed(start: Checkpoint) -> int:
    """The default --max-steps of a resumed run: the run's own value, unless that number of steps has been reached."""
    return 0 if start.is_at_limit else start.config.max_steps


def run_folder_of(config: Config, resumed_file: Path | None = None) -> Path:
    """The run's folder. Without --output a new folder is created, which `run_folder.give_back` removes if it stays
    empty. With --output the folder is not created yet. Raises UserError if the folder holds another run or cannot be
    written.
    """
    folder = Path(config.output or f"runs/{config.config}-{datetime.now():%Y%m%d-%H%M%S}")
    goes_on_there = config.resume == AUTO or (resumed_file is not None and folder in resumed_file.parents)
    if config.output and (folder / CONFIG_FILE).exists() and not goes_on_there:
        way_out = f"resume it (--resume {folder})" if checkpoint.in_folder(folder) else "remove it"
        raise TrainError(f"the output folder {folder} already holds a run: {way_out}, or give another --output")
    if is_first():  # only the first process writes
        files.check_place(folder / CONFIG_FILE, "give another --output")
        if not config.output:
            return run_folder.take(folder)
    return folder


def of_network(config: Config, values: Mapping[str, Any], trained: Checkpoint) -> Config:
    """The configuration with a trained network's number of classes. If the data has several kinds of labels, the
    network's kind is set, too. Raises TrainError if the user gave other values.
    """
    wanted, has = values.get("num_classes"), trained.num_classes
    if wanted and wanted != has:
        raise TrainError(f"--num-classes {wanted} contradicts the network, which has {has} classes: leave it out, "
                         "or train a new one")
    unsaid, learned = Config.labels, trained.config.labels
    chosen = values.get("labels", unsaid)
    if unsaid not in (chosen, learned) and chosen != learned:
        raise TrainError(f"--labels {chosen} contradicts the network, which was trained on the {learned} labels: leave "
                         "it out, or train a new one")
    if chosen == unsaid != learned:
        config = replace(config, labels=learned if has_label_sets(config.data) else unsaid)
    return replace(config, num_classes=has if config.num_classes else 0)


def prepare(config: Config, workers: Workers) -> devices.Placement:
    """Choose the device, printing the choice if it matters, and create the built-in sample set if it is requested."""
    placement = devices.choose(config, workers.local_rank)
    if placement.note and workers.rank == 0:
        print(placement.note, flush=True)
    if workers.rank:
        logging.getLogger("graph_passes.cuda").setLevel(logging.ERROR)  # only process 0 logs the choice of kernels
    with workers.agreement():
        if config.data == SAMPLES and workers.local_rank == 0:
            make_samples(SAMPLES_FOLDER)
    return placement


def name_images(loader: Loader, workers: Workers) -> list[tuple[str, str]]:
    """Print on stderr the data that is left out, the images that any process has skipped, and the damaged images that
    were used. Returns the skipped images with their reasons. A collective operation.
    """
    found = workers.gather((loader.bad_images, loader.damaged_images))
    # Two processes may report one image: a process whose part of a batch is all unreadable takes a good image from the
    # others' parts.
    bad, damaged = (dict(image for of_process in found for image in of_process[kind]) for kind in range(2))
    if workers.rank == 0:
        for remark in loader.remarks:
            print(remark, file=sys.stderr)
        for sentence, images in zip(IMAGE_EVENTS.values(), (bad, damaged), strict=True):
            for file, reason in images.items():
                print(sentence.format(file=file, reason=reason), file=sys.stderr)
    return list(bad.items())


def shown_skipped(number: int) -> str:
    """The number of skipped images, as text to append to a number of images."""
    return f" ({number:,} skipped)" if number else ""


def open_recorder(trainer: Trainer, num_epochs: int | None, warmup_steps: int = 10) -> Recorder:
    """Create the run's folder with the recorder and config.json in it. Raises TrainError if one of these cannot be
    created.
    """
    config, workers, progress = trainer.state.stated, trainer.workers, trainer.state.progress
    is_apart = is_elastic() and progress.step > 0 and not (trainer.run_folder / METRICS_FILE).exists()
    recorder = Recorder(
        trainer.run_folder,
        config=config.to_dict(),
        images_per_step=config.global_batch(workers.size),
        num_epochs=num_epochs,
        log_every=config.log_every,
        enabled=workers.rank == 0,
        num_processes=workers.size,
        num_classes=len(trainer.train_loader.classes),
        evaluated=evaluated_images(config) if trainer.val_loader else VALIDATION,
        first_step=progress.step,
        first_epoch=progress.epoch,
        start_seconds=phases.take(),
        warmup_steps=warmup_steps,
        tensorboard=config.tensorboard,
        mlperf=config.mlperf,
    )
    if workers.rank == 0:  # written after the recorder has locked the folder
        _write_config(trainer)
    if is_apart:
        recorder.say(f"{trainer.run_folder} has no record of this run on this machine: its report begins anew after "
                     f"step {progress.step}; give --output a folder that the machines share")
    if trainer.all_reduce:
        recorder.say(workers.describe(trainer.all_reduce))
    return recorder


def _write_config(trainer: Trainer) -> None:
    content = json.dumps(trainer.state.stated.to_dict(), indent=2).encode() + b"\n"
    files.write(trainer.run_folder / CONFIG_FILE, content)
    plugins.keep(trainer.state.stated.plugin, trainer.run_folder, files.write)


def train(trainer: Trainer, note: Callable[[Trainer, Recorder], None]) -> None:
    """Train to the end, record the run in its folder, and write the report. `note` reports the run's properties to the
    recorder before the first step. Raises UserError and StoppedBySignal."""
    trainer.join()
    trainer.settle()
    with trainer.workers.agreement():
        trainer.saver.check_space()
        recorder = open_recorder(trainer, trainer.config.epochs)
    try:
        with recorder:
            note(trainer, recorder)
            if recorder.enabled:
                trainer.during_last_save = prepare_report
            trainer.run(recorder)
            if trainer.config.data != SYNTHETIC:  # synthetic batches are generated once, so there is nothing to measure
                seconds = LOADER_SHARE * (time.monotonic() - trainer.started_at)
                with recorder.phase("loader alone"):
                    recorder.loader_speed(measure_loader(trainer.train_loader, trainer.workers, seconds))
                trainer.saver.save_completely(recorder)  # saved again, in case the checkpoint was removed meanwhile
    except StoppedBySignal:
        report(recorder, trainer.run_folder)
        raise
    report(recorder, trainer.run_folder, trainer)
    pulse.show(Activity.DONE)
    _check_complete(trainer, recorder)


def lost_process(trainer: Trainer) -> LostProcessError:
    """The error for a run whose process has lost the connection to another process."""
    drain_engine()
    return LostProcessError("the connection to another process of this run is lost; resume from the last checkpoint, "
                            f"if there is one, with: {trainer.saver.resume_command}")


def _check_complete(trainer: Trainer, recorder: Recorder) -> None:
    """Raise ProgramError if files of the run were removed while it ran."""
    if recorder.enabled and not (trainer.run_folder / CONFIG_FILE).exists():
        recorder.all_removed.append(CONFIG_FILE)
        _write_config(trainer)
    if names := list(dict.fromkeys(recorder.all_removed)):
        lost = ", earlier checkpoints are not" * any(not (trainer.run_folder / name).exists() for name in names)
        raise ProgramError(f"the run has ended, but {', '.join(names)} had been removed from {trainer.run_folder} "
                           f"during the run: their known content is written again{lost}")


def measure_loader(loader: Loader, workers: Workers, most: float = math.inf) -> float:
    """Images/sec of the loader running alone, summed over all processes. The measurement takes at most LOADER_SECONDS,
    and at most `most` seconds, but loads at least one batch.
    """
    batches = iter(itertools.chain.from_iterable(itertools.repeat(loader)))
    for _ in range(loader.config.prefetch + 1):  # these batches were prefetched while the network was still computing
        next(batches)
    seconds, start, count = min(LOADER_SECONDS, most), time.perf_counter(), 0
    while not count or time.perf_counter() - start < seconds:
        next(batches).data.wait_to_read()
        count += loader.config.batch_size
    return workers.sum([count / (time.perf_counter() - start)])[0]


def report(recorder: Recorder, run_folder: Path, trainer: Trainer | None = None) -> None:
    """Write the report, in the process that has recorded the run. With a `trainer` whose run is complete and validated,
    it also shows predictions for some images. Raises TrainError."""
    pulse.show(Activity.REPORTING)
    if not recorder.enabled:
        return
    print("writing the report ...", flush=True)
    began = time.monotonic()
    try:
        with _kept(recorder, run_folder):
            _write_report(recorder, run_folder, trainer)
    except KeyboardInterrupt:
        command = f"{start_of(REPORT)} {shlex.quote(str(run_folder))}"
        print(f"stopped before the report was complete; it is made with: {command}", flush=True)
        raise
    print(described({**recorder.seconds(), "report": time.monotonic() - began}, phases.total))
    if trainer and trainer.config.data == SAMPLES:
        print(demonstration.next_commands(run_folder, trainer.workers.size))


@contextlib.contextmanager
def _kept(recorder: Recorder, run_folder: Path) -> Iterator[None]:
    """Keep the run's files open inside the block, so that their content survives even if somebody removes the files.
    Removed files are written again at the end, and `recorder` gets their names. Raises UserError if they cannot be
    written.
    """
    checkpoints = sorted((run_folder / checkpoint.FOLDER).glob("*.npz"))
    with contextlib.ExitStack() as opened:
        contents = {}
        for path in (*checkpoints, run_folder / CONFIG_FILE, run_folder / METRICS_FILE):
            with contextlib.suppress(OSError):  # the file was removed before this point
                contents[path] = opened.enter_context(path.open("rb"))
        yield
        for path, file in contents.items():
            if not path.exists():
                files.write(path, file.read())
                recorder.all_removed.append(str(path.relative_to(run_folder)))


def _write_report(recorder: Recorder, run_folder: Path, trainer: Trainer | None) -> None:
    folder = run_folder / "report"
    if trainer and trainer.val_loader and has_predictions(trainer, recorder):
        _save_outcomes(trainer, trainer.val_loader, recorder.evaluated, folder)
    print(f"report: {write_report(folder, recorder.record)}")


def _save_outcomes(trainer: Trainer, loader: Loader, evaluated: str, folder: Path) -> None:
    """Write the network's results for the report into its folder: the outcomes of the best validation. If an earlier
    version wrote the best checkpoint, or its file is gone, the outcomes of the latest validation are written. Raises
    UserError.
    """
    validated = best_outcomes(trainer.run_folder) or trainer.validated
    if not validated:
        return
    epoch, outcomes = validated
    describe(outcomes, loader, epoch, f"{VALIDATION} images" if evaluated == VALIDATION else evaluated).save(folder)
    try:
        predictions.save(sample(outcomes, loader, epoch, evaluated), folder)
    except DataError as error:  # the run is complete even without these results
        print(f"no picture of predictions: {error}", flush=True)


def has_predictions(trainer: Trainer, recorder: Recorder) -> bool:
    """Whether the run has validated images that can be shown."""
    validated = any(row.evaluation for row in recorder.record.epochs)
    return validated and trainer.config.data != SYNTHETIC and recorder.record.examples == IMAGES
