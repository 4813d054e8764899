"""How gradients are cut into buckets. Their content on a GPU is tested in test_executor.py."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from graph_passes.executors.cuda.buckets import LAST_BUCKET_BYTES, cut

MB = 10**6


def total(sizes: list[int], bounds: tuple[int, int]) -> int:
    return sum(sizes[slice(*bounds)])


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 8, 50])
def test_cut_covers_every_tensor_once_in_order(num_buckets: int, rng: np.random.Generator) -> None:
    for _ in range(50):
        sizes = [int(size) for size in rng.integers(1, 4 * MB, rng.integers(1, 60))]
        ranges = cut(sizes, num_buckets)
        assert 1 <= len(ranges) <= num_buckets
        assert ranges[0][0] == 0 and ranges[-1][1] == len(sizes)
        assert all(first < end for first, end in ranges)
        assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
        if len(ranges) > 1:
            last = ranges[-1]
            assert total(sizes, last) <= LAST_BUCKET_BYTES or last[1] - last[0] == 1
            # the others differ by no more than the tensors at their ends
            others = [total(sizes, bounds) for bounds in ranges[:-1]]
            assert max(others) <= sum(sizes[: last[0]]) / len(others) + 2 * max(sizes)


def test_the_last_bucket_is_small_and_the_others_are_equal() -> None:
    weights = [4 * MB] * 12 + [MB // 10] * 5  # a network's large layers, which come first, and its small ones
    assert cut(weights, 4) == [(0, 4), (4, 8), (8, 12), (12, 17)]
    assert cut(weights, 2) == [(0, 12), (12, 17)]
    assert cut(weights, 1) == [(0, 17)]
    assert cut([5], 3) == [(0, 1)]
