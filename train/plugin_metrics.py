"""Computes the metrics of plug-ins in a validation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common import plugins
from common.plugins import Registered
from train.errors import TrainError
from train.processes.distributed import Workers


class PluginMetrics:
    """Sums the values that the metrics return for each image; called with each batch of a validation
    (`validation.Each`)."""

    def __init__(self, records: Sequence[str]) -> None:
        """`records`: the plug-ins of the run."""
        self._metrics = plugins.active("metric", records)
        self.begin()

    def begin(self) -> None:
        """Start a validation."""
        self._sums = np.zeros(len(self._metrics))

    def __call__(self, probabilities: np.ndarray, labels: np.ndarray, images: Sequence[int]) -> None:
        """Add a batch: probabilities (N, C), labels (N,). Raises UserError if a metric fails or does not return
        numbers."""
        if self._metrics and len(labels):
            whole = labels.astype(np.int64)
            self._sums += [_sum(each, probabilities, whole) for each in self._metrics]

    def means(self, workers: Workers, num_images: float) -> dict[str, float]:
        """The means over all images of all processes, by the metrics' names; a collective operation."""
        totals = workers.sum(self._sums.tolist()) if self._metrics else []
        return {each.name: total / num_images for each, total in zip(self._metrics, totals, strict=True)}


def _sum(metric: Registered, probabilities: np.ndarray, labels: np.ndarray) -> float:
    values = np.asarray(plugins.call(metric, probabilities.copy(), labels.copy()))
    if values.shape != labels.shape or values.dtype.kind not in "biuf":
        raise TrainError(f"the metric {metric.name} ({metric.place}) returned {values.dtype} {values.shape} for "
                         f"{len(labels)} images: return {labels.shape}, a number for each image")
    return float(values.sum(dtype=np.float64))
