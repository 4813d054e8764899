"""Predictions of any number of images, written to a file as they come; several processes share the images.

Reading and decoding (DALI), the network, and the finding and writing of the most likely classes overlap: each works on
another batch, and nothing is kept of one that is written.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import environment
from common.command_line import option_name
from graph_passes.executors import Executor
from pipelines import DataError, Loader, open_files
from pipelines.dali_loader import DaliLoader
from pipelines.progress import progress_bar
from train import devices, weights
from train.build import inference_executor, loader_settings, network_dtype
from train.checkpoint import Checkpoint
from train.commands.image_paths import image_paths
from train.commands.prediction_file import Found, PredictionFile, check_name, most_likely
from train.config import Config
from train.devices import Placement
from train.errors import TrainError
from train.options.commands import PredictOptions
from train.processes.distributed import Workers
from train.processes.invocation import command_line
from train.processes.pulse import Activity, pulse
from train.processes.signals import ending_with
from train.weights import int8_file
from train.weights.int8_file import Int8Network

GPU_BATCH = 256
WAITING_WRITES = 4  # batches
LOG_SECONDS = 30.0  # between two lines of progress where no terminal shows a bar
NAMED = 5  # damaged images

# What must be equal where a file is gone on with, of what is written beside it, and its name in messages.
SAME = {"numbers": "kind of numbers", "weights": "network, by the SHA-256 of its weights", "top": "--top",
        "image_size": "image size", "part": "share of the images"}


class Job(NamedTuple):
    """What a process needs to predict."""

    options: PredictOptions
    trained: Checkpoint
    config: Config
    placement: Placement
    top: int
    workers: Workers
    int8: Int8Network | None  # in place of the network in floats

    @property
    def dtype(self) -> str:
        return "int8" if self.int8 else network_dtype(self.config, self.placement)


@dataclass
class Totals:
    """Of a session: images predicted, those that cannot be read, those that are damaged, and the time that it took; and
    of the sessions before it, those that cannot be read."""

    good: int = 0
    bad: int = 0
    damaged: int = 0
    seconds: float = 0.0
    bad_before: int = 0

    def over(self, workers: Workers) -> Totals:
        """Of all processes, which work at the same time; a collective operation."""
        good, bad, damaged, before = map(round, workers.sum([self.good, self.bad, self.damaged, self.bad_before]))
        return Totals(good, bad, damaged, max(workers.gather(self.seconds)), before)


def predict_to_file(options: PredictOptions, values: Mapping[str, Any], workers: Workers) -> None:
    """Predict, and write `options.output`; `values` are the options that were given. Raises UserError,
    and StoppedBySignal."""
    with ending_with(f"stopped: the same command goes on where {options.output} ends"), ExitStack() as opened:
        _predict_to_file(options, values, workers, opened)


def _predict_to_file(options: PredictOptions, values: Mapping[str, Any], workers: Workers, opened: ExitStack) -> None:
    path = Path(options.output)
    images: list[str] = []
    before = Found(0, 0)

    def open_file(path: Path, share: str) -> PredictionFile:
        return opened.enter_context(PredictionFile(path, job.trained.class_names, job.top, about | {"part": share},
                                                   SAME))

    with workers.agreement():
        check_name(path)
        job = _job(options, values, workers)
        about = _about(job)
        if workers.rank == 0:
            images = [str(image) for image in image_paths(options.images)]
            whole = open_file(path, "all")
            before = whole.go_on(images)
            if before.records:
                print(f"{path} has {before.records:,} of {len(images):,} images", flush=True)
    images, first = workers.gather((images, before.records))[0]  # the same ones, though a folder be just being filled
    totals = Totals()
    with workers.agreement():
        if workers.size == 1:
            totals = _predict(job, images[first:], whole)
        elif first < len(images):
            ends = [first + (len(images) - first) * rank // workers.size for rank in range(workers.size + 1)]
            share = images[slice(*ends[workers.rank : workers.rank + 2])]
            part = open_file(_part(path, workers.rank),
                             f"{workers.rank} of {workers.size}, of images {first:,} to {len(images):,}")
            of_part = part.go_on(share)
            totals = _predict(job, share[of_part.records :], part)
            totals.bad_before += of_part.bad
            part.close()
    totals.bad_before += before.bad
    totals = totals.over(workers)
    with workers.agreement():
        if workers.rank == 0:
            if workers.size > 1 and first < len(images):
                whole.take_over([_part(path, rank) for rank in range(workers.size)])
            _summarise(path, totals, len(images))


def _part(path: Path, rank: int) -> Path:
    """What one of several processes writes."""
    return path.with_name(f"{path.stem}.part{rank}{path.suffix}")


def top_of(options: PredictOptions, trained: Checkpoint) -> int:
    """How many classes are given for an image: five by default, or all of a network that has fewer. Raises TrainError
    for more than it has."""
    if options.top > trained.num_classes and options.top != PredictOptions.top:
        raise TrainError(f"--top {options.top} is more than the {trained.num_classes} classes of {options.checkpoint}: "
                         "give at most that many")
    return min(options.top, trained.num_classes)


def _job(options: PredictOptions, values: Mapping[str, Any], workers: Workers) -> Job:
    for name in ("json", "contact_sheet"):
        if getattr(options, name):
            raise TrainError(f"{option_name(name)} is for predictions that are printed, and --output writes them to a "
                             "file: leave out one of the two")
    trained = weights.load(options.checkpoint, quiet=workers.rank > 0)
    if int8 := int8_file.load(options.checkpoint, trained) if options.int8 else None:
        trained = int8.prepared(trained)
    config = replace(trained.config, device=options.device, executor=options.executor, dtype="auto",
                     batch_size=options.batch_size)
    if int8:
        config = devices.for_int8(config, vars(options))
    placement = devices.choose(config, workers.local_rank)
    if placement.note and workers.rank == 0:
        print(placement.note, flush=True)
    if "batch_size" not in values and placement.device.startswith("gpu"):
        config = replace(config, batch_size=GPU_BATCH)
    options = replace(options, on_bad_image=values.get("on_bad_image", "skip"))
    return Job(options, trained, config, placement, top_of(options, trained), workers, int8)


def _about(job: Job) -> dict[str, Any]:
    """What the predictions are made with."""
    digest = hashlib.sha256(repr(job.trained.class_names).encode(errors="surrogateescape"))
    values = job.int8.params if job.int8 else job.trained.params | job.trained.aux
    for name, array in sorted(values.items()):
        digest.update(f"{name} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return {
        "numbers": "integers (--int8)" if job.int8 else "floats", "weights": digest.hexdigest(), "top": job.top,
        "image_size": job.config.inference_image_size,
        "checkpoint": job.options.checkpoint, "network": job.trained.network,
        "dtype": job.dtype, "command": command_line(),
        "version": environment.project_version(), "commit": environment.git_commit(),
    }


def _predict(job: Job, images: Sequence[str], file: PredictionFile) -> Totals:
    """Predict these images, in their order, and append them to the file. Raises UserError."""
    if not images:
        return Totals()
    pulse.show(Activity.VALIDATING)  # the first batch waits until the network is built, or compiled
    config = replace(job.config, batch_size=min(job.config.batch_size, len(images)))
    with _open_loader(job, config, images) as loader:
        executor = inference_executor(job.trained, job.int8, config, job.placement)
        return _write_all(job, executor, loader, images, file)


def _open_loader(job: Job, config: Config, images: Sequence[str]) -> DaliLoader:
    """As validation has it (`build.open_split`), of files."""
    settings = loader_settings(job.options, config, job.placement, job.workers)
    return open_files(images, config.inference_image_size, **settings)


def _write_all(job: Job, executor: Executor, loader: Loader, images: Sequence[str], file: PredictionFile) -> Totals:
    totals, batch_size = Totals(), loader.config.batch_size
    start, done = time.monotonic(), 0
    waiting: deque[Future[int]] = deque()
    take: Callable[[], None] | None = None  # of the batch before: it is fetched while the device computes
    with _Progress(len(images), job.workers) as progress, ThreadPoolExecutor(1) as writer:

        def hand_over(probabilities: np.ndarray, names: Sequence[str], good: Sequence[int],
                      bad: Mapping[int, str]) -> None:
            waiting.append(writer.submit(_write, file, job.top, probabilities, names, good, bad))
            while len(waiting) > WAITING_WRITES:
                finish_first()

        def finish_first() -> None:
            number = waiting[0].result()  # raises what the writer has raised
            waiting.popleft()
            progress.advance(number)

        def request(names: Sequence[str], good: Sequence[int], bad: Mapping[int, str]) -> Callable[[], None]:
            probabilities = executor.request_probabilities()
            return lambda: hand_over(finite(probabilities()[: len(good)], job.options), names, good, bad)

        try:
            for batch in loader:
                executor.infer(batch.data)
                names = images[done : done + batch_size]
                good = [i - done for i in batch.indices]
                bad = {i: loader.bad[done + i] for i in set(range(len(names))).difference(good)}
                take_next = request(names, good, bad)
                if take:
                    take()
                take, done = take_next, done + len(names)
                totals.good += len(good)
                pulse.show(Activity.LOADING)
        except DataError:
            if len(loader.bad) < len(images):  # else there is no readable image at all, which the file says
                raise
        if take:
            take()
        none = np.empty((0, job.trained.num_classes), np.float32)
        for begin in range(done, len(images), batch_size):
            names = images[begin : begin + batch_size]
            hand_over(none, names, [], {i: loader.bad[begin + i] for i in range(len(names))})
        while waiting:
            finish_first()
    totals.bad = len(images) - totals.good
    totals.seconds = time.monotonic() - start
    totals.damaged = len(loader.damaged)
    name_damaged(loader)
    return totals


def finite(probabilities: np.ndarray, options: PredictOptions) -> np.ndarray:
    """The same. Raises TrainError where some are no numbers, of which none is the largest."""
    if not np.isfinite(probabilities).all():
        raise TrainError(f"{options.checkpoint} gives probabilities that are no numbers: its weights are too large for "
                         "the precision that it computes in; give --device cpu, which computes in float32, or other "
                         "weights")
    return probabilities


def name_damaged(loader: Loader) -> None:
    """On stderr, the first of the images that were predicted though they are damaged."""
    damaged = loader.damaged_images
    for name, message in damaged[:NAMED]:
        print(f"{name}: {message}; predicted as it decodes", file=sys.stderr)
    if len(damaged) > NAMED:
        print(f"and {len(damaged) - NAMED:,} more such images", file=sys.stderr)


def _write(file: PredictionFile, top: int, probabilities: np.ndarray, names: Sequence[str], good: Sequence[int],
           bad: Mapping[int, str]) -> int:
    """Append the records of a batch; how many they are. `probabilities`: of the `good` ones of the images, in order."""
    form = file.form
    records = [form.failure(name, bad[i]) if i in bad else "" for i, name in enumerate(names)]
    if len(good):
        classes, best = most_likely(probabilities, top)
        for i, indices, values in zip(good, classes.tolist(), best.tolist(), strict=True):
            records[i] = form.prediction(names[i], indices, values)
    file.write(records)
    return len(records)


class _Progress:
    """Images done, images/sec and time left, on stderr: a bar on a terminal, else a line now and then; of process 0,
    for its share."""

    def __init__(self, total: int, workers: Workers) -> None:
        self._total, self._enabled = total, workers.rank == 0
        self._bar = progress_bar(transient=True)
        self._bar.disable |= not self._enabled
        share = f" (process 0 of {workers.size})" if workers.size > 1 else ""
        self._what = f"images{share}"
        self._task = self._bar.add_task(f"predicting{share}", total=total)
        self._done = 0
        self._start = self._said = time.monotonic()

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, number: int) -> None:
        self._done += number
        self._bar.advance(self._task, number)
        now = time.monotonic()
        if self._enabled and self._bar.disable and now - self._said >= LOG_SECONDS:
            self._said = now
            rate = self._done / (now - self._start)
            left = timedelta(seconds=round((self._total - self._done) / rate))
            print(f"{self._done:,} of {self._total:,} {self._what}, {rate:,.0f} images/sec, {left} left",
                  file=sys.stderr, flush=True)


def _summarise(path: Path, totals: Totals, num_images: int) -> None:
    if count := totals.good + totals.bad:
        damaged = f", {totals.damaged:,} of them damaged" if totals.damaged else ""
        print(f"{path}: {count:,} image{'s' * (count > 1)} in {timedelta(seconds=round(totals.seconds))}, "
              f"{count / totals.seconds:,.1f} images/sec{damaged}")
    else:
        print(f"{path}: complete, nothing was left to do")
    bad = totals.bad_before + totals.bad
    if bad == num_images:
        raise TrainError(f"no image of {num_images:,} can be read; {path} has the reason of each")
    if bad:
        earlier = f" ({totals.bad_before:,} of them found earlier)" if totals.bad_before else ""
        print(f"{bad:,} of {num_images:,} images cannot be read{earlier}: {path} has the reason of each",
              file=sys.stderr)
