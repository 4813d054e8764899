"""The program: parse, build, run, close. `python -m train --help` lists the commands."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Ctrl-C ends the program during the imports, which take seconds: Python would print a stack trace, or miss it.
    ctrl_c_handler = signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common import files
from common.command_line import HELP, choose_command, describe_commands, exit_code_of, given_value
from common.errors import ProgramError, UserError
from pipelines.samples import make_samples
from train import checkpoint, compare_precision, devices, export, predict
from train.benchmark import benchmark, measure_loader
from train.build import SAMPLES_FOLDER, build_executor, check_memory, join_bn_group, open_split
from train.config import CONFIG_FILE, SAMPLES, SYNTHETIC, BenchmarkConfig, Config, ValidateConfig, parse, presets
from train.distributed import Workers, drain_engine, is_elastic, is_lost_process
from train.environment import launcher
from train.errors import LostProcessError, TrainError
from train.loop import Trainer, frozen_heap, validate
from train.profile import write_profile
from train.recorder import Recorder
from train.report import write_report
from train.schedule import image_sizes
from train.signals import StoppedBySignal

if TYPE_CHECKING:
    from train.elastic import RunState  # needs Horovod

AUTO = "auto"  # value of --resume: go on with the run in --output, or begin it


def train(arguments: Sequence[str]) -> None:
    """Train a network; what happens without a command."""
    if is_elastic():
        from train import elastic  # needs Horovod

        elastic.run(partial(_train, arguments))
    else:
        _train(arguments)


def _train(arguments: Sequence[str], state: RunState | None = None) -> None:
    """One session: the whole of an ordinary run; of an elastic one, which has a `state`, until processes come or go."""
    workers = Workers()
    with contextlib.ExitStack() as loaders:
        with workers.agreement():
            start: checkpoint.Checkpoint | None
            if state and state.committed:  # this is not the first session of this run
                start, config, run_folder = state.committed, state.committed.config, state.run_folder or Path()
            else:
                resumed_file = _checkpoint_to_resume(arguments)
                start = checkpoint.load(resumed_file) if resumed_file else None
                default = _resumed_config(resumed_file, start) or devices.default_config(arguments, workers.local_rank)
                config = parse(Config, arguments, command="train", default=default)
                if not start:
                    _name_preset(config, arguments, workers)
                run_folder = _run_folder(config, resumed_file)
            placement = _prepare(config, workers)
            bn_group = join_bn_group(config, placement, workers)
            train_loader = loaders.enter_context(open_split(config, "train", placement, workers))
            val_loader = None
            if config.validate_every:
                val_loader = loaders.enter_context(open_split(config, "val", placement, workers))
            if not start and placement.device.startswith("gpu"):
                # The network asks how much memory is left: it is to know of the loaders', of validation's too.
                for loader in (train_loader, val_loader):
                    if loader:
                        loader.prepare()
            image_size = train_loader.config.size_in(start.progress.epoch if start else 0)
            if state and state.executor and start:
                executor = state.executor
                executor.set_params(start.params, start.aux)
                executor.read_metrics()  # those of steps that are undone
            else:
                largest_size = max(image_sizes(config))
                check_memory(config, len(train_loader.class_names), largest_size, placement)
                executor = build_executor(config, len(train_loader.class_names), image_size, placement, start,
                                          not workers.alone, bn_group, largest_size)
            trainer = Trainer(config, workers, executor, train_loader, val_loader, run_folder, start,
                              state.commit if state else None)  # fmt: skip
        if state:
            state.capture, state.executor, state.run_folder = trainer.capture, executor, run_folder
        trainer.join()
        with workers.agreement():
            recorder = _open_recorder(trainer, config.epochs)
        try:
            with recorder:
                if largest_batch := executor.largest_batch():
                    recorder.event("memory", largest_batch=largest_batch)
                if cached := train_loader.cache_bytes + (val_loader.cache_bytes if val_loader else 0):
                    size = f"{cached / 2**30:.2f} GiB" if cached >= 2**30 / 10 else f"{cached / 2**20:.1f} MiB"
                    recorder.say(f"decoded images stay in memory: {size} per process (--cache)")
                trainer.run(recorder)
                if config.data != SYNTHETIC:  # which is made once and costs nothing
                    recorder.loader_speed(measure_loader(train_loader, workers))
        except StoppedBySignal:
            _report(recorder, run_folder)
            raise
        except Exception as error:
            if state or not is_lost_process(error):
                raise
            if bn_group:
                bn_group.give_up()  # the GPU would wait for the lost one
            drain_engine()
            raise LostProcessError(f"another process of this run has ended; go on from the last checkpoint, if there "
                                   f"is one, with: {launcher()} --resume {run_folder}") from None
        _report(recorder, run_folder)


def validate_trained(arguments: Sequence[str]) -> None:
    """Print loss and accuracy of a trained network on validation data."""
    workers = Workers()
    with workers.agreement():
        place = given_value(arguments, "--checkpoint")
        trained = checkpoint.load_trained(place) if place else None
        config = parse(ValidateConfig, arguments, command="validate", default=trained.config if trained else None)
        if trained is None:
            raise TrainError("validation needs trained weights: give --checkpoint with a run folder or checkpoint file")
        placement = _prepare(config, workers)
        loader = open_split(replace(config, cache=0), "val", placement, workers)  # each image is needed once
        executor = build_executor(config, len(loader.class_names), loader.config.image_size, placement, trained)
    sums = validate(executor, loader, workers)
    if workers.rank == 0:
        loss, top1, top5 = (value / sums.count for value in (sums.loss_sum, sums.top1, sums.top5))
        print(f"{place}: {sums.count:.0f} images, loss {loss:.4f}, top-1 {top1:.2%}, top-5 {top5:.2%}")


def benchmark_steps(arguments: Sequence[str]) -> None:
    """Measure the speed of training steps, which are repeated until it is known to 1 %."""
    workers = Workers()
    with workers.agreement():
        default = devices.default_config(arguments, workers.local_rank)
        config = parse(BenchmarkConfig, arguments, command="benchmark", default=default)
        if config.resume:
            raise TrainError(f"a benchmark begins with new weights: leave out --resume {config.resume}")
        _name_preset(config, arguments, workers)
        config = replace(config, first_image_size=0)  # progressive resizing would mix steps of several sizes
        run_folder = _run_folder(config)
        placement = _prepare(config, workers)
        if config.profile and placement.executor != "cuda":
            raise TrainError(f"--profile measures the kernels of the cuda executor, but the executor of this run is "
                             f"{placement.executor}: leave it out")
        bn_group = join_bn_group(config, placement, workers)
        loader = open_split(config, "train", placement, workers)
        check_memory(config, len(loader.class_names), loader.config.size_in(0), placement)
        executor = build_executor(config, len(loader.class_names), loader.config.size_in(0), placement, None,
                                  not workers.alone, bn_group)
        trainer = Trainer(config, workers, executor, loader, None, run_folder, None)
    trainer.join()
    with workers.agreement():
        recorder = _open_recorder(trainer, num_epochs=None, warmup_steps=config.warmup_steps)
    with recorder:
        with trainer.monitoring(recorder), frozen_heap():
            result = benchmark(trainer, recorder, config)
        recorder.say(result.sentence)
        if config.profile and workers.rank == 0:
            recorder.say(write_profile(run_folder / "profile.txt", executor, result.step_ms))
        if config.data != SYNTHETIC:
            recorder.loader_speed(measure_loader(loader, workers))
    _report(recorder, run_folder)


COMMANDS = {
    "train": (train, Config),
    "validate": (validate_trained, ValidateConfig),
    "benchmark": (benchmark_steps, BenchmarkConfig),
    "compare-precision": (compare_precision.main, compare_precision.CompareConfig),
    "predict": (predict.main, predict.PredictOptions),
    "export": (export.main, export.ExportOptions),
}
OF_ONE_PROCESS = ("compare-precision", "predict", "export")


def _checkpoint_to_resume(arguments: Sequence[str]) -> Path | None:
    place = given_value(arguments, "--resume")
    if place == AUTO:
        output = given_value(arguments, "--output")
        if not output:
            raise TrainError("--resume auto needs --output with the folder of the run; or give --resume that folder")
        return checkpoint.in_folder(Path(output))
    return checkpoint.find(place) if place else None


def _resumed_config(file: Path | None, start: checkpoint.Checkpoint | None) -> Config | None:
    """The configuration of the run that is gone on with, less its limits, which were those of that session."""
    if not (file and start):
        return None
    output = str(file.parent.parent) if file.parent.name == checkpoint.FOLDER else ""
    return replace(start.config, output=output, max_steps=0, time_limit=0.0)


def _name_preset(config: Config, arguments: Sequence[str], workers: Workers) -> None:
    """Where somebody's own data came without a preset: say which one it got."""
    if workers.rank == 0 and given_value(arguments, "--data") and not given_value(arguments, "--config"):
        recipe = f"{config.epochs} epoch{'s' * (config.epochs > 1)} at {config.image_size} pixels"
        others = ", ".join(name for name in presets() if name != config.config)
        print(f"preset {config.config}: {recipe}; --config takes others: {others}", flush=True)


