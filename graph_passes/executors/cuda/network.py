"""A network on one GPU, without MXNet: its toolchain, inputs and outputs. Training and INT8 inference share it."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.executors.base import Metrics
from graph_passes.executors.cuda.builder import MAX_CHANNELS, TILE_CHANNELS
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.inference import Inference
from graph_passes.executors.cuda.kernel_library import C_TYPES, instance, threads
from graph_passes.executors.cuda.lowering import Persistent, check_operators
from graph_passes.executors.cuda.optimizer import State
from graph_passes.executors.cuda.options import StepOptions
from graph_passes.executors.cuda.parameters import padded_channels
from graph_passes.executors.cuda.profile import Profile, profile
from graph_passes.executors.cuda.program import Buffer
from graph_passes.executors.cuda.toolchain import toolchain
from graph_passes.graph import Graph, Ref
from graph_passes.passes import precision, tensor_dtypes
from graph_passes.passes.memory import ALIGNMENT


class MetricsLayout(ctypes.Structure):
    """The layout of `Metrics` in GPU memory, as in softmax.cu."""

    _fields_ = Declarations("softmax.cu").fields("Metrics")


class Network:
    """Takes batches, computes probabilities, and adds to the metrics.

    `shapes`: the shapes of the inputs `data` (NHWC) and `softmax_label`. Images of other sizes are allowed: the network
    is compiled for a size when it is first used.
    """

    def __init__(self, graph: Graph, shapes: Mapping[str, tuple[int, ...]], options: StepOptions, device_id: int,
                 cache_folder: Path | None) -> None:
        check_operators(graph)
        self.options, self.dtype = options, options.dtype
        self.gpu = Gpu(device_id)
        self._tools = toolchain(self.gpu, options.tf32, options.deterministic, options.group, cache_folder)
        self.kernels, self._arena = self._tools.kernels, self._tools.arena
        self._graph, self._shapes = graph, dict(shapes)
        self._inference: Inference | None = None
        self._free_pinned: list[np.ndarray] = []  # unused pinned arrays for metrics
        # unused buffers for probabilities: addresses on the GPU, and pinned arrays
        self._free_answers: list[tuple[int, np.ndarray]] = []
        self.skipped_steps = self.skipped_in_a_row = 0  # see `Executor`
        self.gradient_norm: float | None = None  # see `Executor`

    def _make_persistent(self, data: tuple[int, ...], answer: tuple[int, ...]) -> None:
        """Allocate inputs and outputs for data and an answer of these shapes."""
        images, height, width, channels = data
        state = self._zeros(ctypes.sizeof(State))
        sized: dict[str, tuple[tuple[int, ...], str]] = {
            "data": ((images, height, width, padded_channels(channels)),
                     tensor_dtypes(precision(self._graph, self.dtype))[Ref("data")]),
            "label": ((images,), "float32"),
            "own_share": ((1,), "float32"),
            "seed": ((2,), "uint32"),
            "metrics": ((ctypes.sizeof(MetricsLayout),), "uint8"),
            "num_valid": ((1,), "int32"),
            "tickets": ((MAX_CHANNELS // TILE_CHANNELS,), "int32"),
        }
        buffers = {name: Buffer(name, shape, dtype, persistent=True) for name, (shape, dtype) in sized.items()}
        for buffer in buffers.values():
            buffer.address = self._zeros(buffer.num_bytes)
        probabilities = Buffer("probabilities", (images, math.prod(answer[1:])), "float32", persistent=True)
        probabilities.address = self._zeros(probabilities.num_bytes)
        self.gpu.upload(buffers["num_valid"].address, np.array([images], np.int32))
        self.gpu.upload(buffers["own_share"].address, np.ones(1, np.float32))
        loss_scale = Buffer("loss_scale", (1,), "float32", state + State.loss_scale.offset, persistent=True)
        class_weights = None
        if weights := self._graph[self._graph.outputs[0].node].get("class_weights", ()):
            class_weights = Buffer("class_weights", (len(weights),), "float32", persistent=True)
            class_weights.address = self.gpu.allocate(class_weights.num_bytes)
            self.gpu.upload(class_weights.address, np.array(weights, np.float32))
        self.persistent = Persistent(**buffers, probabilities=probabilities, loss_scale=loss_scale,
                                     class_weights=class_weights)
        self._inputs = {self.persistent.data.shape[1:3]: self.persistent.data}  # (image height, width) -> input buffer

    def _zeros(self, num_bytes: int) -> int:
        address = self.gpu.allocate(num_bytes)
        self.gpu.fill(address, 0, num_bytes)
        return address

    @property
    def _state_address(self) -> int:
        """The address of the optimizer's `State`."""
        return self.persistent.loss_scale.address - State.loss_scale.offset

    def _select_input(self, image_size: tuple[int, ...]) -> None:
        """Select the input buffer for images of this size as the one that is loaded and used."""
        if image_size not in self._inputs:
            images, _, _, channels = self.persistent.data.shape
            buffer = Buffer("data", (images, *image_size, channels), self.persistent.data.dtype, persistent=True)
            buffer.address = self._zeros(buffer.num_bytes)
            self._inputs[image_size] = buffer
        self.persistent = dataclasses.replace(self.persistent, data=self._inputs[image_size])

    def _free_inputs(self) -> None:
        """Free the input buffers of sizes for which no compiled graph exists any more."""
        for image_size in self._inputs.keys() - self._image_sizes_in_use():
            self.gpu.synchronize()
            self.gpu.free(self._inputs.pop(image_size).address)

    def _image_sizes_in_use(self) -> set[tuple[int, ...]]:
        """Image sizes of the loaded batch and of compiled graphs."""
        used = {self.persistent.data.shape[1:3]}
        return used | {self._inference.image_size} if self._inference else used

    # --- running ---

    def load(self, data: np.ndarray, label: np.ndarray) -> None:
        """Copy a batch from the host: `data` NHWC, float32 or float16, `label` (N,)."""
        data = np.ascontiguousarray(data)
        staging = self.gpu.allocate(data.nbytes)
        self.gpu.upload(staging, data)
        self.load_from_device(staging, data.dtype.name, data.shape)
        self.gpu.upload(self.persistent.label.address, np.asarray(label, np.float32))
        self.gpu.free(staging)

    def take(self, address: int, dtype: str, shape: tuple[int, ...]) -> int:
        """Use a batch that is on the GPU for the next pass. If the network can read the batch directly, return its
        address. Otherwise load the batch and return 0.
        """
        self._accept(dtype, shape)
        if self._is_as_wanted(dtype, shape) and address % ALIGNMENT == 0:
            return address
        self.load_from_device(address, dtype, shape)
        return 0

    def load_from_device(self, address: int, dtype: str, shape: tuple[int, ...]) -> None:
        """Load a batch on the GPU: convert and pad it into the network's input, asynchronously."""
        self._accept(dtype, shape)
        target = self.persistent.data
        if self._is_as_wanted(dtype, shape):
            self.gpu.copy(target.address, address, target.bytes_of(shape[0]))
            return
        kernel = self.kernels.get("elementwise.cu", instance("convert_input", dtype, target.dtype))
        pixels = shape[0] * shape[1] * shape[2]
        kernel.launch(*threads(pixels), address, target.address, ctypes.c_int64(pixels), ctypes.c_int(shape[3]),
                      ctypes.c_int(target.shape[3]))

    def _accept(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Check a batch, and prepare the network for its image size. Raises GraphError for a batch that the network was
        not built for.
        """
        made = self.persistent.data.shape
        if len(shape) != 4 or shape[0] > made[0] or shape[3] > made[3]:
            raise GraphError(f"data has the shape {tuple(shape)}: the network was built for {made}")
        if dtype not in C_TYPES:
            raise GraphError(f"data has the dtype {dtype}: give one of {', '.join(C_TYPES)}")
        self._select_input(tuple(shape[1:3]))

    def _is_as_wanted(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether the network can read the batch without conversion."""
        return dtype == self.persistent.data.dtype and shape[3] == self.persistent.data.shape[3]

    def infer(self, num_images: int | None = None, batch: int = 0) -> None:
        """Forward pass with running statistics: computes the probabilities and adds to the metrics.

        `num_images`: size of the batch, if it is smaller than the network's batch size. `batch`: address returned by
        `take`; 0 for the loaded batch. Asynchronous, except for the first batch of a new size.
        """
        num_images = num_images or self._shapes["data"][0]
        self._prepared(num_images).run(num_images, batch)

    def prepare_inference(self, image_size: tuple[int, int]) -> None:
        """Compile inference for whole batches of images of this size. Otherwise the first `infer` would compile it."""
        self._select_input(image_size)
        self._prepared(self._shapes["data"][0])

    def _prepared(self, num_images: int) -> Inference:
        """The graph compiled for this many images of the loaded size."""
        inference = self._ready_inference()
        size_before = inference.image_size
        inference.prepare(num_images, self.persistent)
        if inference.image_size != size_before:
            self._free_inputs()
        return inference

    def _ready_inference(self) -> Inference:
        """The inference object, updated to the present parameters."""
        raise NotImplementedError

    def profile_inference(self) -> Profile:
        """Profile the latest `infer`, on the loaded batch."""
        assert self._inference and self._inference.latest
        return profile(self._inference.latest, self.gpu, self.kernels)

    def set_num_valid(self, num_valid: int) -> None:
        """Set how many rows of the next batches count in the metrics."""
        self.gpu.write_word(self.persistent.num_valid.address, np.uint32(num_valid))

    def probabilities(self) -> np.ndarray:
        """Probabilities of the latest `infer`, (N, classes); waits."""
        return self.gpu.download(self.persistent.probabilities.address, self.persistent.probabilities.shape, np.float32)

    def request_probabilities(self, num_images: int) -> Callable[[], np.ndarray]:
        """Probabilities of the first images of the latest `infer`, (N, classes) float32, without waiting. Returns a
        function, to be called once, that waits only for this pass and returns the array. The probabilities are first
        copied within the GPU, so that the next pass need not wait for the slower copy to the host.
        """
        source = self.persistent.probabilities
        if not self._free_answers:
            self._free_answers.append((self.gpu.allocate(source.num_bytes), self.gpu.pinned(source.num_bytes)))
        place = on_gpu, pinned = self._free_answers.pop()
        size = source.bytes_of(num_images)
        self.gpu.copy(on_gpu, source.address, size)
        copied = self.gpu.start_download(pinned[:size], on_gpu, beside=True)

        def receive() -> np.ndarray:
            copied.sync()
            answer = pinned[:size].view(np.float32).reshape(num_images, -1).copy()
            self._free_answers.append(place)
            return answer

        return receive

    def read_metrics(self) -> Metrics:
        """The metrics of all passes since the last call; waits and resets.

        Raises GraphError if another GPU of the group did not answer.
        """
        return self.request_metrics()()

    def request_metrics(self) -> Callable[[], Metrics]:
        """`read_metrics` without waiting. Returns a function, to be called once, that waits for the passes enqueued so
        far and returns their metrics.
        """
        buffer, size = self.persistent.metrics, self.persistent.metrics.num_bytes
        pinned = self._free_pinned.pop() if self._free_pinned else self.gpu.pinned(size + ctypes.sizeof(State))
        self.gpu.start_download(pinned[:size], buffer.address)
        self.gpu.fill(buffer.address, 0, size)
        copied = self.gpu.start_download(pinned[size:], self._state_address)

        def receive() -> Metrics:
            copied.sync()
            if self.options.group:
                self.options.group.check()
            sums = MetricsLayout.from_buffer_copy(pinned[:size].tobytes())
            state = State.from_buffer_copy(pinned[size:].tobytes())
            self._free_pinned.append(pinned)
            self.skipped_steps, self.skipped_in_a_row = state.skipped_steps, state.skipped_in_a_row
            self.gradient_norm = state.gradient_norm if state.clip_norm else None
            return Metrics(sums.loss_sum, sums.top1, sums.top5, sums.count)

        return receive
