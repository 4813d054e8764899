"""The optimizer on the GPU: any rule of `graph_passes.optimizers`, with dynamic loss scaling, in a few launches.

All values that control a step are in a small struct on the GPU (`State` of optimizer.cu). The host only writes the
values of the next step into this struct.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernel_library import KernelLibrary, count, instance
from graph_passes.executors.cuda.parameters import VECTOR, ParameterStore
from graph_passes.optimizers import Rule
from graph_passes.optimizers.sgd import SGD

_CUDA = Declarations("optimizer.cu")
# CHUNK: elements that a block updates
CHUNK, THREADS, MAX_CONSTANTS = _CUDA.values("CHUNK", "THREADS", "MAX_CONSTANTS")
# For float16. Gradients of a batch mean are small. With this scale ResNet-50's gradients fit into float16 with a wide
# margin on both sides.
INITIAL_LOSS_SCALE = 1024.0


@dataclass(frozen=True)
class OptimizerConfig:
    """A rule, with the options of its GPU implementation. The learning rate is given at every step.

    `loss_scale`: a constant, or None for dynamic scaling in float16 and 1 in other types. Dynamic scaling begins with
    `initial_loss_scale` and doubles after `growth_interval` good steps. `ema`: keep moving averages of parameters and
    running statistics, with the decay given at every step. `rate_factors`: factors of the learning rate, by parameter,
    if not 1. `clip_norm`: the largest global norm of the gradients; 0: no clipping.
    """

    rule: Rule = field(default_factory=SGD)
    loss_scale: float | None = None
    initial_loss_scale: float = INITIAL_LOSS_SCALE
    growth_interval: int = 2000
    ema: bool = False
    rate_factors: Mapping[str, float] = field(default_factory=dict)
    clip_norm: float = 0.0


class State(ctypes.Structure):
    """`State` of optimizer.cu."""

    _fields_ = _CUDA.fields("State")


class _Tensor(ctypes.Structure):
    """`Tensor` of optimizer.cu."""

    _fields_ = _CUDA.fields("Tensor")


class Optimizer:
    """Updates the store's master weights, and their copies in the network's dtype, from the store's gradients. The
    rule's state is in the first arrays of the store's `states`.

    `state_address`: the address of sizeof(State) bytes of device memory, from which the loss kernel reads the loss
    scale.
    """

    def __init__(self, gpu: Gpu, kernels: KernelLibrary, store: ParameterStore, config: OptimizerConfig,
                 state_address: int) -> None:
        self._gpu, self._store, self.config, self._state_address = gpu, store, config, state_address
        rule = config.rule
        needs_norms = rule.norms_of == "gradient", rule.norms_of == "gradient" or config.clip_norm > 0
        self._inspect = kernels.get("optimizer.cu", instance("inspect_gradients", store.dtype, *needs_norms))
        if config.clip_norm:
            self._clip = kernels.get("optimizer.cu", "clip_gradients")
        if rule.norms_of == "update":
            self._accumulate = kernels.get("optimizer.cu", instance("accumulate", store.dtype, rule.kernel))
        if rule.norms_of:
            self._trust_ratios = kernels.get("optimizer.cu", instance("trust_ratios", rule.kernel))
        self._update = kernels.get("optimizer.cu", instance("update", store.dtype, rule.kernel))
        self._end_step = kernels.get("optimizer.cu", "end_step")
        self._ema_statistics = kernels.get("optimizer.cu", "ema_statistics")
        self._copy = kernels.get("optimizer.cu", instance("copy_weights", store.dtype))

        tensors, chunks = self._tables()
        self._num_tensors = len(store.trained)
        self._num_chunks = sum(tensor.num_chunks for tensor in tensors[: self._num_tensors])
        self._num_copied_chunks = len(chunks)
        self._tensors = self._on_device(np.frombuffer(bytes(tensors), np.uint8))
        self._chunks = self._on_device(chunks)
        self._norms = gpu.allocate(self._num_chunks * 2 * 4)
        self._trust = gpu.allocate(self._num_tensors * 4)
        dynamic = config.loss_scale is None and store.dtype == "float16"
        # Without loss scaling no step is skipped for an overflow: NaN then reaches the loss.
        self._inspects = dynamic or any(needs_norms)
        constants = (ctypes.c_float * MAX_CONSTANTS)(*rule.kernel_constants)
        self._write_state(State(
            gradient_scale=1.0, loss_scale=config.initial_loss_scale if dynamic else config.loss_scale or 1.0,
            growth_interval=config.growth_interval if dynamic else 0, constants=constants,
            clip_norm=config.clip_norm))

    def _tables(self) -> tuple[ctypes.Array[_Tensor], np.ndarray]:
        """A table of all parameters, trained parameters first, and a table of their chunks in the order of the
        parameters.
        """
        store, gradients, rule = self._store, self._store.reduced_gradients, self.config.rule
        rows: list[_Tensor] = []
        chunks: list[tuple[int, int]] = []
        for number, parameter in enumerate(store.parameters.values()):
            name, size = parameter.name, parameter.size
            num_chunks = -(-size // CHUNK)
            row = _Tensor(master=store.master.slices[name].address, size=size, first_chunk=len(chunks),
                          num_chunks=num_chunks)
            if copy := store.copies.slices.get(name):
                row.copy = copy.address
            if gradient := gradients.get(name):  # a parameter without a gradient is frozen
                row.gradient, row.fp32_gradient = gradient.address, int(gradient.dtype == "float32")
                for slot, state in enumerate(store.states[: len(rule.slots)]):
                    row.state[slot] = state.slices[name].address
                if self.config.ema:
                    row.ema = store.ema.slices[name].address
                row.is_weight, row.weight_decay = int(parameter.is_weight), rule.decay(parameter.is_weight)
                row.rate_factor = self.config.rate_factors.get(name, 1.0)
            rows.append(row)
            chunks += [(number, start) for start in range(0, size, CHUNK)]
        return (_Tensor * len(rows))(*rows), np.array(chunks, np.uint32)

    def _on_device(self, array: np.ndarray) -> int:
        address = self._gpu.allocate(array.nbytes)
        self._gpu.upload(address, array)
        return address

    def _write_state(self, state: State) -> None:
        self._gpu.upload(self._state_address, np.frombuffer(bytes(state), np.uint8))

    def close(self) -> None:
        """Free the optimizer's own memory after its last launch. The state of the parameters stays."""
        self._gpu.synchronize()
        for address in (self._tensors, self._chunks, self._norms, self._trust):
            self._gpu.free(address)

    # --- the launches of a step ---

    def enqueue_update(self) -> None:
        """Enqueue the launches of one step."""
        every_chunk, block = (self._num_chunks, 1, 1), (THREADS, 1, 1)
        if self._inspects:
            self._inspect.launch(every_chunk, block, self._tensors, self._chunks, self._state_address, self._norms)
        if self.config.clip_norm:
            self._clip.launch((1, 1, 1), block, self._state_address, self._norms, ctypes.c_uint32(self._num_chunks))
        if self.config.rule.norms_of == "update":
            self._accumulate.launch(every_chunk, block, self._tensors, self._chunks, self._state_address, self._norms)
        if self.config.rule.norms_of:
            self._trust_ratios.launch((self._num_tensors, 1, 1), block, self._tensors, self._state_address, self._norms,
                                      self._trust)
        self._update.launch(every_chunk, block, self._tensors, self._chunks, self._state_address, self._trust)
        if self.config.ema:
            own, ema = self._store.statistics, self._store.ema_statistics
            self._ema_statistics.launch((-(-ema.size // (THREADS * VECTOR)), 1, 1), block, own.address,
                                            ema.address, self._state_address, count(ema.size))
        self._end_step.launch((1, 1, 1), (1, 1, 1), self._state_address)

    def enqueue_copy(self) -> None:
        """Update the copies in the network's dtype after the master weights were set."""
        if self._store.dtype != "float32":
            self._copy.launch((self._num_copied_chunks, 1, 1), (THREADS, 1, 1), self._tensors, self._chunks)

    def set_step(self, learning_rate: float, gradient_scale: float = 1.0, ema_decay: float = 0.0) -> None:
        """Set the values for the next update, in order with the stream, without waiting."""
        self._gpu.write_word(self._state_address + State.learning_rate.offset, np.float32(learning_rate))
        self._gpu.write_word(self._state_address + State.gradient_scale.offset, np.float32(gradient_scale))
        if self.config.ema:
            self._gpu.write_word(self._state_address + State.ema_decay.offset, np.float32(ema_decay))

    def read_state(self) -> State:
        """Read the state; waits for the GPU."""
        content = self._gpu.download(self._state_address, (ctypes.sizeof(State),), np.uint8)
        return State.from_buffer_copy(content.tobytes())

    def get_scalars(self) -> dict[str, float]:
        """The state of dynamic loss scaling and the number of updates, for resuming a run. Waits for the GPU."""
        state = self.read_state()
        return {name: getattr(state, name) for name in self._scalars(state)}

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Restore the values of `get_scalars`. Waits for the GPU."""
        state = self.read_state()
        for name in self._scalars(state) & scalars.keys():
            setattr(state, name, float(scalars[name]) if name == "loss_scale" else int(scalars[name]))
        self._write_state(state)

    def _scalars(self, state: State) -> set[str]:
        """Fields of the state that a resumed run needs."""
        scaling = {"loss_scale", "good_steps"} if state.growth_interval else set()
        return scaling | ({"updates"} if self.config.rule.counts else set())