def _run_folder(config: Config, resumed_file: Path | None = None) -> Path:
    """The run's folder, which is not made yet. Raises TrainError where it holds another run."""
    folder = Path(config.output or f"runs/{config.config}-{datetime.now():%Y%m%d-%H%M%S}")
    goes_on_there = config.resume == AUTO or (resumed_file is not None and folder in resumed_file.parents)
    if (folder / CONFIG_FILE).exists() and not goes_on_there:
        has_checkpoint = (folder / checkpoint.FOLDER).is_dir()
        way_out = f"go on with it (--resume {folder})" if has_checkpoint else "remove it"
        raise TrainError(f"the output folder {folder} already holds a run: {way_out}, or give another --output")
    return folder


def _prepare(config: Config, workers: Workers) -> devices.Placement:
    """Choose the device, saying so where it matters, and make the built-in sample set if it is asked for."""
    placement = devices.choose(config, workers.local_rank)
    if placement.note and workers.rank == 0:
        print(placement.note, flush=True)
    if workers.rank:
        logging.getLogger("graph_passes.cuda").setLevel(logging.ERROR)  # process 0 says for all that kernels are chosen
    with workers.agreement():
        if config.data == SAMPLES and workers.local_rank == 0:
            make_samples(SAMPLES_FOLDER)
    return placement


