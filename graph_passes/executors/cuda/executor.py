"""The cuda executor: the compiled training step on MXNet's GPU arrays, ordered with MXNet's engine.

Parameters, gradients and running statistics lie in MXNet arrays on `mx.gpu()`, so that MXNet and Horovod can work with
them; the step itself runs on a stream of its own, kept in order with them by gates (`on_mxnet.py`). A gate costs host
time, so one is pushed only when somebody looks: the properties `params`, `aux` and `grads` push it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graph_passes.executors.base import NO_DRAWS, Arrays, Draws
from graph_passes.executors.cuda.buckets import Bucket
from graph_passes.executors.cuda.idle import IdleClock
from graph_passes.executors.cuda.on_mxnet import OnMXNet
from graph_passes.executors.cuda.optimizer import OptimizerConfig
from graph_passes.executors.cuda.options import StepOptions
from graph_passes.executors.cuda.parameters import FlatArray
from graph_passes.executors.cuda.profile import Profile
from graph_passes.executors.cuda.training_step import OnBucket, TrainingStep
from graph_passes.graph import Graph
from graph_passes.optimizers import Rule

Array = Any  # mx.nd.NDArray; MXNet has no type stubs


class CudaExecutor(OnMXNet):
    """Runs a graph compiled to cuDNN graphs and our own CUDA kernels. Made for one batch size and image size.

    Differs from the other executors in three ways:

    - Gradients are in `dtype`, except those of gamma, beta and bias (fp32), and multiplied by `loss_scale()`. In
      bfloat16, which MXNet cannot hold, `grads` has the fp32 ones only.
    - Stock MXNet has no kernels for new GPUs, so the optimizer is one of the executor's own: `create_optimizer` gives
      it, and until then there is plain SGD, in `update`.
    - `params`, `aux` and `grads` are to be asked for anew in every step: it is the asking that waits for the step.

    `options` are the fields of `StepOptions`. For several GPUs (docs/multi_gpu.md), `num_buckets` cuts the backward
    pass, so that `on_bucket` of `forward_backward` is called with the gradients of the last layers while the first ones
    are still being computed.
    """

    _step: TrainingStep

    def __init__(self, graph: Graph, shapes: Mapping[str, Sequence[int]], device: str = "gpu(0)",
                 **options: Any) -> None:
        super().__init__(graph, shapes, device)
        self._options = StepOptions(**options)
        wide = self._options.dtype == "bfloat16"
        self._shared |= {
            **dict.fromkeys(("master", "state 1", "state 2", "statistics", "ema", "ema_statistics"), "float32"),
            "other_gradients": "float32", "weight_gradients": "uint8" if wide else self._options.dtype}
        self._step = TrainingStep(graph, self.input_shapes, self._options, self._context.device_id, self._allocate)
        store = self._step.store
        self._params = self._views("master", store.master)
        self._aux = self._views("statistics", store.statistics)
        self._ema: dict[str, Array] = {}
        self._states: dict[int, dict[str, Array]] = {}  # what the optimizer keeps, by number of the slot
        self._grads = self._views("other_gradients", store.other_gradients)
        if self._options.dtype != "bfloat16":
            self._grads |= self._views("weight_gradients", store.weight_gradients)
        self.gpu_bus_id = self._step.gpu.device.pci_bus_id
        self._last_step: Any = None  # CUDA event at the end of the latest step
        self._batch: Array = None  # of the latest pass, on this GPU
        self._idle = IdleClock(self._step.gpu)
        self._passes_done = self._step.gpu.allocate(4)  # address on the GPU
        self.passes_shown = self._step.gpu.pinned(4).view(np.uint32)  # see `show_passes`
        self.passes_shown[:] = 0

    # --- arrays ---

    def _views(self, name: str, tensors: FlatArray) -> dict[str, Array]:
        """Slices of one flat array; they share its memory and its place in the engine."""
        flat = self._arrays[name]
        return {tensor: flat[start : start + int(np.prod(tensors.slices[tensor].shape))].reshape(
                    tensors.slices[tensor].shape) for tensor, start in tensors.starts.items()}

    @property
    def params(self) -> dict[str, Array]:  # type: ignore[override]
        """fp32 master weights; the network's own copies follow at the next `update`, or at once by `set_params`."""
        self._gate([self._arrays["master"]])
        self._step.parameters_changed()  # whoever asks may write them
        return self._params

    @property
    def aux(self) -> dict[str, Array]:  # type: ignore[override]
        self._gate([self._arrays["statistics"]])
        self._step.parameters_changed()
        return self._aux

    @property
    def grads(self) -> dict[str, Array]:  # type: ignore[override]
        self._gate(self._gradient_arrays)
        return self._grads

    @property
    def _gradient_arrays(self) -> list[Array]:
        return [self._arrays["weight_gradients"], self._arrays["other_gradients"]]

    def to_canonical(self, name: str, array: Any) -> np.ndarray:
        array = np.asarray(array.asnumpy() if hasattr(array, "asnumpy") else array)
        parameter = self._step.store.parameters.get(name)
        return parameter.to_canonical(array.ravel()) if parameter else array

    def from_canonical(self, name: str, array: np.ndarray) -> np.ndarray:
        parameter = self._step.store.parameters.get(name)
        return parameter.to_device(array).reshape(parameter.device_shape) if parameter else np.asarray(array)

    def set_params(self, params: Mapping[str, np.ndarray], aux: Mapping[str, np.ndarray]) -> None:
        self._wait_for_mxnet()
        self._step.set_params(params, aux)

    def get_params(self) -> tuple[Arrays, Arrays]:
        self._wait_for_mxnet()
        return self._step.get_params()

    @property
    def state(self) -> dict[str, dict[str, Array]]:
        """What the optimizer keeps, by its slots, fp32; to be asked for anew in every step."""
        found = {}
        for number, (slot, array) in enumerate(self._step.states.items(), start=1):
            if number not in self._states:
                self._states[number] = self._views(f"state {number}", array)
            self._gate([self._arrays[f"state {number}"]])
            found[slot] = self._states[number]
        return found

    @property
    def ema(self) -> dict[str, Array]:
        """Moving averages of parameters and running statistics, fp32; to be asked for anew in every step. Empty where
        the optimizer keeps none."""
        store = self._step.store
        if not store.ema.address:
            return {}
        if not self._ema:
            self._ema = (self._views("ema", store.ema)
                         | self._views("ema_statistics", store.ema_statistics))
        self._gate([self._arrays["ema"], self._arrays["ema_statistics"]])
        return self._ema

    def swap_ema(self) -> None:
        """Exchange parameters and running statistics with their moving averages. Asynchronous."""
        self._wait_for_mxnet()
        self._step.swap_ema()

    def create_optimizer(self, rule: Rule, ema: bool = False,  # type: ignore[override]
                         clip_norm: float = 0.0) -> DeviceOptimizer:
        """Make the step update all parameters by this rule, as `Executor` has it. The optimizer to call for that."""
        self._step.set_optimizer(OptimizerConfig(rule, ema=ema, clip_norm=clip_norm))
        return DeviceOptimizer(self)

    def set_state(self, state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """What the optimizer keeps, by slot and parameter, canonical."""
        self._step.set_state(state)

    def get_state(self) -> dict[str, Arrays]:
        """The inverse of `set_state`."""
        return self._step.get_state()

    def loss_scale(self) -> float:
        """What the gradients of the latest pass are multiplied by; waits for the GPU."""
        return float(self._step.optimizer.read_state().loss_scale)

    def get_scalars(self) -> dict[str, float]:
        """Where dynamic loss scaling stands, and the number of updates; waits for the GPU."""
        return self._step.optimizer.get_scalars()

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """The inverse of `get_scalars`."""
        self._step.optimizer.set_scalars(scalars)

    # --- running ---

    def forward_backward(self, data: Array, label: Array, accumulate: bool = False, draws: Draws = NO_DRAWS,
                         on_bucket: OnBucket | None = None) -> None:
        """One training pass over a batch, as `Executor` has it. `on_bucket` gets one bucket of gradients after the
        other, each as soon as what computes it is launched; its event `ready` says when it is computed."""
        self._wait_for_mxnet()
        self._idle.begin()
        num_images = self.input_shapes["data"][0]
        batch, used = self._given(data, label, num_images, num_images)
        address = 0
        if draws.mixes:
            self._step.load_from_device(*batch)
        else:
            address = self._step.take(*batch)
        self._step.mix(draws)
        self._step.set_seed(draws.seed)
        self._step.forward_backward(accumulate, on_bucket, address)
        self._gate(used, reading=True)  # nobody may overwrite the batch before it is read
        self._batch = used[0]
        self._idle.end()

    def hand_over(self, on_bucket: OnBucket) -> None:
        """Call `on_bucket` with each bucket of the gradients as they are: after several passes."""
        self._wait_for_mxnet()
        self._step.hand_over(on_bucket)

    def follow(self, bucket: Bucket) -> None:
        """Let what is asked for from now on, such as `update`, wait on the GPU for the bucket's event `done`."""
        self._step.gpu.wait_for(bucket.done)

    def show_passes(self, number: int) -> None:
        """Write `number` into `passes_shown` when the GPU has done what it was asked for. Asynchronous, by way of
        its own memory: to have the host's filled directly, the host may have to wait for the stream."""
        self._step.gpu.write_word(self._passes_done, np.uint32(number))
        self._step.gpu.start_download(self.passes_shown, self._passes_done)

    @property
    def buckets(self) -> list[Bucket]:
        """In the order in which they are handed over."""
        return [bucket for buckets in self._step.buckets for bucket in buckets]

    def update(self, learning_rate: float, gradient_scale: float = 1.0, ema_decay: float = 0.0) -> None:
        """One step of the optimizer; gradients are first multiplied by `gradient_scale`. Asynchronous."""
        self._wait_for_mxnet()
        self._step.update(learning_rate, gradient_scale, ema_decay)

    def infer(self, data: Array, label: Array | None = None, num_valid: int = 0) -> None:
        self._idle.forget()
        super().infer(data, label, num_valid)

    @property
    def skipped_steps(self) -> int:  # type: ignore[override]
        return self._step.skipped_steps

    @property
    def skipped_in_a_row(self) -> int:  # type: ignore[override]
        return self._step.skipped_in_a_row

    @property
    def gradient_norm(self) -> float | None:  # type: ignore[override]
        return self._step.gradient_norm

    def profile(self) -> Profile:
        """Time, bytes and operations of every kernel of forward and backward, for the batch given last."""
        batch = self._batch
        self._step.load_from_device(self._address(batch), np.dtype(batch.dtype).name, batch.shape)
        return self._step.profile()

    @property
    def step_graph(self) -> Graph:
        """What the latest training pass has run: the graph after all passes."""
        return self._step.graph

    def largest_batch(self) -> int:
        return self._step.largest_batch()

    def end_step(self) -> None:
        """Wait for the step before the latest one: the GPU always has the next one waiting, and no more than that."""
        self._idle.end_step()
        step_before, self._last_step = self._last_step, self._step.gpu.record_event()
        if step_before:
            step_before.sync()
            self.idle_seconds = self._idle.take_seconds()

class DeviceOptimizer:
    """The executor's own, as an `Optimizer`."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor

    @property
    def state(self) -> dict[str, dict[str, Array]]:
        return self._executor.state

    @property
    def ema(self) -> dict[str, Array]:
        return self._executor.ema

    def swap_ema(self) -> None:
        self._executor.swap_ema()

    @property
    def scalars(self) -> Mapping[str, float]:
        """The dynamic loss scale and the number of updates; waits for the GPU."""
        return self._executor.get_scalars()

    @scalars.setter
    def scalars(self, scalars: Mapping[str, float]) -> None:
        self._executor.set_scalars(scalars)

    def step(self, learning_rate: float, scale: float = 1.0, ema_decay: float = 0.0) -> None:
        """From the executor's own gradients, which are first multiplied by `scale`. Asynchronous."""
        self._executor.update(learning_rate, scale, ema_decay)
