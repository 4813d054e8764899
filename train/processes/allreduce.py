"""The mean of gradients over the GPUs of a run, while the backward pass goes on: Horovod's, with NCCL.

    all_reduce = BucketAllReduce(executor, device_id)
    executor.forward_backward(data, label, on_bucket=all_reduce.start)
    all_reduce.finish()
    executor.update(learning_rate)          # waits on the GPU for the mean; the host does not

Horovod's own MXNet functions begin to talk to the other processes when a gradient has been computed, and what follows
can be launched when its mean is there: twice the time of a host in every step. allreduce.cc hands a bucket over before
it is computed, with the event that says so, as Horovod's PyTorch functions do.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from graph_passes.executors.cuda.buckets import Bucket
from graph_passes.executors.cuda.executor import CudaExecutor
from train.errors import TrainError
from train.processes.pulse import pulse

LIBRARY = "bucket_allreduce.so"  # beside Horovod's own library, against which it is compiled
ON_HOST = -1


class BucketAllReduce:
    """Averages the buckets of one executor: NCCL between GPUs, Gloo between hosts' memories."""

    def __init__(self, executor: CudaExecutor, device_id: int) -> None:
        """`device_id`: number of this process's GPU, or ON_HOST for buckets in the host's memory.

        Raises TrainError where Horovod cannot average on GPUs, or lacks the library.
        """
        self._executor, self._device_id = executor, device_id
        self._library = load_library(on_gpu=device_id != ON_HOST)
        self._slots: dict[str, Any] = {}  # by name of the bucket
        self._started: list[Bucket] = []
        self._passes = 0
        pulse.follow_device(executor.passes_shown)
        executor.show_passes(self._passes)

    @property
    def description(self) -> str:
        buckets = ", ".join(f"{bucket.name} {bucket.num_bytes / 1e6:.1f} MB {bucket.dtype}"
                            for bucket in self._executor.buckets)
        return f"gradients averaged by Horovod beside the backward pass, in buckets: {buckets}"

    def start(self, bucket: Bucket) -> None:
        """Replace the gradients by their mean over all processes once `bucket.ready` fires. Returns at once."""
        if bucket.name not in self._slots:
            self._slots[bucket.name] = self._library.allreduce_slot()
        self._library.allreduce_start(
            self._slots[bucket.name], f"gradients.{bucket.name}".encode(), bucket.address, bucket.num_elements,
            bucket.dtype == "float16", self._device_id, int(bucket.ready), int(bucket.done),
        )
        self._started.append(bucket)

    def wait(self) -> None:
        """Wait until all processes have started the same buckets: `done` is recorded then, behind the mean. The GPU may
        still be computing, or averaging.

        Raises HorovodInternalError with Horovod's own words where that failed, as when another process has died.
        """
        for bucket in self._started:
            fault = self._library.allreduce_wait(self._slots[bucket.name])
            if fault:
                self._started.clear()
                raise _internal_error(f"the all-reduce of gradients ({bucket.name}) failed: {fault.decode()}")

    def finish(self) -> None:
        """Let what the executor does from now on follow the means on the GPU, those of all buckets where none has been
        started. Waits, and raises, as `wait` does; nothing needs to be computed by then."""
        pulse.begin_collective()
        if not self._started:
            self._executor.hand_over(self.start)
        self.wait()
        self._passes += 1
        self._executor.show_passes(self._passes)
        for bucket in self._started:
            self._executor.follow(bucket)
        self._started.clear()


def _internal_error(text: str) -> Exception:
    from horovod.common.exceptions import HorovodInternalError  # what Horovod's elastic mode looks for

    error: Exception = HorovodInternalError(text)
    return error


@functools.cache
def load_library(on_gpu: bool) -> Any:
    """The compiled allreduce.cc. Raises TrainError where it is missing, does not fit, or cannot do it on GPUs."""
    from train.processes.horovod_mxnet import hvd

    if on_gpu and not hvd.nccl_built():
        raise TrainError("this Horovod was built without NCCL, so it cannot average gradients on GPUs: run "
                         "make setup where the GPUs are")
    path = Path(hvd.__file__).with_name(LIBRARY)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise TrainError(f"several GPUs need {path}, which cannot be loaded ({error}): run make setup") from None
    library.allreduce_slot.restype = ctypes.c_void_p
    library.allreduce_start.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int,
        ctypes.c_void_p, ctypes.c_void_p,
    ]
    library.allreduce_start.restype = None
    library.allreduce_wait.argtypes = [ctypes.c_void_p]
    library.allreduce_wait.restype = ctypes.c_char_p
    return library
