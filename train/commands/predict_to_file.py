"""Predictions of any number of images, written to a file batch by batch; several processes share the images.

Decoding (DALI), the network, and writing the most likely classes overlap: each works on a different batch. A batch is
freed as soon as its predictions are written.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import environment
from common.command_line import option_name
from graph_passes.executors import Executor
from pipelines import DataError, Loader, open_files
from pipelines.progress import progress_bar
from pipelines.sources.folders import some
from train.build import inference_executor, loader_settings, network_dtype
from train.checkpoint import Checkpoint
from train.commands.prediction_file import Found, PredictionFile, check_name
from train.config import Config
from train.devices import Placement
from train.errors import TrainError
from train.image_paths import FolderClasses, image_paths
from train.options.commands import PredictOptions
from train.prediction import GPU_BATCH, check_top, finite, prepared
from train.processes.distributed import Workers
from train.processes.invocation import command_line
from train.processes.pulse import Activity, pulse
from train.processes.signals import ending_with
from train.ranking import most_likely
from train.weights.int8_file import Int8Network

WAITING_WRITES = 4  # batches whose predictions may wait to be written
LOG_SECONDS = 30.0  # seconds between two lines of progress if no terminal shows a bar
NAMED = 5  # damaged images named on stderr

# Keys of the JSON file beside the predictions whose values must be equal to resume a file, with their names in
# messages.
SAME = {"numbers": "kind of numbers", "weights": "network, by the SHA-256 of its weights", "top": "--top",
        "image_size": "image size", "part": "share of the images"}


class Job(NamedTuple):
    """The arguments of a process that predicts."""

    options: PredictOptions
    trained: Checkpoint
    config: Config
    placement: Placement
    top: int
    workers: Workers
    int8: Int8Network | None  # if given, used in place of the float network


class Totals(NamedTuple):
    """Numbers of images: predicted by this session, unreadable, damaged, and unreadable in earlier sessions; and the
    session's seconds."""

    good: int = 0
    bad: int = 0
    damaged: int = 0
    bad_before: int = 0
    seconds: float = 0.0


def predict_to_file(options: PredictOptions, values: Mapping[str, Any], workers: Workers) -> None:
    """Predict and write `options.output`. `values`: the options given on the command line. Raises UserError and
    StoppedBySignal."""
    path = Path(options.output)
    with ending_with(f"stopped: the same command goes on where {path} ends"), ExitStack() as opened:

        def open_file(path: Path, share: str, images: Sequence[str]) -> tuple[PredictionFile, Found]:
            file = PredictionFile(path, job.trained.class_names, job.top, about | {"part": share}, SAME, has_true)
            found = opened.enter_context(file).resume(images)
            if changed := file.changed(images[: found.records]):
                print(f"{path}: {len(changed):,} of its images changed after it was begun, so their predictions may "
                      f"be of the old images: {some(changed)} (give another --output to predict all anew)",
                      file=sys.stderr)
            return file, found

        images, before, has_true = [], Found(0, 0), False
        with workers.agreement():
            check_name(path)
            job = _job(options, values, workers)
            about = _about(job)
            folders = FolderClasses(options.images, job.trained.classes)
            if workers.rank == 0:
                images = [str(image) for image in image_paths(options.images)]
                has_true = any(map(folders.of, images))
                whole, before = open_file(path, "all", images)
                if before.records:
                    print(f"{path} has {before.records:,} of {len(images):,} images", flush=True)
        # all processes use the list of process 0, because the contents of a folder may change
        images, first, has_true = workers.gather((images, before.records, has_true))[0]
        parts: list[Path] = []
        with workers.agreement():
            if workers.size == 1 or first == len(images):
                totals = _predict(job, images[first:], whole, folders) if workers.rank == 0 else Totals()
            else:
                parts = [path.with_name(f"{path.stem}.part{rank}{path.suffix}") for rank in range(workers.size)]
                begin, end = (first + (len(images) - first) * rank // workers.size
                              for rank in (workers.rank, workers.rank + 1))
                part, found = open_file(parts[workers.rank], f"{workers.rank} of {workers.size}, of images {first:,} "
                                        f"to {len(images):,}", images[begin:end])
                totals = _predict(job, images[begin + found.records : end], part, folders)
                totals = totals._replace(bad_before=found.bad)
                part.close()
        *counts, seconds = zip(*workers.gather(totals), strict=True)
        good, bad, damaged, bad_before = map(sum, counts)
        with workers.agreement():
            if workers.rank == 0:
                whole.take_over(parts)
                _summarise(path, Totals(good, bad, damaged, bad_before + before.bad, max(seconds)), len(images))


def top_of(options: PredictOptions, trained: Checkpoint) -> int:
    """The number of classes listed for an image, see `check_top`."""
    return check_top(options.top, trained.num_classes, options.checkpoint)


def prepare(options: PredictOptions, workers: Workers) -> Job:
    """Read the weights and choose the device. Raises UserError."""
    trained, config, placement, int8 = prepared(options, workers)
    return Job(options, trained, config, placement, top_of(options, trained), workers, int8)


def _job(options: PredictOptions, values: Mapping[str, Any], workers: Workers) -> Job:
    for name in ("json", "contact_sheet"):
        if getattr(options, name):
            raise TrainError(f"{option_name(name)} is for predictions that are printed, and --output writes them to a "
                             "file: leave out one of the two")
    job = prepare(replace(options, on_bad_image=values.get("on_bad_image", "skip")), workers)
    if job.placement.note and workers.rank == 0:
        print(job.placement.note, flush=True)
    if "batch_size" not in values and job.placement.device.startswith("gpu"):
        job = job._replace(config=replace(job.config, batch_size=GPU_BATCH))
    return job


