"""Validation of a network on a whole split, over all processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from common.errors import UserError
from common.phases import VALIDATION, phase
from graph_passes.executors import Executor, Metrics
from pipelines import Batch, Loader
from train.processes.distributed import Workers
from train.processes.pulse import Activity, pulse
from train.recording.outcomes import Outcomes, spread
from train.recording.recorder import LONGEST_SILENCE

# receives a batch's probabilities (N, classes), labels (N,) and indices in the split (N, or empty)
Each = Callable[[np.ndarray, np.ndarray, Sequence[int]], None]


class Validation(NamedTuple):
    """The results of a validation on a whole split, over all processes."""

    metrics: Metrics
    outcomes: Outcomes


@phase(VALIDATION)
def validate(
    executor: Executor, loader: Loader, workers: Workers, stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] | None = None, each: Each | None = None,
) -> Validation | None:
    """Validate on a whole split, with BatchNorm's present running statistics, which must be equal in all processes.

    `stop` is called after each batch; None is returned if `stop` was true on any process. `progress` gets the number of
    batches begun; `each` gets the network's results for every batch of this process. Raises UserError, on all
    processes, if one process cannot load or evaluate a batch.
    """
    pulse.show(Activity.VALIDATING)  # the first batch may wait for compilation
    batches, is_over = iter(loader), False
    problem: UserError | None = None
    found: list[Outcomes] = []
    # fetches the previous batch's outcomes; the host counts while the device computes
    take: Callable[[], Outcomes] | None = None
    sampled = spread(loader.num_images)
    # the number of batches is equal in all processes, because the processes vote after each batch
    for number in range(1, loader.num_batches + 1):
        if not problem:
            try:
                batch = next(batches)
                executor.infer(batch.data, batch.label, batch.num_valid)
                take_next = _request_outcomes(executor, batch, sampled, each)
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
    next(batches, None)  # this call ends the loader's epoch
    return Validation(Metrics(*workers.sum(metrics)), Outcomes.together(workers.gather(Outcomes.together(found))))


def printed_progress(total: int) -> Callable[[int], None]:
    """A `progress` for `validate`: prints the number of batches begun, if the previous line of this kind is some time
    ago.
    """
    last = time.monotonic()

    def tell(done: int) -> None:
        nonlocal last
        if time.monotonic() - last > LONGEST_SILENCE:
            print(f"validation: batch {done} of {total}", flush=True)
            last = time.monotonic()

    return tell


def _request_outcomes(executor: Executor, batch: Batch, sampled: Sequence[int],
                      each: Each | None) -> Callable[[], Outcomes]:
    """Request the outcomes of the batch just evaluated; the returned function waits for them."""
    request, count = executor.request_probabilities(), batch.num_valid

    def take() -> Outcomes:
        probabilities, labels = request()[:count], batch.label.asnumpy()[:count]
        if each:
            each(probabilities, labels, batch.indices)
        return Outcomes.of(probabilities, labels, batch.indices, sampled)

    return take
