"""Inference on MXNet's GPU arrays, ordered with MXNet's engine: what executors on a GPU share.

A `Network` runs on a stream of its own. What keeps it in order with MXNet are gates: an operation that is pushed to
MXNet's engine as the reader or writer of an array, and that ends when the network's CUDA event has fired. Whatever
MXNet or Horovod is asked to do with that array afterwards waits for it. A gate costs about 40 us of host time.

A gate waits in one of the engine's four threads for what is urgent. In its one thread for all other work of the CPU,
whatever MXNet does there would wait for the GPU too: even a new array in the host's memory, which the engine is asked
to make ready for writing.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from common.mxnet_compat import mx
from graph_passes.errors import GraphError
from graph_passes.executors.base import Executor, Metrics, parse_device
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.network import Network
from graph_passes.executors.cuda.profile import Profile
from graph_passes.graph import Graph

Array = Any  # mx.nd.NDArray; MXNet has no type stubs
PASSES_AHEAD = 2  # of inference, that wait for the GPU when the host is made to wait too
_ENGINE_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_CPU_PRIORITIZED = ctypes.c_int(3)  # MXNet's FnProperty::kCPUPrioritized


class _Context(ctypes.Structure):
    """MXNet's Context as its C API takes it."""

    _fields_ = (("device_type", ctypes.c_int), ("device_id", ctypes.c_int32))


