"""All options of training, put together from those of its subjects."""

from __future__ import annotations

from dataclasses import dataclass

from train.options import data, network, optimizer, run


# A dataclass has the fields of its last base first.
@dataclass(frozen=True)
class TrainingOptions(
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
    run.LengthOptions,
    data.DataOptions,
    run.RunOptions,
):
    """What a training run is, wherever it begins."""


LIMITS = data.LIMITS | network.LIMITS | optimizer.LIMITS | run.LIMITS
