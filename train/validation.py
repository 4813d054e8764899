"""Validation: what a network makes of a whole split, over all processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from common.errors import UserError
from graph_passes.executors import Executor, Metrics
from pipelines import Batch, Loader
from train.processes.distributed import Workers
from train.processes.pulse import Activity, pulse
from train.recording.outcomes import Outcomes
from train.recording.recorder import LONGEST_SILENCE


class Validation(NamedTuple):
    """What a network makes of a whole split, over all processes."""

    metrics: Metrics
    outcomes: Outcomes


def validate(
    executor: Executor, loader: Loader, workers: Workers, stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] | None = None,
) -> Validation | None:
    """Validate on a whole split, with BatchNorm's statistics as they are, the same in all processes.

    None where `stop`, which is asked after each batch, has said so on any of the processes. `progress` is told how many
    batches have been begun. Raises UserError, on all of them, where one cannot load or evaluate a batch.
    """
    pulse.show(Activity.VALIDATING)  # the first batch may wait until the network is compiled for it
    batches, is_over = iter(loader), False
    problem: UserError | None = None
    found: list[Outcomes] = []
    take: Callable[[], Outcomes] | None = None  # of the batch before: the host counts while the device computes
    for number in range(1, loader.num_batches + 1):  # on each process as many: they vote after each
        if not problem:
            try:
                batch = next(batches)
                executor.infer(batch.data, batch.label, batch.num_valid)
                take_next = _request_outcomes(executor, batch)
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
    pulse.show(Activity.VALIDATING)  # what the device has not done yet
    with workers.agreement():
        if problem:
            raise problem
        found += [take()] if take else []  # waits for the device, which may fail too
        metrics = executor.read_metrics()
    if is_over:
        return None
    next(batches, None)  # the loader's epoch ends
    return Validation(Metrics(*workers.sum(metrics)), Outcomes.together(workers.gather(Outcomes.together(found))))


def printed_progress(total: int) -> Callable[[int], None]:
    """For `validate`: prints how many of the batches have been begun, where that has not been told for long."""
    last = time.monotonic()

    def tell(done: int) -> None:
        nonlocal last
        if time.monotonic() - last > LONGEST_SILENCE:
            print(f"validation: batch {done} of {total}", flush=True)
            last = time.monotonic()

    return tell


def _request_outcomes(executor: Executor, batch: Batch) -> Callable[[], Outcomes]:
    """Those of the batch that has just been evaluated; what is returned waits for them."""
    probabilities, count = executor.request_probabilities(), batch.num_valid
    return lambda: Outcomes.of(probabilities()[:count], batch.label.asnumpy()[:count], batch.indices)
