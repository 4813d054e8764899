"""All options of training, combined from the classes of options by subject."""

from __future__ import annotations

from dataclasses import dataclass

from train.options import data, network, optimizer, run


# A dataclass takes its fields from the last base class first.
@dataclass(frozen=True)
class TrainingOptions(
    run.PluginOptions,
    run.LogOptions,
    run.CheckpointOptions,
    run.ElasticOptions,
    run.DistributedOptions,
    optimizer.ScheduleOptions,
    optimizer.OptimizerOptions,
    data.CacheOptions,
    data.LoaderOptions,
    data.InferenceImageOptions,
    data.ResizingOptions,
    data.ImageOptions,
    data.BatchOptions,
    network.FineTuningOptions,
    network.DroppingOptions,
    network.NetworkOptions,
    run.DeviceOptions,
    run.StoppingOptions,
    data.DataOptions,
    run.RunOptions,
):
    """All options of a training run, except those of its starting point."""


LIMITS = data.LIMITS | network.LIMITS | optimizer.LIMITS | run.LIMITS
