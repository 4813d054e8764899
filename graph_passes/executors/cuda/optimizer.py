"""The optimizer on the GPU: SGD with momentum (or Nesterov) or LARS, with dynamic loss scaling, in a few launches.

All that decides about a step lies in one small struct on the GPU (`State` of optimizer.cu); the host only writes the
learning rate into it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernels import KernelLibrary, count, instance
from graph_passes.executors.cuda.parameters import VECTOR, ParameterStore

CHUNK = 8192  # elements a block updates; CHUNK of optimizer.cu
THREADS = 256  # THREADS of optimizer.cu
INITIAL_LOSS_SCALE = 1024.0  # of float16; the gradients of a batch mean are small, ResNet-50's fit far above and below
_SCALING = ("loss_scale", "good_steps")  # fields of State


@dataclass(frozen=True)
class OptimizerConfig:
    """Constants of a run. `weight_decay` applies to weights only; the learning rate is given at every step.

    `loss_scale`: a constant, or None for dynamic scaling in float16 and 1 in other types. `growth_interval`: good steps
    after which a dynamic loss scale doubles. `lars`: trust ratios of You et al., arXiv:1708.03888, for weights.
    `averages`: keep moving averages of parameters and running statistics, with the decay that is given at every step.
    """

    momentum: float = 0.9
    weight_decay: float = 5e-5
    nesterov: bool = False
    lars: bool = False
    trust_coefficient: float = 0.001
    trust_epsilon: float = 0.0
    loss_scale: float | None = None
    growth_interval: int = 2000
    averages: bool = False


class State(ctypes.Structure):
    """`State` of optimizer.cu."""

    _fields_ = (
        ("learning_rate", ctypes.c_float), ("momentum", ctypes.c_float), ("gradient_scale", ctypes.c_float),
        ("loss_scale", ctypes.c_float), ("overflow", ctypes.c_uint32), ("good_steps", ctypes.c_uint32),
        ("skipped_steps", ctypes.c_uint32), ("growth_interval", ctypes.c_uint32),
        ("trust_coefficient", ctypes.c_float), ("trust_epsilon", ctypes.c_float), ("average_decay", ctypes.c_float),
    )


class _Tensor(ctypes.Structure):
    """`Tensor` of optimizer.cu."""

    _fields_ = (
        ("gradient", ctypes.c_void_p), ("master", ctypes.c_void_p), ("momentum", ctypes.c_void_p),
        ("average", ctypes.c_void_p), ("copy", ctypes.c_void_p), ("size", ctypes.c_uint32),
        ("first_chunk", ctypes.c_uint32), ("num_chunks", ctypes.c_uint32), ("fp32_gradient", ctypes.c_uint32),
        ("adapt", ctypes.c_uint32), ("weight_decay", ctypes.c_float),
    )


class Optimizer:
    """Updates the store's master weights from its gradients, and the copies in the network's dtype.

    `state_address`: sizeof(State) bytes of device memory, which the loss kernel reads the loss scale from.
    """

    def __init__(self, gpu: Gpu, kernels: KernelLibrary, store: ParameterStore, config: OptimizerConfig,
                 state_address: int) -> None:
        self._gpu, self._store, self.config, self._state_address = gpu, store, config, state_address
        self._inspect = kernels.get("optimizer.cu", instance("inspect_gradients", store.dtype, config.lars))
        self._trust_ratios = kernels.get("optimizer.cu", "trust_ratios")
        self._update = kernels.get("optimizer.cu", instance("sgd_update", store.dtype, config.lars, config.nesterov))
        self._end_step = kernels.get("optimizer.cu", "end_step")
        self._average_statistics = kernels.get("optimizer.cu", "average_statistics")
        self._copy = kernels.get("optimizer.cu", instance("copy_weights", store.dtype))

        tensors, chunks = self._tables()
        self._num_tensors, self._num_chunks = len(tensors), len(chunks)
        self._tensors = self._on_device(np.frombuffer(bytes(tensors), np.uint8))
        self._chunks = self._on_device(chunks)
        self._norms = gpu.allocate(self._num_chunks * 2 * 4)
        self._trust = gpu.allocate(self._num_tensors * 4)
        dynamic = config.loss_scale is None and store.dtype == "float16"
        # Where nothing scales the loss, nothing overflows that should be skipped: NaN then shows in the loss.
        self._inspects = dynamic or config.lars
        self._write_state(State(
            momentum=config.momentum, gradient_scale=1.0,
            loss_scale=INITIAL_LOSS_SCALE if dynamic else config.loss_scale or 1.0,
            growth_interval=config.growth_interval if dynamic else 0,
            trust_coefficient=config.trust_coefficient, trust_epsilon=config.trust_epsilon))

    def _tables(self) -> tuple[ctypes.Array[_Tensor], np.ndarray]:
        store, gradients = self._store, self._store.averaged_gradients
        rows: list[_Tensor] = []
        chunks: list[tuple[int, int]] = []
        for number, parameter in enumerate(store.parameters.values()):
            size = parameter.size
            copy = store.copies.slices.get(parameter.name)
            average = store.averages.slices[parameter.name] if self.config.averages else None
            num_chunks = -(-size // CHUNK)
            rows.append(_Tensor(
                gradients[parameter.name].address, store.master.slices[parameter.name].address,
                store.momentum.slices[parameter.name].address, average.address if average else None,
                copy.address if copy else None, size, len(chunks), num_chunks,
                int(gradients[parameter.name].dtype == "float32"), int(parameter.is_weight),
                self.config.weight_decay if parameter.is_weight else 0.0))
            chunks += [(number, start) for start in range(0, size, CHUNK)]
        return (_Tensor * len(rows))(*rows), np.array(chunks, np.uint32)

    def _on_device(self, array: np.ndarray) -> int:
        address = self._gpu.allocate(array.nbytes)
        self._gpu.upload(address, array)
        return address

    def _write_state(self, state: State) -> None:
        self._gpu.upload(self._state_address, np.frombuffer(bytes(state), np.uint8))

    # --- what a step does ---

    def enqueue_update(self) -> None:
        """The launches of one step."""
        every_chunk, block = (self._num_chunks, 1, 1), (THREADS, 1, 1)
        if self._inspects:
            self._inspect.launch(every_chunk, block, self._tensors, self._chunks, self._state_address, self._norms)
        if self.config.lars:
            self._trust_ratios.launch((self._num_tensors, 1, 1), block, self._tensors, self._state_address, self._norms,
                                      self._trust)
        self._update.launch(every_chunk, block, self._tensors, self._chunks, self._state_address, self._trust)
        if self.config.averages:
            own, average = self._store.statistics, self._store.average_statistics
            self._average_statistics.launch((-(-own.size // (THREADS * VECTOR)), 1, 1), block, own.address,
                                            average.address, self._state_address, count(own.size))
        self._end_step.launch((1, 1, 1), (1, 1, 1), self._state_address)

    def enqueue_copy(self) -> None:
        """Bring the copies in the network's dtype up to date after the master weights were set."""
        if self._store.dtype != "float32":
            self._copy.launch((self._num_chunks, 1, 1), (THREADS, 1, 1), self._tensors, self._chunks)

    def set_step(self, learning_rate: float, gradient_scale: float = 1.0, average_decay: float = 0.0) -> None:
        """What the next update uses, in order with the stream, without waiting."""
        self._gpu.write_word(self._state_address + State.learning_rate.offset, np.float32(learning_rate))
        self._gpu.write_word(self._state_address + State.gradient_scale.offset, np.float32(gradient_scale))
        if self.config.averages:
            self._gpu.write_word(self._state_address + State.average_decay.offset, np.float32(average_decay))

    def read_state(self) -> State:
        """Waits for the GPU."""
        content = self._gpu.download(self._state_address, (ctypes.sizeof(State),), np.uint8)
        return State.from_buffer_copy(content.tobytes())

    def get_scaling(self) -> dict[str, float]:
        """Where dynamic loss scaling stands, so that a run can go on with it; empty where there is none. Waits."""
        state = self.read_state()
        return {name: getattr(state, name) for name in _SCALING} if state.growth_interval else {}

    def set_scaling(self, scaling: Mapping[str, float]) -> None:
        """Go on with what `get_scaling` gave; changes nothing where the loss scale is not dynamic. Waits."""
        state = self.read_state()
        if scaling and state.growth_interval:
            state.loss_scale, state.good_steps = float(scaling["loss_scale"]), int(scaling["good_steps"])
            self._write_state(state)
