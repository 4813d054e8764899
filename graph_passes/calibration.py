"""Calibration: the range that INT8 must resolve in each tensor, from the tensor's values for some images.

    names = observed(folded(graph))
    found = Calibration(names)
    for images in batches:
        found.add(tensors(images))          # by these names, from whatever executor
    scales = found.scales("entropy")        # for `passes/quantise.py`

A limit is the largest absolute value that is not clipped. A small limit resolves finely; a large one clips little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np

from graph_passes import passes, pipeline
from graph_passes.errors import GraphError
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import is_relu
from graph_passes.operators.quantised import LARGEST

Method = Literal["max", "percentile", "entropy"]
METHODS: tuple[str, ...] = get_args(Method)
PERCENTILE = 99.99  # the method "percentile" leaves this percentage of the absolute values unclipped
NUM_BINS = 2048  # bins of a histogram (128 levels for entropy): Migacz, '8-bit Inference with TensorRT', GTC 2017
_LEVELS = LARGEST + 1
_STEP = 8  # step, in bins, between the limits tried for entropy: 0.4 % of the range
# Operators whose output may become int8, in a graph of `folded`.
_OBSERVED = ("Convolution", "AddRelu", "Pooling", "Flatten", "BatchNormRelu", "elemwise_add", "clip")

_LAYERS = ("Convolution", "FullyConnected")  # operators whose input becomes int8


def folded(graph: Graph) -> Graph:
    """The network for inference, with BatchNorm folded. Its tensors have the same names as in
    `pipeline.quantised_passes`.
    """
    return pipeline.run({**pipeline.FUSED, "fold_bn": passes.fold_bn}, passes.remove_dropout(graph))


def observed(graph: Graph) -> list[str]:
    """Names of the tensors of a folded graph that may become int8 here or in the graph's ONNX form."""
    return ["data", *(node.name for node in graph if not node.is_variable and (
        node.op in _OBSERVED or is_relu(node) or _is_read_by_layer(graph, node)))]


def _is_read_by_layer(graph: Graph, node: Node) -> bool:
    return any(reader.op in _LAYERS for reader in graph.consumers.get(Ref(node.name), ()))


class Calibration:
    """Collects histograms of the tensors of a network."""

    def __init__(self, names: list[str]) -> None:
        self._histograms = {name: Histogram() for name in names}

    def add(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Add the tensors' values for a batch to the histograms. Raises GraphError if a value is not finite."""
        for name, histogram in self._histograms.items():
            if not histogram.add(tensors[name]):
                raise GraphError(f"the tensor '{name}' has a value that is not finite: take other weights, the network "
                                 "cannot be calibrated with these")

    def scales(self, method: str) -> dict[str, float]:
        """The scale of each tensor, by name: the real value of the integer 1. Raises GraphError for an unknown
        method."""
        return {name: (histogram.limit(method) or 1.0) / LARGEST for name, histogram in self._histograms.items()}


class Histogram:
    """A histogram of absolute values, in bins of equal width from 0 on. When a value lies beyond the last bin, the
    width doubles and pairs of bins are merged, so no value is read twice.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(NUM_BINS, np.int64)
        self.width = 0.0  # width of a bin; 0 until a value other than 0 has come
        self.largest = 0.0

    def add(self, values: np.ndarray) -> bool:
        """Count values. If some values are not finite, count nothing and return False."""
        values = np.abs(values.ravel())
        largest = float(values.max(initial=0.0))
        if not np.isfinite(largest):
            return False
        self.largest = max(self.largest, largest)
        if not self.width:
            self.width = largest / NUM_BINS
        while self.largest > self.width * NUM_BINS:
            pairs = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts = np.concatenate([pairs, np.zeros_like(pairs)])
            self.width *= 2
        if self.width:
            places = np.minimum((values * (1 / self.width)).astype(np.int32), NUM_BINS - 1)
            self.counts += np.bincount(places, minlength=NUM_BINS)
        else:
            self.counts[0] += values.size
        return True

    def limit(self, method: str) -> float:
        """The limit by a method of METHODS; 0 if all values are 0. Raises GraphError for an unknown method."""
        limits = {"max": lambda: self.largest, "percentile": self._percentile, "entropy": self._entropy}
        if method not in limits:
            raise GraphError(f"there is no calibration '{method}': choose {', '.join(limits)}")
        return limits[method]()

    def _percentile(self) -> float:
        """The end of the bin up to which PERCENTILE of the values lie."""
        within = np.cumsum(self.counts)
        bins = int(np.searchsorted(within, within[-1] * PERCENTILE / 100)) + 1
        return min(bins * self.width, self.largest)

    def _entropy(self) -> float:
        """The limit at which the distribution of the quantised values diverges least from the distribution of the
        values (KL divergence; Migacz, GTC 2017). Outliers are counted at the limit.

        The first bin gets the count of the second bin, because the zeros of ReLUs in the first bin are exact at any
        limit (as in NVIDIA's pytorch-quantization).
        """
        counts = self.counts.astype(np.float64)
        counts[0] = counts[1]
        if not counts.any():
            return self.largest
        last = int(np.flatnonzero(counts)[-1]) + 1
        tried = [*range(_LEVELS, last, _STEP), max(last, _LEVELS)]
        best = min(tried, key=lambda bins: _divergence(counts, bins))
        return min(best * self.width, self.largest)


def _divergence(counts: np.ndarray, bins: int) -> float:
    """KL divergence, in nats, between the first `bins` bins and their quantisation to 128 levels. Outliers are counted
    in the last bin. The result is inf if the quantised distribution gives probability 0 to a value that occurs.
    """
    inside = counts[:bins]
    reference = inside.copy()
    reference[-1] += counts[bins:].sum()
    level = np.arange(bins) * _LEVELS // bins
    occurs = inside > 0
    sums, sizes = (np.bincount(level, weights, _LEVELS) for weights in (inside, occurs.astype(np.float64)))
    spread = np.where(occurs, (sums / np.maximum(sizes, 1))[level], 0.0)
    p = reference > 0
    if not spread[p].all() or not spread.any():
        return float("inf")
    reference, spread = reference[p] / reference.sum(), spread[p] / spread.sum()
    return float((reference * np.log(reference / spread)).sum())
