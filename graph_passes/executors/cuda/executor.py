"""The cuda executor: a network of this package on MXNet's GPU arrays, in order with MXNet's engine.

Parameters, gradients and running statistics lie in MXNet arrays on `mx.gpu()`, so that MXNet and Horovod can work with
them; the network itself runs on its own stream. Gates (`engine.py`) keep the stream in order with MXNet's operations. A
gate costs host time, so gates are pushed only on access, by the properties `params`, `aux` and `grads`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from common.mxnet_compat import mx
from graph_passes.errors import GraphError
from graph_passes.executors.base import NO_DRAWS, Arrays, Draws, Executor, Metrics
from graph_passes.executors.cuda.engine import Array, Engine, address
from graph_passes.executors.cuda.idle import IdleClock
from graph_passes.executors.cuda.network import Network
from graph_passes.executors.cuda.optimizer import OptimizerConfig
from graph_passes.executors.cuda.options import StepOptions
from graph_passes.executors.cuda.profile import Profile
from graph_passes.executors.cuda.quantised import Quantisation, QuantisedNetwork
from graph_passes.executors.cuda.training_step import OnBucket, TrainingStep
from graph_passes.graph import Graph
from graph_passes.optimizers import Rule

PASSES_AHEAD = 2  # largest number of inference passes in flight before the host waits


class CudaExecutor(Executor):
    """Runs a graph compiled to cuDNN graphs and our own CUDA kernels. Made for one batch size and image size.

    The attribute `network` does not depend on MXNet. It is a `TrainingStep`, also available as `step` for calls that
    need no order with MXNet's engine. With `int8` it is a `QuantisedNetwork`, for inference only.

    This executor differs from the other executors in three ways:

    - Gradients are in `dtype`, except those of gamma, beta and bias (fp32), and multiplied by the loss scale. MXNet has
      no bfloat16, so in bfloat16 `grads` has only the fp32 gradients.
    - Stock MXNet has no kernels for new GPUs, so the executor has its own optimizer, `optimizer`: plain SGD until
      `create_optimizer` sets another rule.
    - `params`, `aux` and `grads` must be read anew in every step: reading them waits for the step.

    `options` are the fields of `StepOptions`, of which a network in INT8 accepts only `deterministic`. For several GPUs
    (docs/multi_gpu.md), `num_buckets` cuts the backward pass, so that `on_bucket` of `forward_backward` is called with
    the gradients of the last layers while the first ones are still being computed.
    """

    network: Network
    optimizer: DeviceOptimizer  # exists only for training, not in INT8

    def __init__(self, graph: Graph, shapes: Mapping[str, Sequence[int]], device: str = "gpu(0)",
                 int8: Quantisation | None = None, **options: Any) -> None:
        super().__init__(graph, shapes)
        self._params: dict[str, Array] = {}
        self._aux: dict[str, Array] = {}
        self._grads: dict[str, Array] = {}
        if int8:
            self._engine = Engine(device, {})
            self.network = QuantisedNetwork(graph, self.input_shapes, *int8, device_id=self._engine.device_id,
                                            **options)
        else:
            self._make_step(device, StepOptions(**options))
        self.gpu = self.network.gpu
        self.gpu_bus_id = self.gpu.device.pci_bus_id
        self._num_valid = self.input_shapes["data"][0]
        self._num_inferred = 0  # number of images of the latest inference
        self._answered: deque[Any] = deque()  # CUDA events at the ends of the latest inference passes
        self._idle = IdleClock(self.gpu)

    def _make_step(self, device: str, options: StepOptions) -> None:
        """Make the training step, and its arrays for MXNet."""
        wide = options.dtype == "bfloat16"
        self._engine = engine = Engine(device, {
            **dict.fromkeys(("master", "state 1", "state 2", "statistics", "ema", "ema_statistics"), "float32"),
            "other_gradients": "float32", "weight_gradients": "uint8" if wide else options.dtype})
        self.network = step = TrainingStep(self.graph, self.input_shapes, options, engine.device_id, engine.allocate)
        self._params = engine.views("master", step.store.master)
        self._aux = engine.views("statistics", step.store.statistics)
        self._grads = engine.views("other_gradients", step.store.other_gradients)
        if not wide:
            self._grads |= engine.views("weight_gradients", step.store.weight_gradients)
        self.optimizer = DeviceOptimizer(step, engine)
        self._last_step: Any = None  # CUDA event at the end of the latest step
        self._batch: Array = None  # data of the latest pass, on this GPU
        self._passes_done = step.gpu.allocate(4)  # address on the GPU; see `show_passes`
        self.passes_shown = step.gpu.pinned(4).view(np.uint32)  # see `show_passes`
        self.passes_shown[:] = 0

    @property
    def step(self) -> TrainingStep:
        """The training step. Raises GraphError if the network is in INT8."""
        if isinstance(self.network, TrainingStep):
            return self.network
        raise GraphError("a network in INT8 cannot be trained: train it in float16 or float32, and quantise it again")

    # --- arrays ---

    @property
    def params(self) -> dict[str, Array]:  # type: ignore[override]
        """fp32 master weights. The network's own copies follow at the next optimizer step, or at once with
        `set_params`."""
        return self._written("master", self._params)

    @property
    def aux(self) -> dict[str, Array]:  # type: ignore[override]
        return self._written("statistics", self._aux)

    def _written(self, name: str, views: dict[str, Array]) -> dict[str, Array]:
        """Views of a shared array. The caller may write them. A network in INT8 has none."""
        if isinstance(self.network, TrainingStep):
            self._engine.gate(self.gpu.record_event(), [self._engine.arrays[name]])
            self.network.parameters_changed()
        return views

    @property
    def grads(self) -> dict[str, Array]:  # type: ignore[override]
        if isinstance(self.network, TrainingStep):
            arrays = self._engine.arrays
            self._engine.gate(self.gpu.record_event(), [arrays["weight_gradients"], arrays["other_gradients"]])
        return self._grads

    def to_canonical(self, name: str, array: Any) -> np.ndarray:
        array = np.asarray(array.asnumpy() if hasattr(array, "asnumpy") else array)
        parameter = self.step.store.parameters.get(name)
        return parameter.to_canonical(array.ravel()) if parameter else array

    def from_canonical(self, name: str, array: np.ndarray) -> np.ndarray:
        parameter = self.step.store.parameters.get(name)
        return parameter.to_device(array).reshape(parameter.device_shape) if parameter else np.asarray(array)

    def set_params(self, params: Mapping[str, np.ndarray], aux: Mapping[str, np.ndarray]) -> None:
        self._engine.wait()
        self.step.set_params(params, aux)

    def get_params(self) -> tuple[Arrays, Arrays]:
        self._engine.wait()
        return self.step.get_params()

    def create_optimizer(self, rule: Rule, ema: bool = False,  # type: ignore[override]
                         clip_norm: float = 0.0) -> DeviceOptimizer:
        """Update all parameters by this rule from now on (see `Executor`)."""
        self.step.set_optimizer(OptimizerConfig(rule, ema=ema, clip_norm=clip_norm))
        return self.optimizer

    # --- training ---

    def forward_backward(self, data: Array, label: Array, accumulate: bool = False, draws: Draws = NO_DRAWS,
                         on_bucket: OnBucket | None = None) -> None:
        """One training pass over a batch (see `Executor`). `on_bucket` is called with each bucket of gradients as soon
        as its kernels are launched; the bucket's event `ready` fires when they are computed."""
        step = self.step
        self._engine.wait()
        self._idle.begin()
        num_images = self.input_shapes["data"][0]
        batch, used = self._given(data, label, num_images, num_images)
        place = 0
        if draws.mixes:
            step.load_from_device(*batch)
        else:
            place = step.take(*batch)
        step.mix(draws)
        step.set_seed(draws.seed)
        step.forward_backward(accumulate, on_bucket, place)
        # MXNet must not overwrite the batch before the network has read it
        self._engine.gate(self.gpu.record_event(), used, reading=True)
        self._batch = used[0]
        self._idle.end()

    def hand_over(self, on_bucket: OnBucket) -> None:
        """Call `on_bucket` with each bucket of the present gradients; used after several passes have been accumulated.
        """
        self._engine.wait()
        self.step.hand_over(on_bucket)

    def show_passes(self, number: int) -> None:
        """Write `number` into `passes_shown` as soon as the GPU has finished its present work. Asynchronous. The value
        passes through a GPU buffer, because writing host memory directly may make the host wait for the stream.
        """
        self.gpu.write_word(self._passes_done, np.uint32(number))
        self.gpu.start_download(self.passes_shown, self._passes_done)

    def profile(self) -> Profile:
        """Measure time, bytes and operations of every kernel of the forward and backward pass, for the latest batch."""
        batch = self._batch
        self.step.load_from_device(address(batch), np.dtype(batch.dtype).name, batch.shape)
        return self.step.profile()

    def largest_batch(self) -> int:
        return self.step.largest_batch()

    def end_step(self) -> None:
        """Wait for the step before the latest one. The GPU always has exactly one step queued."""
        self._idle.end_step()
        step_before, self._last_step = self._last_step, self.gpu.record_event()
        if step_before:
            step_before.sync()
            self.idle_seconds = self._idle.take_seconds()

    # --- inference ---

    def prepare_inference(self, image_size: tuple[int, int]) -> None:
        super().prepare_inference(image_size)
        self._engine.wait()
        self.network.prepare_inference(image_size)

    def infer(self, data: Array, label: Array | None = None, num_valid: int = 0) -> None:
        """Inference (see `Executor`). The batch may be smaller than the executor's."""
        self._idle.forget()
        self._engine.wait()
        num_images = min(data.shape[0], self.input_shapes["data"][0])
        batch, used = self._given(data, label, min(num_valid, num_images), num_images)
        self.network.infer(num_images, self.network.take(*batch))
        # MXNet must not overwrite the batch before the network has read it
        self._engine.gate(self.gpu.record_event(), used, reading=True)
        self._num_inferred = num_images

    def forward(self, data: Array, label: Array | None = None) -> Array:
        """`infer` with a label for every image. Returns the probabilities in a new array: before reusing an array, the
        host would have to wait for MXNet, whose worker waits for the GPU, so each pass would wait for the previous
        pass.
        """
        self.infer(data, label, 0 if label is None else data.shape[0])
        source = self.network.persistent.probabilities
        answer = mx.nd.empty((self._num_inferred, source.shape[1]), ctx=self._engine.context)
        self.gpu.copy(address(answer), source.address, source.bytes_of(self._num_inferred))
        event = self.gpu.record_event()
        self._engine.gate(event, [answer], is_seen=False)
        self._answer_by(event)
        return answer

    def request_probabilities(self) -> Callable[[], np.ndarray]:
        receive = self.network.request_probabilities(self._num_inferred)
        self._answer_by(self.gpu.record_event())
        return receive

    def _answer_by(self, event: Any) -> None:
        """Register the event that ends an inference pass. The host waits here if too many passes are in flight."""
        self._answered.append(event)
        if len(self._answered) > PASSES_AHEAD:
            self._answered.popleft().sync()

    def profile_inference(self, data: Array) -> Profile:
        """Measure time, bytes and operations of every kernel, for inference on a whole batch."""
        self._engine.wait()
        batch, used = self._given(data, None, 0, data.shape[0])
        self.network.load_from_device(*batch)
        self._engine.gate(self.gpu.record_event(), used, reading=True)
        self.network.infer()
        return self.network.profile_inference()

    # --- both ---

    def _given(self, data: Array, label: Array | None, num_valid: int, num_images: int
               ) -> tuple[tuple[int, str, tuple[int, ...]], list[Array]]:
        """The images on this GPU (address, dtype and shape), and the arrays that are read. Also copies the labels to
        the network's buffer.
        """
        made, persistent = self.input_shapes["data"], self.network.persistent
        for name, array in (("data", data), ("softmax_label", label)):
            if array is not None:
                shape = tuple(array.shape)
                if name == "data" and shape[-1] == persistent.data.shape[3]:
                    shape = (*shape[:-1], made[3])  # the batch already has the network's number of channels
                # `num_images` may be smaller than the batch size
                whole = made[0] if shape[0] == num_images else shape[0]
                self.check_input(name, (whole, *shape[1:]))
        data = self._engine.here(data)
        used = [data]
        if label is not None:
            if label.dtype != np.float32:  # the bytes of the labels are copied unchanged
                raise GraphError(f"'softmax_label' has the dtype {np.dtype(label.dtype).name}: give float32")
            label = self._engine.here(label)
            self.gpu.copy(persistent.label.address, address(label), persistent.label.bytes_of(num_images))
            used.append(label)
        if num_valid != self._num_valid:
            self.network.set_num_valid(num_valid)
            self._num_valid = num_valid
        return (address(data), np.dtype(data.dtype).name, data.shape), used

    def read_metrics(self) -> Metrics:
        return self.request_metrics()()

    def request_metrics(self) -> Callable[[], Metrics]:
        network, receive = self.network, self.network.request_metrics()

        def received() -> Metrics:
            metrics = receive()
            self.skipped_steps, self.skipped_in_a_row = network.skipped_steps, network.skipped_in_a_row
            self.gradient_norm = network.gradient_norm
            return metrics

        return received

    def synchronize(self) -> None:
        self.gpu.synchronize()
        mx.nd.waitall()

    def close(self) -> None:
        self.gpu.free_all()