class OnMXNet(Executor):
    """An executor that runs the network `_step`, which the subclass makes: of training, or in INT8."""

    _step: Network

    def __init__(self, graph: Graph, shapes: Mapping[str, Sequence[int]], device: str) -> None:
        super().__init__(graph, shapes)
        kind, number = parse_device(device)
        if kind != "gpu":
            raise GraphError(f"the cuda executor cannot run on the device '{device}': give gpu(0), gpu(1), ...")
        self._context = mx.gpu(number)
        self._shared: dict[str, str] = {}  # memory that is MXNet's, and its dtype
        self._arrays: dict[str, Array] = {}
        self._seen: list[Array] = []  # arrays that MXNet may be reading or writing
        self._pending: dict[int, Any] = {}  # number of a gate that the engine has not passed yet -> its CUDA event
        self._num_gates = 0
        self._pass_gate = _ENGINE_CALLBACK(lambda run_context, number: self._pending.pop(number).sync())
        self._num_valid = self.input_shapes["data"][0]
        self._num_inferred = 0  # images of the latest inference
        self._answered: deque[Any] = deque()  # CUDA events at the ends of the latest passes of inference

    def _allocate(self, name: str, num_bytes: int) -> int | None:
        """MXNet arrays for what MXNet or Horovod may want to see; the network takes plain memory for the rest."""
        if name not in self._shared:
            return None
        dtype = self._shared[name]
        array = mx.nd.empty((max(1, num_bytes // np.dtype(dtype).itemsize),), ctx=self._context, dtype=dtype)
        self._arrays[name] = array
        return self._address(array)

    def forward(self, data: Array, label: Array | None = None) -> Array:
        """`infer`, with a label of all images. The probabilities are in an array of their own: to write one again, the
        host would have to wait for MXNet, whose worker waits for the GPU, and so each pass for the one before."""
        self.infer(data, label, 0 if label is None else data.shape[0])
        source, gpu = self._step.persistent.probabilities, self._step.gpu
        answer = mx.nd.empty((self._num_inferred, source.shape[1]), ctx=self._context)
        gpu.copy(self._address(answer), source.address, source.bytes_of(self._num_inferred))
        self._answer_by(self._gate([answer], is_seen=False))
        return answer

    def prepare_inference(self, image_size: tuple[int, int]) -> None:
        super().prepare_inference(image_size)
        self._wait_for_mxnet()
        self._step.prepare_inference(image_size)

    def infer(self, data: Array, label: Array | None = None, num_valid: int = 0) -> None:
        """As `Executor` has it. The batch may be smaller than the one that the executor was made for."""
        self._wait_for_mxnet()
        num_images = min(data.shape[0], self.input_shapes["data"][0])
        batch, used = self._given(data, label, min(num_valid, num_images), num_images)
        self._step.infer(num_images, self._step.take(*batch))
        self._gate(used, reading=True)  # nobody may overwrite the batch before it is read
        self._num_inferred = num_images

    def request_probabilities(self) -> Callable[[], np.ndarray]:
        receive = self._step.request_probabilities(self._num_inferred)
        self._answer_by(self._step.gpu.record_event())
        return receive

    def _answer_by(self, event: Any) -> None:
        """A pass of inference ends with the event; the host waits here where too many are under way."""
        self._answered.append(event)
        if len(self._answered) > PASSES_AHEAD:
            self._answered.popleft().sync()

    def read_metrics(self) -> Metrics:
        return self._step.read_metrics()

    def request_metrics(self) -> Callable[[], Metrics]:
        return self._step.request_metrics()

    def profile_inference(self, data: Array) -> Profile:
        """Time, bytes and operations of every kernel of the inference of a whole batch."""
        self._wait_for_mxnet()
        batch, used = self._given(data, None, 0, data.shape[0])
        self._step.load_from_device(*batch)
        self._gate(used, reading=True)
        self._step.infer()
        return self._step.profile_inference()

    @property
    def gpu(self) -> Gpu:
        return self._step.gpu

    def close(self) -> None:
        self._step.gpu.free_all()

    def synchronize(self) -> None:
        self._step.gpu.synchronize()
        mx.nd.waitall()

    def _given(self, data: Array, label: Array | None, num_valid: int, num_images: int
               ) -> tuple[tuple[int, str, tuple[int, ...]], list[Array]]:
        """The images on this GPU: address, dtype and shape; and the arrays that are read. The labels are loaded."""
        made = self.input_shapes["data"]
        for name, array in (("data", data), ("softmax_label", label)):
            if array is not None:
                shape = tuple(array.shape)
                if name == "data" and shape[-1] == self._step.persistent.data.shape[3]:
                    shape = (*shape[:-1], made[3])  # it has the channels that the network really reads
                whole = made[0] if shape[0] == num_images else shape[0]  # `num_images` may be a part of a batch
                self.check_input(name, (whole, *shape[1:]))
        data = self._here(data)
        used = [data]
        if label is not None:
            if label.dtype != np.float32:  # its bytes are copied
                raise GraphError(f"'softmax_label' has the dtype {np.dtype(label.dtype).name}: give float32")
            label = self._here(label)
            target = self._step.persistent.label
            self._step.gpu.copy(target.address, self._address(label), target.bytes_of(num_images))
            used.append(label)
        if num_valid != self._num_valid:
            self._step.set_num_valid(num_valid)
            self._num_valid = num_valid
        return (self._address(data), np.dtype(data.dtype).name, data.shape), used

    def _here(self, array: Array) -> Array:
        """The array on this GPU."""
        return array if array.context == self._context else array.as_in_context(self._context)

    # --- order with MXNet's engine ---

    def _address(self, array: Array) -> int:
        array.wait_to_read()
        address = ctypes.c_void_p()
        _call("MXNDArrayGetData", array.handle, ctypes.byref(address))
        return int(address.value or 0)

    def _gate(self, arrays: Sequence[Array], reading: bool = False, is_seen: bool = True) -> Any:
        """Make what MXNet does with the arrays from now on wait for what is on the step's stream: everything, or with
        `reading` what would overwrite them. No array twice, nor a slice beside its whole: the engine knows them as one
        and would wait for itself. `is_seen`: the next step must wait for what MXNet does with them. The CUDA event that
        the gate waits for."""
        self._num_gates += 1
        event = self._pending[self._num_gates] = self._step.gpu.record_event()
        handles = (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays))
        read, written = ((handles, len(arrays)), (None, 0)) if reading else ((None, 0), (handles, len(arrays)))
        cpu = _Context(1, 0)  # a thread for the CPU waits, so that MXNet's own for the GPU stays free
        _call("MXEnginePushSyncND", self._pass_gate, ctypes.c_void_p(self._num_gates), None, ctypes.byref(cpu),
              *read, *written, ctypes.byref(_CPU_PRIORITIZED), 0, b"gate")
        if is_seen and not reading:
            self._seen += arrays
        return event

    def _wait_for_mxnet(self) -> None:
        """Wait until MXNet has done what it was asked to do with arrays that it has been shown."""
        for array in self._seen:
            _call("MXNDArrayWaitToWrite", array.handle)
        self._seen.clear()


def _call(function: str, *arguments: Any) -> None:
    """A function of MXNet's C API."""
    mx.base.check_call(getattr(mx.base._LIB, function)(*arguments))
