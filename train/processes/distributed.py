"""Communication of several processes through Horovod: Gloo between CPUs, NCCL between GPUs, with the same calls.

A process started on its own never imports Horovod. Under `scripts/dgx1_8gpu.sh` (or horovodrun), each process is one
rank, and only rank 0 writes files and prints. docs/multi_gpu.md explains how the parts work together.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from common.errors import UserError
from common.mxnet_compat import mx
from graph_passes.executors import Executor
from train.errors import LostProcessError, NoHorovodError, TrainError
from train.processes.allreduce import BucketAllReduce
from train.processes.invocation import is_of_several, machine
from train.processes.pulse import pulse

if TYPE_CHECKING:
    from graph_passes.executors.cuda.executor import CudaExecutor

LOST_PROCESS = re.compile("horovod|gloo|nccl|by peer|broken pipe|timed out waiting", re.IGNORECASE)
BUCKET_BYTES = 25 * 2**20  # approximate size of a group of gradients that are averaged together

# Defaults of Horovod's environment variables; docs/multi_gpu.md gives the reasons.
HOROVOD_SETTINGS = {
    "HOROVOD_CYCLE_TIME": "1",  # ms between two checks for new operations
    "HOROVOD_FUSION_THRESHOLD": "0",  # off: gradients already come in buckets
    "HOROVOD_NUM_NCCL_STREAMS": "1",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "1",  # for the host, an all-reduce is complete once it is enqueued on the GPU
}

# With one of these set, Horovod 0.28.1 writes beyond its table of parameters when it is initialised a second time.
NOT_ELASTIC = ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD")


def is_elastic() -> bool:
    """Whether the launcher (ours or horovodrun) has started this process for an elastic run."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


class GradientAllReduce(Protocol):
    """Averages an executor's gradients over all processes."""

    @property
    def description(self) -> str:
        """A description for the log of how gradients are averaged."""

    @property
    def start(self) -> Callable[[Any], None] | None:
        """The callback for each finished bucket; None if the executor has no buckets."""

    def finish(self) -> None:
        """Make the mean available to all later optimizer calls."""


