"""Ranges for INT8: the counts of a histogram batch by batch, and the limits computed from it."""

from __future__ import annotations

import numpy as np
import pytest

from graph_passes import Graph, GraphError, calibration, pipeline
from graph_passes.calibration import METHODS, NUM_BINS, Calibration, Histogram
from graph_passes.passes.quantise import quantise
from train import models


def histogram(*batches: np.ndarray) -> Histogram:
    found = Histogram()
    for values in batches:
        assert found.add(np.asarray(values, np.float32))
    return found


def test_batches_in_turn_count_as_all_at_once(rng: np.random.Generator) -> None:
    """Batches that enlarge the range: bins are merged, and no value is lost or counted twice."""
    # The largest values are powers of two, so bins merged batch by batch are as wide as those of all values at once.
    first = np.append(rng.uniform(-0.99, 0.99, 5000), 1.0)
    second, third = np.append(rng.normal(0, 2, 3000).clip(-8, 8), 8.0), rng.uniform(-3, 3, 1000)
    found, at_once = histogram(first, second, third), histogram(np.concatenate([first, second, third]))
    assert found.width == at_once.width == 8 / NUM_BINS
    moved = found.counts - at_once.counts
    # The largest value so far is the end of the last bin, and counts in it: in the first batch, this is the value 1.
    assert np.flatnonzero(moved).tolist() == [255, 256] and moved[[255, 256]].tolist() == [1, -1]
    assert found.counts.sum() == 9002 and found.limit("max") == 8


def test_a_limit_by_percentile_leaves_out_that_many() -> None:
    values = np.append(np.linspace(-1, 1, 99_990), np.full(10, 50.0))  # 0.01 % are outliers
    limit = histogram(values).limit("percentile")
    assert 1 <= limit <= 1 + 50 / NUM_BINS
    assert histogram(values).limit("max") == 50


def test_a_limit_by_entropy_cuts_off_outliers_but_no_tail(rng: np.random.Generator) -> None:
    normal = rng.normal(0, 1, 100_000).astype(np.float32)
    alone = histogram(normal).limit("entropy")
    beside = histogram(np.append(normal, [40.0])).limit("entropy")
    assert 2.5 < alone <= np.abs(normal).max()
    assert 2.5 < beside < 8
    uniform = rng.uniform(-1, 1, 100_000)
    assert histogram(uniform).limit("entropy") > 0.95


def test_a_limit_by_entropy_diverges_least(rng: np.random.Generator) -> None:
    """Against the formula written out, level by level."""
    found = histogram(rng.laplace(0, 1, 20_000))
    counts = found.counts.astype(float)
    counts[0] = counts[1]

    def divergence(bins: int) -> float:
        p = counts[:bins].copy()
        q = np.zeros(bins)
        for level in range(128):
            of_level = [i for i in range(bins) if i * 128 // bins == level and counts[i]]
            for i in of_level:
                q[i] = sum(counts[j] for j in of_level) / len(of_level)
        p[-1] += counts[bins:].sum()
        p, q = p / p.sum(), q / q.sum()
        return float("inf") if (q[p > 0] == 0).any() else sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a)

    # Limits are tried every 8 bins from 128 on, and at the last value.
    last = int(np.flatnonzero(counts)[-1]) + 1
    limit = round(found.limit("entropy") / found.width)
    assert limit in (last, *range(128, last, 8))
    others = {*range(128, last, 248), limit - 8, limit + 8, last} & set(range(128, last + 1))
    # Sums of 2,048 numbers in another order: 2,048 * 2^-53 of about 1.
    assert divergence(limit) <= min(divergence(bins) for bins in others) + 1e-12 < float("inf")


@pytest.mark.parametrize("method", METHODS)
def test_nothing_but_zeros(method: str) -> None:
    found = Calibration(["x"])
    found.add({"x": np.zeros((2, 3), np.float32)})
    assert found.scales(method) == {"x": 1 / 127}
    found.add({"x": np.full(5, 2, np.float32)})
    assert found.scales("max") == {"x": 2 / 127}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named(value: float) -> None:
    found = Calibration(["good", "bad"])
    with pytest.raises(GraphError, match="the tensor 'bad' has a value that is not finite"):
        found.add({"good": np.ones(3), "bad": np.array([1, value])})


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(GraphError, match="there is no calibration 'mean': choose max, percentile, entropy"):
        histogram(np.ones(3)).limit("mean")


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet50d", "resnet50_v2", "resnext50_32x4d", "mobilenet_v2",
                                  "mobilenet_v3_small", "tf_efficientnet_lite0", "efficientnet_b0"])
def test_what_is_observed_is_all_that_becomes_int8(name: str) -> None:
    """The pass raises for a tensor without a scale."""
    graph: Graph = models.create(name, 5).graph
    scales = dict.fromkeys(calibration.observed(calibration.folded(graph)), 0.1)
    listed = pipeline.quantised_passes("float32", scales)
    before = pipeline.run({key: each for key, each in listed.items() if key != "quantise"}, graph)
    quantise(before, scales)
