"""Several processes with Horovod: Gloo between CPUs, NCCL between GPUs, the same calls for both.

A process started on its own never imports Horovod. Started by `scripts/dgx1_8gpu.sh` (or horovodrun), each process is
one rank; rank 0 alone writes files and prints.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from graph_passes import GraphError
from mxnet_compat import mx
from pipelines import DataError
from train.errors import TrainError

USER_ERRORS = (TrainError, DataError, GraphError)
BUCKET_BYTES = 25 * 2**20  # gradients are averaged in groups of about this size, as PyTorch's DDP does


class Workers:
    """The processes of this run. Every method is a collective operation: all ranks call it, in the same order."""

    def __init__(self) -> None:
        self.size = int(os.environ.get("HOROVOD_SIZE", "1"))
        self.rank, self.local_rank, self.local_size = 0, 0, 1
        self._hvd: Any = None
        self._votes: Any = None  # all-reduce of the last `vote`, under way
        if self.size > 1:
            self._hvd = _import_horovod(self.size)
            self._hvd.init()
            self.rank, self.local_rank = self._hvd.rank(), self._hvd.local_rank()
            self.local_size = self._hvd.local_size()

    def average(self, arrays: Sequence[Any], name: str) -> None:
        """Replace each MXNet array by its mean over all ranks; `name` tells groups of arrays apart."""
        if self.size > 1:
            for flat in self._flattened(arrays):
                self._hvd.allreduce_(flat.array, op=self._hvd.Average, name=f"{name}.{flat.number}")
                flat.write_back()

    def broadcast(self, arrays: Sequence[Any], name: str) -> None:
        """Replace each MXNet array by that of rank 0."""
        if self.size > 1:
            for flat in self._flattened(arrays):
                self._hvd.broadcast_(flat.array, root_rank=0, name=f"{name}.{flat.number}")
                flat.write_back()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks."""
        if self.size == 1:
            return list(values)
        total = self._hvd.allreduce(mx.nd.array(values, dtype="float64"), op=self._hvd.Sum, name="sum")
        return [float(value) for value in total.asnumpy()]

    def vote(self, requests: Sequence[bool]) -> list[bool]:
        """For each request, whether any rank has it: the same answer on every rank, at the same step.

        With several ranks it is the answer to the requests of the call before, whose all-reduce has run beside a
        training step meanwhile, so that nobody waits for it.
        """
        if self.size == 1:
            return list(requests)
        answer = [False] * len(requests) if self._votes is None else [bool(n) for n in self._votes.asnumpy()]
        self._votes = self._hvd.allreduce(mx.nd.array(requests, dtype="int32"), op=self._hvd.Sum, name="vote")
        return answer

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank, by rank."""
        return [value] if self.size == 1 else self._hvd.allgather_object(value, name="gather")

    @contextlib.contextmanager
    def agreement(self) -> Iterator[None]:
        """A user's error inside, on any rank, becomes the same TrainError on all, so that none waits forever."""
        mistake = None
        try:
            yield
        except USER_ERRORS as error:
            if self.size == 1:
                raise
            mistake = str(error)
        mistakes = [found for found in self.gather(mistake) if found]
        if mistakes:
            raise TrainError(mistakes[0], on_all_ranks=True)

    def _flattened(self, arrays: Sequence[Any]) -> list[_Flat]:
        """The arrays in order, grouped into flat ones of about BUCKET_BYTES."""
        groups: list[list[Any]] = [[]]
        filled = 0
        for array in arrays:
            num_bytes = 4 * array.size
            if groups[-1] and filled + num_bytes > BUCKET_BYTES:
                groups.append([])
                filled = 0
            groups[-1].append(array)
            filled += num_bytes
        return [_Flat(number, group) for number, group in enumerate(groups) if group]


class _Flat:
    """Several arrays copied end to end into one: one message instead of many, and a plain layout whatever theirs is
    (with oneDNN an array may lie in a blocked one, of which Horovod knows nothing)."""

    def __init__(self, number: int, arrays: Sequence[Any]) -> None:
        self.number = number
        self.arrays = arrays
        self.array = mx.nd.concat(*(array.reshape((-1,)) for array in arrays), dim=0)

    def write_back(self) -> None:
        start = 0
        for array in self.arrays:
            array[:] = self.array[start : start + array.size].reshape(array.shape)
            start += array.size


def _import_horovod(size: int) -> Any:
    try:
        import horovod.mxnet as hvd
    except ImportError as error:
        raise TrainError(
            f"{size} processes need Horovod, which is not installed here ({error}): install g++ and run make setup",
            on_all_ranks=True,
        ) from None
    return hvd
