"""Learning rate by optimizer step and image size by epoch. Both are pure functions, so a resumed run needs no state for
them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from common import plugins
from common.plugins import Registered
from train.config import Config
from train.errors import TrainError
from train.options.optimizer import REFERENCE_BATCH

IMAGE_SIZE_STEP = 32  # pixels; the network halves the image five times


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `peak`, then `kind` until `total_steps`. Times are in optimizer steps, counted from 0.

    Warm-up: peak * (step + 1) / warmup_steps (after Goyal et al., arXiv:1706.02677, section 2.2, but from 0). With p =
    the fraction of the steps after the warm-up that are done: cosine: final + (peak - final) * (1 + cos(pi p)) / 2
    (Loshchilov and Hutter, arXiv:1608.03983, without restarts); polynomial: final + (peak - final) * (1 - p) ** power;
    step: peak * factor ** (number of `milestones` reached, counted from the start of the run); of a plug-in: peak *
    function(p).
    """

    kind: str
    peak: float
    total_steps: int
    warmup_steps: int = 0
    final: float = 0.0
    power: float = 2.0
    milestones: tuple[int, ...] = ()
    factor: float = 0.1
    of_plugin: Registered | None = None  # schedule of a plug-in, used in place of `kind`

    def __call__(self, step: int) -> float:
        """The learning rate of optimizer step `step`."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        if self.of_plugin:
            return self.peak * _factor(self.of_plugin, done)
        if self.kind == "cosine":
            return self.final + (self.peak - self.final) * (1 + math.cos(math.pi * done)) / 2
        if self.kind == "polynomial":
            return self.final + (self.peak - self.final) * (1 - done) ** self.power
        if self.kind == "step":
            return self.peak * self.factor ** sum(step >= milestone for milestone in self.milestones)
        raise ValueError(f"unknown schedule {self.kind!r}")


def _factor(schedule: Registered, progress: float) -> float:
    """The factor from a plug-in's schedule. Raises UserError if it is invalid."""
    factor = plugins.call(schedule, progress)
    if not isinstance(factor, (int, float, np.floating)) or not 0 <= factor < math.inf:
        raise TrainError(f"the schedule {schedule.name} ({schedule.place}) gives {factor!r} for the progress "
                         f"{progress:g}: return a factor of the learning rate, 0 or more", on_all_ranks=True)
    return float(factor)


def make_schedule(config: Config, steps_per_epoch: int, num_processes: int) -> Schedule:
    """The schedule of a run. Learning rates are scaled linearly with the global batch (Goyal et al., section 2.1).

    Raises UserError if a plug-in's schedule fails.
    """
    scale = config.global_batch(num_processes) / REFERENCE_BATCH
    of_plugin = plugins.find("schedule", config.schedule)
    if of_plugin:
        for percent in range(101):  # evaluated over the whole range, so that a faulty schedule fails before training
            _factor(of_plugin, percent / 100)
    return Schedule(
        kind=config.schedule,
        peak=config.learning_rate * scale,
        total_steps=config.epochs * steps_per_epoch,
        warmup_steps=round(config.warmup_epochs * steps_per_epoch),
        final=config.final_learning_rate * scale,
        power=config.decay_power,
        milestones=tuple(round(epoch * steps_per_epoch) for epoch in config.decay_epochs),
        factor=config.decay_factor,
        of_plugin=of_plugin,
    )


def image_size_in(config: Config, epoch: int) -> int:
    """Height and width of the training images in an epoch, in pixels.

    Progressive resizing, as in libffcv/ffcv-imagenet: first_image_size until the first epoch in resize_epochs, then a
    linear rise, rounded to multiples of 32, to image_size at the second epoch in resize_epochs.
    """
    small, large = config.first_image_size or config.image_size, config.image_size
    start, end = config.resize_epochs
    if epoch >= end:
        return large
    if epoch <= start:
        return small
    exact = small + (large - small) * (epoch - start) / (end - start)
    return min(max(IMAGE_SIZE_STEP * round(exact / IMAGE_SIZE_STEP), small), large)


def image_sizes(config: Config) -> tuple[int, ...]:
    """Height and width of the training images in each epoch, in pixels."""
    return tuple(image_size_in(config, epoch) for epoch in range(config.epochs))
