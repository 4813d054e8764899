"""The main figures of a run, computed from its `RunRecord`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from train.errors import TrainError
from train.recording.metrics import IMAGES, EpochRow, RunRecord, Speed, interval

WAIT_SHARE_THAT_LIMITS = 0.1  # share of the step time; used only if the speed of the loader alone is unknown


@dataclass(frozen=True)
class Summary:
    """The main figures of a report. Throughputs are images/sec (words/sec for a language model) of all processes
    together, without warm-up.

    Total: steps from requesting the batch to updated parameters. Compute-only: steps without waiting for batches.
    Loader-only: the loader running alone. Whole run: all images divided by the whole time, validation included. The
    GPUs' figures are means over the steps that count; None stands for unknown.
    """

    total: Speed
    total_median: float
    total_spread: float  # spread of the total throughput: half the interquartile range of the steps' speeds
    compute_images_per_sec: float
    loader_images_per_sec: float | None
    whole_run_images_per_sec: float
    loader_wait_share: float  # waits for the loader, as a share of the time of the counted steps
    num_steps_counted: int
    num_steps_warmup: int
    limit: str  # "loader" or "computation"
    limit_text: str
    time_split_seconds: dict[str, float]
    # the epoch whose weights are kept: the highest top-1 in validation, or on the training images if there is no
    # validation
    best: EpochRow | None
    best_interval: tuple[float, float] | None  # 95 % interval of the best top-1; None: the number of images is unknown
    gpu_power: float | None  # W, all GPUs together
    gpu_utilization: float | None  # fraction of the time in which a kernel ran
    gpu_memory: float | None  # GiB; the maximum in use on a GPU
    gpu_clock: float | None  # MHz of the multiprocessors
    gpu_power_capped: float | None  # fraction of the time in which the power limit held the clock down
    joules_per_image: float | None  # energy of the GPUs in training steps, J per image
    price: float | None  # price of the run so far, in the currency of --price-per-hour


def summarize(record: RunRecord) -> Summary:
    """Compute the figures of a run. Raises TrainError for a run without a single step."""
    if not record.step_ms:
        raise TrainError(f"the run '{record.command}' has no finished step to report on: let it run longer")
    counted = record.counted_steps
    step_ms = np.asarray(record.step_ms)[counted]
    wait_ms = np.asarray(record.loader_wait_ms)[counted]
    compute_ms = np.asarray(record.compute_ms)[counted]
    images = record.images[counted]
    speeds = images / (step_ms / 1e3)
    quartile1, median, quartile3 = np.percentile(speeds, (25, 50, 75))
    compute = images.mean() / (compute_ms.mean() / 1e3)
    wait_share = float(wait_ms.sum() / step_ms.sum())
    limit, text = what_limits(compute, record.loader_images_per_sec, wait_share, record.examples)
    split = {
        "computation": sum(record.compute_ms) / 1e3,
        "waiting for the loader": sum(record.loader_wait_ms) / 1e3,
        **record.phase_seconds,
    }
    known = sum(split.values())
    split["set-up and other"] = max(sum(record.start_seconds.values()) + record.seconds - known, 0.0)
    best = record.best.evaluation if record.best else None
    return Summary(
        total=record.speed(),
        total_median=float(median),
        total_spread=float(quartile3 - quartile1) / 2,
        compute_images_per_sec=float(compute),
        loader_images_per_sec=record.loader_images_per_sec,
        whole_run_images_per_sec=float(record.images.sum()) / record.seconds,
        loader_wait_share=wait_share,
        num_steps_counted=len(counted),
        num_steps_warmup=len(record.step_ms) - len(counted),
        limit=limit,
        limit_text=text,
        time_split_seconds=split,
        best=record.best,
        best_interval=interval(best.top1, best.num_images) if best and best.num_images else None,
        **_gpu_figures(record),
        price=record.price,
    )


def _gpu_figures(record: RunRecord) -> dict[str, float | None]:
    """The fields of `Summary` on GPUs."""
    step_ms, counted = np.asarray(record.step_ms), np.zeros(len(record.step_ms), dtype=bool)
    counted[record.counted_steps] = True
    # Each point is a mean over the steps since the previous point, and is weighted by their time.
    ends = [point.step - record.steps_before for point in record.gpu_curve]
    parts = [np.arange(start, end)[counted[start:end]] for start, end in itertools.pairwise([0, *ends])]
    seconds = np.array([step_ms[part].sum() / 1e3 for part in parts])
    of_steps = record.images
    images = np.array([of_steps[part].sum() for part in parts])
    readings = [(p.power, p.utilization, p.memory, p.clock, p.power_capped) for p in record.gpu_curve]
    power, utilization, memory, clock, capped = np.array(readings, dtype=float).reshape(-1, 5).T  # None becomes NaN

    def total_per(values: np.ndarray, weights: np.ndarray) -> float | None:
        known = ~np.isnan(values)
        return float((values * seconds)[known].sum() / weights[known].sum()) if weights[known].any() else None

    return {
        "gpu_power": total_per(power, seconds),
        "gpu_utilization": total_per(utilization, seconds),
        "gpu_memory": None if np.isnan(memory).all() else float(np.nanmax(memory)),
        "gpu_clock": total_per(clock, seconds),
        "gpu_power_capped": total_per(capped, seconds),
        "joules_per_image": total_per(power, images),
    }


def what_limits(compute: float, loader: float | None, wait_share: float,
                examples: str = IMAGES) -> tuple[str, str]:
    """Whether the loader or the computation is slower, and a sentence on it."""
    waiting = f"steps spend {wait_share:.1%} of their time waiting for a batch"
    if loader is None:
        if wait_share > WAIT_SHARE_THAT_LIMITS:
            return "loader", f"The loader limits this run: {waiting}."
        return "computation", f"Computation limits this run: {waiting}."
    if loader < compute:
        advice = " More loader threads, images resized on disk or GPU decoding would help." * (examples == IMAGES)
        return "loader", (
            f"The loader limits this run: alone it delivers {loader:,.1f} {examples}/sec, and the computation could "
            f"take {compute:,.1f}; {waiting}.{advice}"
        )
    times = loader / compute
    return "computation", (
        f"Computation limits this run: alone it makes {compute:,.1f} {examples}/sec, and the loader alone "
        f"delivers {loader:,.1f}, {f'{times:,.0f}' if times > 10 else f'{times:.1f}'} times as many; {waiting}."
    )