class Workers:
    """The processes of this run. Methods that communicate are collective operations: all ranks call them, in the same
    order."""

    def __init__(self) -> None:
        """Connect to the other processes. If another process is lost meanwhile, raises LostProcessError, or
        HorovodInternalError in an elastic run.
        """
        self.size, self.rank, self.local_rank, self.local_size = 1, 0, 0, 1
        self._hvd: Any = None
        # Subject -> the latest `vote` on the subject: the all-reduce, which may still run, and its answers.
        self._votes: dict[str, tuple[Any, list[bool]]] = {}
        if is_of_several():
            self._hvd = _import_horovod(int(os.environ["HOROVOD_SIZE"]))
            for name, value in HOROVOD_SETTINGS.items():
                if not os.environ.setdefault(name, value).isdecimal():
                    raise TrainError(f"{name} is {os.environ[name]!r}: give a whole number, or unset it",
                                     on_all_ranks=True)
            if is_elastic():
                for name in NOT_ELASTIC:
                    os.environ.pop(name, None)
            _connect(self._hvd)
            self.size, self.rank = self._hvd.size(), self._hvd.rank()
            self.local_rank, self.local_size = self._hvd.local_rank(), self._hvd.local_size()

    @property
    def alone(self) -> bool:
        """Whether this is the only process. Horovod is then not imported."""
        return self._hvd is None

    def describe(self, all_reduce: GradientAllReduce) -> str:
        """A description for the log of how the processes communicate."""
        settings = " ".join(f"{name}={os.environ[name]}" for name in HOROVOD_SETTINGS if name in os.environ)
        return f"{self.size} process{'es' * (self.size > 1)}; {all_reduce.description}; {settings}"

    def gradient_all_reduce(self, executor: Executor) -> GradientAllReduce:
        """The gradient averaging for this executor, valid as long as this object. A collective operation. Raises
        TrainError if Horovod cannot average on GPUs."""
        from graph_passes.executors.cuda.executor import CudaExecutor

        if isinstance(executor, CudaExecutor):
            return self.bucket_all_reduce(executor)
        return _ArrayAllReduce(self, executor)

    def bucket_all_reduce(self, executor: CudaExecutor) -> BucketAllReduce:
        """Like `gradient_all_reduce`, for GPUs: averages each bucket during the backward pass."""
        with self.agreement():
            return BucketAllReduce(executor, self.local_rank)

    def all_reduce(self, arrays: Sequence[Any], name: str) -> None:
        """Replace each fp32 MXNet array by its mean over all ranks; `name` identifies the group of arrays."""
        if self._hvd:
            self.all_reduce_flat(_flatten(arrays), name)

    def all_reduce_flat(self, flats: Sequence[_Flat], name: str) -> None:
        """Replace flat arrays by their means over all ranks; for arrays that are averaged repeatedly."""
        pulse.begin_collective()
        for number, flat in enumerate(flats):
            flat.read()
            self._hvd.allreduce_(flat.array, op=self._hvd.Average, name=f"{name}.{number}")
            flat.write_back()

    def all_reduce_on_host(self, arrays: Sequence[Any], name: str) -> None:
        """Replace a few small fp32 arrays, on any device, by their means over all ranks, through host memory."""
        if self._hvd:
            copies = [array.as_in_context(mx.cpu()) for array in arrays]
            self.all_reduce(copies, name)
            for array, copy in zip(arrays, copies, strict=True):
                if copy is not array:
                    array[:] = copy

    def broadcast(self, arrays: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
        """Rank 0's fp32 arrays, on every rank."""
        if not (self._hvd and arrays):
            return dict(arrays)
        pulse.begin_collective()
        flat = mx.nd.array(np.concatenate([array.ravel() for array in arrays.values()]), dtype="float32")
        self._hvd.broadcast_(flat, root_rank=0, name=name)
        values, start = flat.asnumpy(), 0
        result = {}
        for key, array in arrays.items():
            result[key] = values[start : start + array.size].reshape(array.shape)
            start += array.size
        return result

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks."""
        if not self._hvd:
            return list(values)
        pulse.begin_collective()
        total = mx.nd.array(values, dtype="float64")
        self._hvd.allreduce_(total, op=self._hvd.Sum, name="sum")
        return [float(value) for value in total.asnumpy()]

    def vote(self, requests: Sequence[bool], about: str = "training") -> list[bool]:
        """For each request, whether any rank has made it; all ranks get the same answer at the same step.

        With several ranks the answer belongs to the previous call with the same `about`: its all-reduce has run beside
        a training step, so no rank waits for it. A yes also answers the requests of the call that returns it, because
        these were made before the answer was known; the next answer to these requests is therefore no.
        """
        if not self._hvd:
            return list(requests)
        answer = [False] * len(requests)
        if about in self._votes:
            counts, answered = self._votes[about]
            answer = [bool(n) and not was for n, was in zip(counts.asnumpy(), answered, strict=True)]
        pulse.begin_collective()
        votes = mx.nd.array(requests, dtype="int32")
        self._hvd.allreduce_(votes, op=self._hvd.Sum, name=f"vote.{about}")
        self._votes[about] = votes, answer
        return answer

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in rank order."""
        if not self._hvd:
            return [value]
        pulse.begin_collective()
        return self._hvd.allgather_object(value, name="gather")

    @contextlib.contextmanager
    def agreement(self) -> Iterator[None]:
        """A context in which a user's error on any rank is raised as one TrainError on all ranks, so that no rank waits
        forever.
        """
        mistake = None
        try:
            yield
        except UserError as error:
            if not self._hvd:
                raise
            mistake = str(error)
        found = self.gather((machine(), mistake))
        mistakes = [(name, sentence) for name, sentence in found if sentence]
        if mistakes:
            name, sentence = mistakes[0]
            # the mistake concerns this machine only, so the sentence names the machine
            is_own = name and len(mistakes) < len(found)
            raise TrainError(f"on {name}: {sentence}" if is_own else sentence, on_all_ranks=True)


class _ArrayAllReduce:
    """Averages gradients that are MXNet arrays, after the backward pass."""

    start = None
    description = "gradients averaged after the backward pass"

    def __init__(self, workers: Workers, executor: Executor) -> None:
        self._workers, self._flats = workers, _flatten(list(executor.grads.values()))

    def finish(self) -> None:
        self._workers.all_reduce_flat(self._flats, "gradients")


class _Flat:
    """A buffer for several fp32 arrays end to end. The buffer combines many messages into one. It also has a plain
    layout: with oneDNN an array may be in a blocked layout, which Horovod does not understand.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        self.array = mx.nd.empty((sum(array.size for array in arrays),), ctx=arrays[0].context)
        ends = list(itertools.accumulate(array.size for array in arrays))
        self._parts = [(array, self.array[end - array.size : end].reshape(array.shape))
                       for array, end in zip(arrays, ends, strict=True)]

    def read(self) -> None:
        for array, part in self._parts:
            array.copyto(part)

    def write_back(self) -> None:
        for array, part in self._parts:
            part.copyto(array)


def _flatten(arrays: Sequence[Any]) -> list[_Flat]:
    """Group the arrays, in order, into flat ones of about BUCKET_BYTES."""
    groups: list[list[Any]] = [[]]
    filled = 0
    for array in arrays:
        num_bytes = 4 * array.size
        if groups[-1] and filled + num_bytes > BUCKET_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(array)
        filled += num_bytes
    return [_Flat(group) for group in groups if group]


def is_lost_process(error: Exception) -> bool:
    """Whether `error` says that an operation among the processes failed, for example because one of them has ended.

    The Horovod built here raises HorovodInternalError. Another Horovod reports to MXNet, so a message of Gloo, NCCL or
    Horovod arrives as an MXNet error that only its text identifies.
    """
    if isinstance(error, mx.base.MXNetError):
        return LOST_PROCESS.search(str(error)) is not None
    # compared by name, as a single process does not import Horovod
    return type(error).__name__ == "HorovodInternalError"


def drain_engine() -> None:
    """Wait for all pending MXNet operations and discard their errors, which would otherwise be raised by a later
    wait."""
    done = False
    while not done:
        if is_of_several():
            _forget_failure()
        try:
            mx.nd.waitall()
            done = True
        except Exception as error:
            if not (isinstance(error, mx.base.MXNetError) or is_lost_process(error)):
                raise


def _forget_failure() -> None:
    from train.processes.horovod_mxnet import forget_failure

    forget_failure()


def _connect(hvd: Any) -> None:
    """Initialise Horovod; raises as `Workers`."""
    from horovod.common.exceptions import HorovodInternalError

    try:
        hvd.init()
    except ValueError:  # Horovod logs the reason
        hvd.shutdown()
        sentence = "the processes could not connect to each other: one of them is lost, or cannot be reached"
        raise HorovodInternalError(sentence) if is_elastic() else LostProcessError(sentence) from None


def _import_horovod(size: int) -> Any:
    try:
        from train.processes.horovod_mxnet import hvd
    except ImportError as error:
        raise NoHorovodError(size, error) from None
    return hvd