def _about(job: Job) -> dict[str, Any]:
    """The content of the JSON file beside the predictions: the settings that produced the predictions."""
    digest = hashlib.sha256(repr(job.trained.class_names).encode(errors="surrogateescape"))
    values = job.int8.params if job.int8 else job.trained.params | job.trained.aux
    for name, array in sorted(values.items()):
        digest.update(f"{name} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return {
        "numbers": "integers (--int8)" if job.int8 else "floats", "weights": digest.hexdigest(), "top": job.top,
        "image_size": job.config.inference_image_size,
        "checkpoint": job.options.checkpoint, "network": job.trained.network, "command": command_line(),
        "dtype": "int8" if job.int8 else network_dtype(job.config, job.placement),
        "version": environment.project_version(), "commit": environment.git_commit(),
    }


def _predict(job: Job, images: Sequence[str], file: PredictionFile, folders: FolderClasses) -> Totals:
    """Predict the classes of these images, and append the predictions to the file in the order of the images. Raises
    UserError.
    """
    if not images:
        return Totals()
    pulse.show(Activity.VALIDATING)  # the first batch waits for the network to be built or compiled
    size = min(job.config.batch_size, len(images))
    config = replace(job.config, batch_size=size)
    settings = loader_settings(job.options, config, job.placement, job.workers)
    waiting: deque[Future[int]] = deque()
    with open_files(images, config.inference_image_size, **settings) as loader:
        executor = inference_executor(job.trained, job.int8, config, job.placement)
        start, good = time.monotonic(), 0
        with _progress(len(images), job.workers) as advance, ThreadPoolExecutor(1) as writer:

            def write(begin: int, indices: Sequence[int], probabilities: np.ndarray) -> int:
                """Append a batch's records, and return their number. `indices`: the readable images of the batch."""
                classes, best = most_likely(probabilities, job.top)
                known = {i: file.form.prediction(images[i], ranked, values, folders.of(images[i])) for i, ranked, values
                         in zip(indices, classes.tolist(), best.tolist(), strict=True)}
                batch = range(begin, min(begin + size, len(images)))
                file.write([known.get(i) or file.form.failure(
                    images[i], loader.bad[i], folders.of(images[i])) for i in batch])
                return len(batch)

            for begin, indices, request in _requests(executor, loader, len(images)):
                probabilities = finite(request()[: len(indices)], job.options.checkpoint)
                waiting.append(writer.submit(write, begin, indices, probabilities))
                good += len(indices)
                while len(waiting) > WAITING_WRITES:
                    advance(waiting.popleft().result())  # `result()` raises the exception of a failed write
            while waiting:
                advance(waiting.popleft().result())
        name_damaged(loader.damaged_images)
        return Totals(good, len(images) - good, len(loader.damaged), 0, time.monotonic() - start)


def _requests(executor: Executor, loader: Loader,
              num_images: int) -> Iterator[tuple[int, Sequence[int], Callable[[], np.ndarray]]]:
    """For each batch: the number of its first image, its readable images, and a function that fetches their
    probabilities. A batch is yielded only after the device has begun the next batch.
    """
    begin, size = 0, loader.config.batch_size
    requested: list[tuple[int, Sequence[int], Callable[[], np.ndarray]]] = []
    try:
        for batch in loader:
            executor.infer(batch.data)
            requested.append((begin, batch.indices, executor.request_probabilities()))
            begin += size
            if len(requested) == 2:
                yield requested.pop(0)
            pulse.show(Activity.LOADING)
    except DataError:
        if len(loader.bad) < num_images:  # otherwise no image is readable, which every record of the file then states
            raise
    yield from requested
    for rest in range(begin, num_images, size):  # the remaining images are all unreadable
        yield rest, (), lambda: np.empty((0, 1), np.float32)


def name_damaged(damaged: Sequence[tuple[str, str]]) -> None:
    """Print the first of the images (file, decoder's message) that were used although damaged, on stderr."""
    for name, message in damaged[:NAMED]:
        print(f"{name}: {message}; used as it decodes", file=sys.stderr)
    if len(damaged) > NAMED:
        print(f"and {len(damaged) - NAMED:,} more such images", file=sys.stderr)


@contextmanager
def _progress(total: int, workers: Workers) -> Iterator[Callable[[int], None]]:
    """Show images done, images/sec and time left on stderr: a bar on a terminal, otherwise lines at intervals.
    Process 0 shows its own share."""
    share = f" (process 0 of {workers.size})" if workers.size > 1 else ""
    done, start = 0, time.monotonic()
    said = start

    def advance(number: int) -> None:
        nonlocal done, said
        done += number
        bar.advance(task, number)
        now = time.monotonic()
        if bar.disable and workers.rank == 0 and now - said >= LOG_SECONDS:
            said, rate = now, done / (now - start)
            print(f"{done:,} of {total:,} images{share}, {rate:,.0f} images/sec, "
                  f"{timedelta(seconds=round((total - done) / rate))} left", file=sys.stderr, flush=True)

    bar = progress_bar(transient=True)
    bar.disable |= workers.rank > 0
    task = bar.add_task(f"predicting{share}", total=total)
    with bar:
        yield advance


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