def _open_recorder(trainer: Trainer, num_epochs: int | None, warmup_steps: int = 10) -> Recorder:
    """Make the run's folder with the recorder in it, and its config.json. Raises TrainError where that fails."""
    config, workers, progress = trainer.config, trainer.workers, trainer.progress
    recorder = Recorder(
        trainer.run_folder,
        config=config.to_dict(),
        images_per_step=config.global_batch(workers.size),
        num_epochs=num_epochs,
        log_every=config.log_every,
        enabled=workers.rank == 0,
        num_processes=workers.size,
        first_step=progress.step,
        first_epoch=progress.epoch,
        warmup_steps=warmup_steps,
        tensorboard=config.tensorboard,
        mlperf=config.mlperf,
    )
    if workers.rank == 0:  # once the recorder has the folder for itself
        files.write(trainer.run_folder / CONFIG_FILE, json.dumps(config.to_dict(), indent=2).encode() + b"\n")
    if trainer.average:
        recorder.say(workers.describe(trainer.average))
    return recorder


def _report(recorder: Recorder, run_folder: Path) -> None:
    if recorder.enabled:
        print(f"report: {write_report(run_folder / 'report', recorder.record)}")


def _is_first() -> bool:
    return os.environ.get("HOROVOD_RANK", "0") == "0"


def main(arguments: Sequence[str]) -> int:
    """Run a command; returns the exit code. A user's mistake becomes one sentence on stderr and code 2."""
    return exit_code_of(partial(_run, arguments))


def _run(arguments: Sequence[str]) -> int:
    options = {name: options for name, (_, options) in COMMANDS.items()}
    if arguments and arguments[0] in HELP:
        note = f"Presets for --config: {', '.join(presets())}."
        print(describe_commands(options, prog="python -m train", default="train", note=note))
        return 0
    try:
        try:
            command, rest = choose_command(options, arguments, prog="python -m train", default="train")
        except UserError as error:
            raise TrainError(str(error), on_all_ranks=True) from None
        if command in OF_ONE_PROCESS and int(os.environ.get("HOROVOD_SIZE", "1")) > 1:
            raise TrainError(f"{command} works in one process: use python -m train {command}", on_all_ranks=True)
        COMMANDS[command][0](rest)
    except TrainError as error:
        if _is_first() or not error.on_all_ranks:
            raise
        return error.exit_code  # rank 0 says why
    except StoppedBySignal as stop:
        if _is_first():
            print(stop, flush=True)
        return stop.exit_code
    except MemoryError as error:
        raise ProgramError(f"the machine's memory does not hold this ({error or 'MemoryError'}): lower --batch-size or "
                           "--num-threads, or start fewer processes") from None
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, ctrl_c_handler)
    sys.exit(main(sys.argv[1:]))
