"""Validation of a network on a whole split, over all processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from common import plugins
from common.errors import UserError
from common.plugins import Registered
from graph_passes.executors import Executor, Metrics
from pipelines import Batch, Loader
from train.errors import TrainError
from train.processes.distributed import Workers
from train.processes.pulse import Activity, pulse
from train.recording.outcomes import Outcomes
from train.recording.recorder import LONGEST_SILENCE


class Validation(NamedTuple):
    """The results of a validation on a whole split, over all processes."""

    metrics: Metrics
    outcomes: Outcomes
    of_plugins: dict[str, float]  # the means of the plug-ins' metrics, by name


class _Found(NamedTuple):
    """The results of a batch."""

    outcomes: Outcomes
    of_plugins: np.ndarray  # (metrics,) float64, sums over the images


def validate(
    executor: Executor, loader: Loader, workers: Workers, stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] | None = None, of_plugins: Sequence[Registered] = (),
) -> Validation | None:
    """Validate on a whole split, with BatchNorm's statistics as they are; they must be equal in all processes.

    `stop` is called after each batch; None is returned if it was true on any process. `progress` gets the number of
    batches begun. `of_plugins`: further metrics. Raises UserError, on all processes, if one cannot load or evaluate a
    batch.
    """
    pulse.show(Activity.VALIDATING)  # the first batch may wait for compilation
    batches, is_over = iter(loader), False
    problem: UserError | None = None
    found: list[_Found] = []
    # fetches the previous batch's outcomes; the host counts while the device computes
    take: Callable[[], _Found] | None = None
    for number in range(1, loader.num_batches + 1):  # equal on all processes, because they vote after each batch
        if not problem:
            try:
                batch = next(batches)
                executor.infer(batch.data, batch.label, batch.num_valid)
                take_next = _request_outcomes(executor, batch, of_plugins)
                found += [take()] if take else []
                take = take_next
            except UserError as error:
                problem = error
            pulse.show(Activity.LOADING)
        (is_over,) = workers.vote([problem is not None or stop()], "validation")
        if progress:
            progress(number)
        if is_over:
            break
    pulse.show(Activity.VALIDATING)  # waits for the device's remaining work
    with workers.agreement():
        if problem:
            raise problem
        found += [take()] if take else []  # waits for the device, which may fail
        metrics = executor.read_metrics()
    if is_over:
        return None
    next(batches, None)  # ends the loader's epoch
    sums = Metrics(*workers.sum(metrics))
    totals = workers.sum(np.sum([each.of_plugins for each in found], axis=0)) if of_plugins else []
    return Validation(sums, Outcomes.together(workers.gather(Outcomes.together([each.outcomes for each in found]))),
                      {each.name: total / sums.count for each, total in zip(of_plugins, totals, strict=True)})


def printed_progress(total: int) -> Callable[[int], None]:
    """A `progress` for `validate`: prints the number of batches begun, if the last such line is long ago."""
    last = time.monotonic()

    def tell(done: int) -> None:
        nonlocal last
        if time.monotonic() - last > LONGEST_SILENCE:
            print(f"validation: batch {done} of {total}", flush=True)
            last = time.monotonic()

    return tell


def _request_outcomes(executor: Executor, batch: Batch, of_plugins: Sequence[Registered]) -> Callable[[], _Found]:
    """Request the outcomes of the batch just evaluated; the returned function waits for them. Raises UserError."""
    probabilities, count = executor.request_probabilities(), batch.num_valid

    def take() -> _Found:
        of_images, labels = probabilities()[:count], batch.label.asnumpy()[:count]
        sums = [_sum(each, of_images, labels.astype(np.int64)) for each in of_plugins]
        return _Found(Outcomes.of(of_images, labels, batch.indices), np.array(sums, np.float64))

    return take


def _sum(metric: Registered, probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The sum of a plug-in's metric over the images of a batch. Raises UserError if it is no metric."""
    values = np.asarray(plugins.call(metric, probabilities.copy(), labels))
    if values.shape != labels.shape or values.dtype.kind not in "biuf":
        raise TrainError(f"the metric {metric.name} ({metric.place}) returned {values.dtype} {values.shape} for "
                         f"{len(labels)} images: return {labels.shape}, a number for each image")
    return float(values.sum(dtype=np.float64))
