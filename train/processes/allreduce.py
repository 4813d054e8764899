"""Averages gradients over the GPUs of a run during the backward pass, with Horovod and NCCL.

    all_reduce = BucketAllReduce(executor, device_id)
    executor.forward_backward(data, label, on_bucket=all_reduce.start)
    all_reduce.finish()
    executor.optimizer.step(learning_rate)  # waits on the GPU for the mean; the host does not

Horovod's own MXNet functions contact the other processes only after a gradient has been computed, and work that reads
the mean can only be launched after the mean has arrived. Both cost host time in each step. allreduce.cc submits a
bucket before it is computed, with the CUDA event of its completion, as Horovod's PyTorch functions do.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.errors import TrainError
from train.processes.pulse import pulse

if TYPE_CHECKING:
    from graph_passes.executors.cuda.buckets import Bucket
    from graph_passes.executors.cuda.executor import CudaExecutor

LIBRARY = "bucket_allreduce.so"  # file in the folder of Horovod's library, to which it is linked
ON_HOST = -1


class BucketAllReduce:
    """Averages the buckets of one executor, with NCCL between GPUs or Gloo between hosts' memories."""

    def __init__(self, executor: CudaExecutor, device_id: int) -> None:
        """`device_id`: number of this process's GPU, or ON_HOST for buckets in host memory.

        Raises TrainError if Horovod cannot average on GPUs, or the library is missing.
        """
        self._executor, self._device_id = executor, device_id
        self._library = load_library(on_gpu=device_id != ON_HOST)
        self._slots: dict[str, Any] = {}  # bucket's name -> the bucket's slot in allreduce.cc
        self._started: list[Bucket] = []
        self._passes = 0
        pulse.follow_device(executor.passes_shown)
        executor.show_passes(self._passes)

    @property
    def description(self) -> str:
        buckets = ", ".join(f"{bucket.name} {bucket.num_bytes / 1e6:.1f} MB {bucket.dtype}"
                            for bucket in self._executor.step.buckets)
        return f"gradients averaged by Horovod beside the backward pass, in buckets: {buckets}"

    def start(self, bucket: Bucket) -> None:
        """Start replacing the bucket's gradients by their mean over all processes, as soon as `bucket.ready` fires.
        Does not wait.
        """
        if bucket.name not in self._slots:
            self._slots[bucket.name] = self._library.allreduce_slot()
        self._library.allreduce_start(
            self._slots[bucket.name], f"gradients.{bucket.name}".encode(), bucket.address, bucket.num_elements,
            bucket.dtype == "float16", self._device_id, int(bucket.ready), int(bucket.done),
        )
        self._started.append(bucket)

    def wait(self) -> None:
        """Wait until all processes have started these buckets, and their all-reduces are enqueued on the GPU (or done
        on the host). Each bucket's event `done` is enqueued behind its all-reduce; the GPU may not have reached it yet.

        Raises HorovodInternalError with Horovod's own message if an all-reduce failed, for example because another
        process has died.
        """
        for bucket in self._started:
            fault = self._library.allreduce_wait(self._slots[bucket.name])
            if fault:
                self._started.clear()
                raise _internal_error(f"the all-reduce of gradients ({bucket.name}) failed: {fault.decode()}")

    def finish(self) -> None:
        """Make the executor's later GPU work wait for the means. If no bucket has been started, all buckets are started
        first. Waits and raises like `wait`; the gradients need not be computed yet.
        """
        pulse.begin_collective()
        if not self._started:
            self._executor.hand_over(self.start)
        self.wait()
        self._passes += 1
        self._executor.show_passes(self._passes)
        for bucket in self._started:
            self._executor.gpu.wait_for(bucket.done)
        self._started.clear()


def _internal_error(text: str) -> Exception:
    from horovod.common.exceptions import HorovodInternalError  # Horovod's elastic mode handles this exception

    error: Exception = HorovodInternalError(text)
    return error


@functools.cache
def load_library(on_gpu: bool) -> Any:
    """The compiled allreduce.cc. Raises TrainError if the library is missing or does not match, or if Horovod lacks
    NCCL.
    """
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
