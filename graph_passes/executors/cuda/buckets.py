"""Buckets: pieces of the gradients that are averaged over several GPUs during the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.parameters import FlatArray
from graph_passes.passes.precision import ITEM_BYTES

# No computation is left to overlap with the last all-reduce, so the last bucket must be small.
LAST_BUCKET_BYTES = 2**20


@dataclass(frozen=True)
class Bucket:
    """Gradients that are all-reduced in one message: `num_elements` of `dtype` ("float16", "float32") at `address` on
    the GPU.

    Two CUDA events order the work: `ready` fires when the gradients are computed. The all-reduce records `done`, and
    `Gpu.wait_for` makes the update wait for it.
    """

    name: str
    address: int
    num_elements: int
    dtype: str
    ready: Any  # CUevent
    done: Any

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]


def cut(sizes: Sequence[int], num_buckets: int) -> list[tuple[int, int]]:
    """Cut tensors with these sizes in bytes, in order, into at most `num_buckets` ranges (first, end) of indices.

    The last range is no larger than the others. The last range has at most LAST_BUCKET_BYTES, but at least one tensor.
    The other ranges have about equal sizes.
    """
    if num_buckets == 1 or len(sizes) == 1:
        return [(0, len(sizes))]
    last, rest = len(sizes) - 1, sum(sizes[:-1])
    while last > 1 and sum(sizes[last - 1 :]) <= min(LAST_BUCKET_BYTES, sum(sizes) // num_buckets):
        last -= 1
        rest -= sizes[last]
    bounds, before = [0], 0
    for number in range(last):
        if before * (num_buckets - 1) >= rest * len(bounds):
            bounds.append(number)
        before += sizes[number]
    return list(pairwise([*bounds, last, len(sizes)]))


def bucket_of(gpu: Gpu, name: str, array: FlatArray, tensors: Sequence[str]) -> Bucket:
    """The bucket of adjacent tensors in a flat array."""
    first = array.starts[tensors[0]]
    last = array.slices[tensors[-1]]
    end = array.starts[tensors[-1]] + last.num_bytes // ITEM_BYTES[array.dtype]
    address = array.address + first * ITEM_BYTES[array.dtype]
    return Bucket(name, address, end - first, array.dtype, gpu.timing_event(), gpu.timing_event())
