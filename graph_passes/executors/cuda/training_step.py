"""The compiled training step: a graph on one GPU, without MXNet. `executor.py` connects it to MXNet's arrays and
engine.

    step = TrainingStep(graph, {"data": (256, 224, 224, 4), "softmax_label": (256,)}, StepOptions("float16"))
    step.set_params(params, aux)
    step.load(images, labels); step.forward_backward(); step.update(learning_rate=0.1)
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from graph_passes import pipeline, roles
from graph_passes.choice import Choice, Price, plain
from graph_passes.errors import GraphError
from graph_passes.executors.base import Draws
from graph_passes.executors.cuda.buckets import Bucket, bucket_of, cut
from graph_passes.executors.cuda.capacity import check_fits, largest_batch, most_images
from graph_passes.executors.cuda.compiled import CompiledGraph
from graph_passes.executors.cuda.folding import Folded
from graph_passes.executors.cuda.inference import Inference
from graph_passes.executors.cuda.kernel_library import count, instance, threads
from graph_passes.executors.cuda.lowering import LoweredGraph
from graph_passes.executors.cuda.network import Network
from graph_passes.executors.cuda.optimizer import INITIAL_LOSS_SCALE, Optimizer, OptimizerConfig
from graph_passes.executors.cuda.options import StepOptions
from graph_passes.executors.cuda.parameters import VECTOR, FlatArray, ParameterStore, parameters_of
from graph_passes.executors.cuda.profile import Profile, profile
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Graph, Ref
from graph_passes.operators.dropout import words_of
from graph_passes.passes.precision import ITEM_BYTES

Arrays = dict[str, np.ndarray]
Allocate = Callable[[str, int], int | None]  # name, bytes -> device address
OnBucket = Callable[[Bucket], None]


class TrainingStep(Network):
    """Forward, loss, backward and update of one network on one GPU, each a CUDA graph.

    `shapes`: the shapes of the inputs `data` (NHWC) and `softmax_label`. `allocate` returns memory by name, or None for
    plain device memory. `buckets` are in the order in which they are handed over.

    Images of other sizes are allowed. At the first use of a size the step is compiled for it, and replaces the step for
    the previous size. Training and inference do this separately. All compiled graphs share one arena.

    Raises GraphError for an operator without a lowering, a network that is not NHWC, a shape that cuDNN refuses, too
    little memory, and the errors of `Gpu`.
    """

    def __init__(self, graph: Graph, shapes: Mapping[str, tuple[int, ...]], options: StepOptions | None = None,
                 device_id: int = 0, allocate: Allocate | None = None, cache_folder: Path | None = None) -> None:
        options = options or StepOptions()
        super().__init__(graph, shapes, options, device_id, cache_folder)
        self._allocate = allocate or (lambda name, num_bytes: None)
        inferred = graph.infer_shapes(shapes)
        frozen = roles.frozen(graph)
        # Folded parameters of the frozen layers. They are made from the fused graph, because the passes fold the fused
        # graph.
        self._frozen = Folded(pipeline.run(pipeline.FUSED, graph), shapes, options.dtype, self._tools,
                              frozen_only=True) if frozen else None
        self._frozen_is_current = False
        self.store = ParameterStore(
            parameters_of(graph, inferred, tuple(shapes)), {name: inferred[Ref(name)] for name in graph.aux},
            options.dtype, options.wire_dtype, frozen, self._frozen.store if self._frozen else None)
        largest = self._largest_shapes(options.largest_image_size)
        unfused = self._passes(largest)(plain)
        arena_bytes = check_fits(unfused, largest, self.store, *self.gpu.memory())
        self._most_images = most_images(unfused, largest)
        self._place_parameters()
        answer = options.answer or graph.outputs[0]
        self._inferring = Graph(graph, [answer], graph.attrs)  # the graph of inference, before all passes
        self._inferring_shapes = {name: shape for name, shape in shapes.items() if name in self._inferring.nodes}
        self._make_persistent(shapes["data"], inferred[answer])
        self._slots: tuple[str, ...] = ()  # names of the optimizer's states in the store
        self._update: Any = None  # CUDA graph of the update
        self._rate_factors = roles.rate_factors(graph)
        self._initial_loss_scale = _initial_loss_scale(graph, inferred[graph.outputs[0]][1])
        self.set_optimizer(options.optimizer)
        self._completed, self._parts = self._cut_buckets(options.num_buckets)
        self.buckets = [bucket for completed in self._completed for bucket in completed]
        if largest != self._shapes:
            self._arena.reserve(arena_bytes)
        self._training = self._compile()
        self._own_share, self._seed = 1.0, 0  # the values in the GPU's memory for the next pass
        self._gradient_backup: dict[str, int] = {}
        self._folded: Folded | None = None  # parameters of inference
        self._inference_is_current = False

    # --- building ---

    def _place_parameters(self) -> None:
        for name, array in self.store.arrays.items():
            self._place(name, array)

    def _place(self, name: str, array: FlatArray) -> None:
        self.gpu.check_free(array.num_bytes)  # checked here, because MXNet would fail with a stack trace
        address = self._allocate(name, array.num_bytes)
        array.place(self.gpu.allocate(array.num_bytes) if address is None else address)
        self.gpu.fill(array.address, 0, array.num_bytes)

    @property
    def training(self) -> LoweredGraph:
        """Forward and backward pass, for the size of the latest training images."""
        return self._training.lowering

    @property
    def graph(self) -> Graph:
        """The graph of the latest training pass, after all passes."""
        return self._training.graph

    @property
    def choices(self) -> list[Choice]:
        """The kernels of the latest step that had rivals, with the times of all candidates."""
        return self._training.choices

    @property
    def price(self) -> Price:
        """The prices by which the kernels of this step were chosen. They are valid for the same passes on the same
        network.
        """
        return self._training.price

    def profile(self) -> Profile:
        """The profile of forward and backward pass."""
        return profile(self._training, self.gpu, self.kernels)

    def _cut_buckets(self, num_buckets: int) -> tuple[list[list[Bucket]], list[list[str]]]:
        """For each part of the backward pass: the buckets that it completes, and the weights whose gradients come last
        in it.
        """
        store = self.store
        weights = list(store.weight_gradients.slices)
        gradients = store.wire_gradients if store.wire_gradients.size else store.weight_gradients
        ranges = cut([gradients.slices[name].num_bytes for name in weights], num_buckets)
        parts = [weights[first:end] for first, end in ranges]
        buckets = [[bucket_of(self.gpu, f"weights {number}", gradients, part)] for number, part in enumerate(parts, 1)]
        # BatchNorm's parameters and biases are few, so they are sent together at the end.
        others = store.other_gradients
        buckets[-1].append(bucket_of(self.gpu, "others", others, list(others.slices)))
        return buckets, parts

    def _passes(self, shapes: Mapping[str, tuple[int, ...]]) -> Callable[[Price], Graph]:
        """The passes from the network to the step, as a function of the prices of candidates."""
        return partial(pipeline.training_step, self._graph, shapes, self.dtype, grouped=self.options.group is not None)

    def _largest_shapes(self, image_size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the graph's inputs when training images have grown to `image_size` pixels."""
        images, height, width, channels = self._shapes["data"]
        return self._shapes | {"data": (images, max(height, image_size), max(width, image_size), channels)}

    def _loaded_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the graph's inputs for images of the loaded size."""
        images, _, _, channels = self._shapes["data"]
        return self._shapes | {"data": (images, *self.persistent.data.shape[1:3], channels)}

    def _compile(self) -> CompiledGraph:
        """Compile forward and backward for images of the loaded size: one CUDA graph for each part of the weights. The
        first CUDA graph includes the forward pass.
        """
        shapes = self._loaded_shapes()
        compiled = CompiledGraph(self._passes(shapes), shapes, self.store, self.persistent, self._tools)
        ready, cuts = compiled.lowering.ready, [0]
        for part in self._parts[:-1]:
            cuts.append(max(cuts[-1], *(ready[name] for name in part)))
        compiled.capture(cuts[1:])
        return compiled

    def set_optimizer(self, config: OptimizerConfig) -> None:
        """Replace the optimizer. Parameters stay, and so does optimizer state that the new optimizer also has. The loss
        scale starts anew."""
        config = dataclasses.replace(config, rate_factors=self._rate_factors,
                                     initial_loss_scale=self._initial_loss_scale)
        slots = config.rule.slots
        for number, array in enumerate(self.store.states[: len(slots)], start=1):
            if not array.address:
                self._place(f"state {number}", array)
            elif slots != self._slots:
                self.gpu.fill(array.address, 0, array.num_bytes)
        self._slots = slots
        if config.ema and not self.store.ema.address:
            self._place("ema", self.store.ema)
            self._place("ema_statistics", self.store.ema_statistics)
        if self._update is not None:
            self.optimizer.close()
            self.gpu.destroy(self._update)
        self.optimizer: Optimizer = Optimizer(self.gpu, self.kernels, self.store, config, self._state_address)
        self._update = self.gpu.capture(self.optimizer.enqueue_update)

    # --- parameters ---

    def set_params(self, params: Mapping[str, np.ndarray], aux: Mapping[str, np.ndarray]) -> None:
        """Set parameters and running statistics from canonical arrays (fp32, OHWI). Raises GraphError if an array is
        missing or has another shape.
        """
        for name, parameter in self.store.parameters.items():
            self._check(name, params.get(name), parameter.shape)
            self.gpu.upload(self.store.master.slices[name].address, parameter.to_device(params[name]))
        for name, buffer in self.store.statistics.slices.items():
            self._check(name, aux.get(name), buffer.shape)
            self.gpu.upload(buffer.address, np.asarray(aux[name], np.float32))
        self.optimizer.enqueue_copy()
        self.parameters_changed()

    def parameters_changed(self) -> None:
        """Call this after writing parameters or running statistics through their addresses. Inference and frozen layers
        use folded copies. After this call, the copies are computed again before their next use.
        """
        self._inference_is_current = self._frozen_is_current = False

    @staticmethod
    def _check(name: str, array: np.ndarray | None, shape: tuple[int, ...]) -> None:
        if array is None or tuple(np.shape(array)) != tuple(shape):
            given = "is missing" if array is None else f"has the shape {tuple(np.shape(array))}"
            raise GraphError(f"'{name}' {given}: the network needs {tuple(shape)}")

    def get_params(self) -> tuple[Arrays, Arrays]:
        """Canonical copies of parameters and running statistics."""
        params = {name: self._read(self.store.master.slices[name], name) for name in self.store.parameters}
        statistics = self.store.statistics.slices
        aux = {name: self.gpu.download(buffer.address, buffer.shape, np.float32) for name, buffer in statistics.items()}
        return params, aux

    def swap_ema(self) -> None:
        """Exchange parameters and running statistics with their moving averages. Asynchronous."""
        self._inference_is_current = False
        store, kernel = self.store, self.kernels.get("elementwise.cu", "exchange")
        for own, ema in ((store.master, store.ema), (store.statistics, store.ema_statistics)):
            vectors = ema.size // 4  # `ema` covers the trained parameters; frozen parameters come after these
            kernel.launch(*threads(vectors), own.address, ema.address, count(vectors))
        self.optimizer.enqueue_copy()

    @property
    def states(self) -> dict[str, FlatArray]:
        """The optimizer's state, by slot."""
        return dict(zip(self._slots, self.store.states, strict=False))

    def get_state(self) -> dict[str, Arrays]:
        """Canonical copies of the optimizer's state, by slot."""
        return {slot: {name: self._read(array.slices[name], name) for name in array.slices}
                for slot, array in self.states.items()}

    def set_state(self, state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """The inverse of `get_state`."""
        for slot, array in self.states.items():
            for parameter in self.store.trained:
                self.gpu.upload(array.slices[parameter.name].address, parameter.to_device(state[slot][parameter.name]))

    def get_gradients(self) -> Arrays:
        """Canonical gradients of the latest pass, without the loss scale."""
        scale = self.optimizer.read_state().loss_scale
        return {name: self._read(buffer, name) / np.float32(scale) for name, buffer in self.store.gradients.items()}

    def _read(self, buffer: Buffer, name: str) -> np.ndarray:
        parameter = self.store.parameters[name]
        if buffer.dtype == "bfloat16":
            bits = self.gpu.download(buffer.address, (parameter.size,), np.uint16)
            return parameter.to_canonical((bits.astype(np.uint32) << 16).view(np.float32))
        return parameter.to_canonical(self.gpu.download(buffer.address, (parameter.size,), buffer.dtype))

    # --- running ---

    def mix(self, draws: Draws) -> None:
        """Mix the loaded batch by `draws`, and set the label shares for the next passes over this batch. If `draws` has
        no mixing, the batch is unchanged. Asynchronous. Raises GraphError for a box that reaches outside the images.
        """
        data = self.persistent.data
        images, height, width, channels = data.shape
        own_share = draws.own_share(height, width)
        if own_share != self._own_share:
            self.gpu.write_word(self.persistent.own_share.address, np.float32(own_share))
            self._own_share = own_share
        pairs, size = -(-images // 2), height * width * channels
        if draws.mixup < 1:
            kernel = self.kernels.get("elementwise.cu", instance("mix_images", data.dtype))
            kernel.launch((-(-size // 1024) * pairs, 1, 1), (256, 1, 1), data.address, ctypes.c_int64(size),
                          ctypes.c_int(images), ctypes.c_float(draws.mixup))
        elif own_share < 1:
            assert draws.cutmix
            top, left, bottom, right = draws.cutmix
            kernel = self.kernels.get("elementwise.cu", instance("exchange_boxes", data.dtype, channels))
            kernel.launch((-(-(bottom - top) * (right - left) // 256) * pairs, 1, 1), (256, 1, 1), data.address,
                          *map(ctypes.c_int, (images, height, width, *draws.cutmix)))

    def set_seed(self, seed: int) -> None:
        """Set the 64-bit seed of the next passes' Dropout masks. Asynchronous."""
        if seed != self._seed:
            for number, word in enumerate(words_of(seed)):
                self.gpu.write_word(self.persistent.seed.address + number * ITEM_BYTES["uint32"], word)
            self._seed = seed

    def forward_backward(self, accumulate: bool = False, on_bucket: OnBucket | None = None, batch: int = 0) -> None:
        """One pass over the loaded batch, or over the batch at the address that `take` returned. Writes the gradients,
        multiplied by the loss scale, to the store. With `accumulate`, adds them to the present gradients. Calls
        `on_bucket` with each bucket once its kernels are enqueued. Asynchronous.
        """
        self._inference_is_current = False  # this pass changes the running statistics
        if self._frozen and not self._frozen_is_current:
            self._frozen.fold(self.store)
            self._frozen_is_current = True
        if self._training.image_size != self.persistent.data.shape[1:3]:
            self._training.close()
            self._training = self._compile()
            self._free_inputs()
        if accumulate:
            self._back_up_gradients()
        for number in range(self._training.num_segments):
            self._training.replay(number, batch)
            if on_bucket and not accumulate:
                self._hand_over(number, on_bucket)
        if accumulate:
            self._add_gradient_backup()
            if on_bucket:
                self.hand_over(on_bucket)

    def hand_over(self, on_bucket: OnBucket) -> None:
        """Call `on_bucket` with each bucket of the present gradients."""
        for number in range(self._training.num_segments):
            self._hand_over(number, on_bucket)

    def _hand_over(self, number: int, on_bucket: OnBucket) -> None:
        if self.store.wire_gradients.size:
            source, bucket = self.store.weight_gradients, self._completed[number][0]
            start = (bucket.address - self.store.wire_gradients.address) // ITEM_BYTES[bucket.dtype]
            vectors = bucket.num_elements // VECTOR
            kernel = self.kernels.get("elementwise.cu", instance("widen", source.dtype))
            kernel.launch(*threads(vectors), source.address + start * ITEM_BYTES[source.dtype], bucket.address,
                          count(vectors))
        for bucket in self._completed[number]:
            self.gpu.record(bucket.ready)
            on_bucket(bucket)

    def _back_up_gradients(self) -> None:
        for name, array in self._gradient_arrays.items():
            if name not in self._gradient_backup:
                self._gradient_backup[name] = self.gpu.allocate(array.num_bytes)
            self.gpu.copy(self._gradient_backup[name], array.address, array.num_bytes)

    def _add_gradient_backup(self) -> None:
        for name, array in self._gradient_arrays.items():
            vectors = array.size // VECTOR
            kernel = self.kernels.get("elementwise.cu", instance("add", array.dtype))
            kernel.launch(*threads(vectors), array.address, self._gradient_backup[name], array.address, count(vectors))

    @property
    def _gradient_arrays(self) -> dict[str, FlatArray]:
        return {"weights": self.store.weight_gradients, "others": self.store.other_gradients}

    def update(self, learning_rate: float, gradient_scale: float = 1.0, ema_decay: float = 0.0) -> None:
        """One optimizer step. Asynchronous."""
        self._inference_is_current = False
        self.optimizer.set_step(learning_rate, gradient_scale, ema_decay)
        self.gpu.replay(self._update)

    def _ready_inference(self) -> Inference:
        """The inference object, which is made at its first use. If parameters have changed since the last use, they are
        folded again.
        """
        if self._folded is None:
            self._folded = Folded(self._inferring, self._inferring_shapes, self.dtype, self._tools)
        if self._inference is None:
            passes = partial(pipeline.inference, self._inferring, self.dtype)
            self._inference = Inference(passes, self._inferring_shapes, self._folded.store, self._tools)
        if not self._inference_is_current:
            self._folded.fold(self.store)
            self._inference_is_current = True
        return self._inference

    def _image_sizes_in_use(self) -> set[tuple[int, ...]]:
        return super()._image_sizes_in_use() | {self._training.image_size}

    def largest_batch(self) -> int:
        """The largest batch of a training step on this GPU, with the present contents of its memory."""
        free, _ = self.gpu.memory()
        growing = self._arena.num_bytes + self.persistent.data.num_bytes
        return largest_batch(self._shapes["data"][0], growing, free + growing, self._most_images)

def _initial_loss_scale(graph: Graph, classes: int) -> float:
    """The initial loss scale for float16. If the loss is a mean over the classes, the scale is multiplied by the number
    of classes, because gradients are smaller by this factor, and doubling would take thousands of steps each time.
    """
    if graph[graph.outputs[0].node].op != "SigmoidOutput":
        return INITIAL_LOSS_SCALE
    return min(INITIAL_LOSS_SCALE * 2.0 ** (classes.bit_length() - 1), 2.0**24)