class DeviceOptimizer:
    """The step's optimizer with the interface `Optimizer`. Its arrays are MXNet arrays, and it runs in order with
    MXNet's engine.
    """

    def __init__(self, step: TrainingStep, engine: Engine) -> None:
        self._step, self._engine = step, engine
        self._states: dict[int, dict[str, Array]] = {}  # arrays by variable, by the slot's number
        self._ema: dict[str, Array] = {}

    @property
    def state(self) -> dict[str, dict[str, Array]]:
        """The optimizer's state in fp32, by slot. It must be read anew in every step."""
        found = {}
        for number, (slot, array) in enumerate(self._step.states.items(), start=1):
            if number not in self._states:
                self._states[number] = self._engine.views(f"state {number}", array)
            self._show(f"state {number}")
            found[slot] = self._states[number]
        return found

    @property
    def ema(self) -> dict[str, Array]:
        """Moving averages of parameters and running statistics, fp32; they must be read anew in every step. Empty if no
        averages are kept.
        """
        store = self._step.store
        if not store.ema.address:
            return {}
        if not self._ema:
            self._ema = (self._engine.views("ema", store.ema)
                         | self._engine.views("ema_statistics", store.ema_statistics))
        self._show("ema", "ema_statistics")
        return self._ema

    def _show(self, *names: str) -> None:
        self._engine.gate(self._step.gpu.record_event(), [self._engine.arrays[name] for name in names])

    def swap_ema(self) -> None:
        """Exchange parameters and running statistics with their moving averages. Asynchronous."""
        self._engine.wait()
        self._step.swap_ema()

    @property
    def scalars(self) -> Mapping[str, float]:
        """The dynamic loss scale and the number of updates; waits for the GPU."""
        return self._step.optimizer.get_scalars()

    @scalars.setter
    def scalars(self, scalars: Mapping[str, float]) -> None:
        self._step.optimizer.set_scalars(scalars)

    def step(self, learning_rate: float, scale: float = 1.0, ema_decay: float = 0.0) -> None:
        """One update from the step's own gradients, after multiplying them by `scale`. Asynchronous."""
        self._engine.wait()
        self._step.update(learning_rate, scale, ema_decay)
