"""The interface that all executors share. `create_executor` (`executors/__init__.py`) makes executors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graph_passes import roles
from graph_passes.errors import GraphError
from graph_passes.graph import Graph, Ref
from graph_passes.operators import Shape
from graph_passes.operators.softmax import TOP_K
from graph_passes.optimizers import ArrayOptimizer, Optimizer, Rule
from graph_passes.passes.layout import weight_layouts

__all__ = ["NO_DRAWS", "TOP_K", "Arrays", "Box", "Draws", "Executor", "Metrics", "parse_device", "wrong_shape"]

Arrays = dict[str, np.ndarray]


class Metrics(NamedTuple):
    """Sums over images, for one process or for all processes: the network's loss in nats (with label smoothing; for
    binary cross entropy the mean over the classes), top-1 and top-5 hits, and the number of images.
    """

    loss_sum: float
    top1: float
    top5: float
    count: float  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


class Box(NamedTuple):
    """A part of an image, in pixels: rows from `top` to before `bottom`, columns from `left` to before `right`."""

    top: int
    left: int
    bottom: int
    right: int


class Draws(NamedTuple):
    """The random choices of a training pass. The caller derives these choices from the position in the run, so that any
    pass can be repeated on any executor.

    Image i of a batch of n is mixed with image n - 1 - i. The loss is computed with the mixed targets. Hits are counted
    for the label with the larger share of the image. This is mostly the image's own label, and the partner's label if
    `cutmix` covers more than half of the image. If the shares are equal, the label with the smaller number counts.

    mixup: lambda of Zhang et al., arXiv:1710.09412, from 0.5 to 1: each image becomes lambda * image + (1 - lambda) *
        partner, and targets are mixed likewise.
    cutmix: the box of Yun et al., arXiv:1905.04899, in pixels of this batch's images. Inside the box each image has its
        partner's pixels, and its target is the mean of both targets, weighted by area. None: no box. A batch has either
        mixup or cutmix.
    seed: 64 bits that determine the masks of all Dropouts (`operators/dropout.py`).
    """

    mixup: float = 1.0
    cutmix: Box | None = None
    seed: int = 0

    @property
    def mixes(self) -> bool:
        return self.mixup < 1 or self.cutmix is not None

    def own_share(self, height: int, width: int) -> float:
        """The share of an image's own label in its target. Raises GraphError for a box outside images of this size, and
        for a box together with mixup."""
        if self.cutmix is None:
            return self.mixup
        top, left, bottom, right = self.cutmix
        if not (0 <= top <= bottom <= height and 0 <= left <= right <= width and self.mixup == 1):
            raise GraphError(f"cutmix is {self.cutmix} and mixup is {self.mixup:g} for images of {height}x{width}: "
                             "give a box inside the image (top, left, bottom, right), and mixup 1")
        return 1 - (bottom - top) * (right - left) / (height * width)


NO_DRAWS = Draws()


class Executor(ABC):
    """Runs one graph on one device.

    An executor is made for one batch size. The height and width of images may change: the network is built for a new
    size, with the same parameters, at the first batch of that size or in `prepare_inference`. Training and inference
    may have different sizes; both keep the network of their latest size.

    `params`, `aux` (running statistics) and `grads` (of the latest backward pass, or the sum of several; `frozen`
    parameters have none) are live arrays by variable name, in this executor's own layout. The canonical layout of a
    convolution's weight is OHWI. On a GPU, reading these attributes makes the host wait: read them anew in every step,
    and only if needed.
    """

    params: dict[str, Any]
    aux: dict[str, Any]
    grads: dict[str, Any]
    gpu_bus_id: str = ""
    """PCI bus id of its GPU, such as "0000:1B:00.0", by which NVML identifies it; empty if unknown."""

    def __init__(self, graph: Graph, shapes: Mapping[str, Sequence[int]]) -> None:
        """`graph` is the graph after all passes. Raises GraphError for impossible shapes."""
        for name, shape in shapes.items():
            if not shape or min(shape) < 1:
                raise GraphError(f"the input '{name}' has the shape {tuple(shape)}: every dimension must be at least 1")
        self.graph = graph
        self.frozen = roles.frozen(graph)
        self.input_shapes: dict[str, Shape] = {name: tuple(shape) for name, shape in shapes.items()}
        self._weight_layouts = weight_layouts(graph)
        # `check_input` adds accepted shapes
        self._accepted = {name: {shape} for name, shape in self.input_shapes.items()}
        self._optimizer: ArrayOptimizer | None = None

    @property
    def trained_statistics(self) -> list[Any]:
        """The running statistics that training updates, as in `aux`."""
        return [array for name, array in self.aux.items() if name not in self.frozen]

    # --- parameters ---

    def to_canonical(self, name: str, array: Any) -> np.ndarray:
        """A copy of a parameter, its gradient or its momentum, from this executor's layout to the canonical one."""
        array = array.asnumpy() if hasattr(array, "asnumpy") else np.array(array)
        return np.ascontiguousarray(array.transpose(0, 2, 3, 1)) if self._is_oihw(name) else array

    def from_canonical(self, name: str, array: np.ndarray) -> np.ndarray:
        """The inverse of `to_canonical`."""
        return np.ascontiguousarray(np.asarray(array).transpose(0, 3, 1, 2)) if self._is_oihw(name) else array

    def _is_oihw(self, name: str) -> bool:
        return self._weight_layouts.get(name) == "OIHW"

    def set_params(self, params: Mapping[str, np.ndarray], aux: Mapping[str, np.ndarray]) -> None:
        """Copy canonical values in. Raises GraphError for a missing or unknown array or a wrong shape; then nothing is
        changed.
        """
        for kind, given, own in (("parameter", params, self.params), ("running statistic", aux, self.aux)):
            for name in sorted(own.keys() ^ given.keys()):
                fault = "is missing" if name in own else "does not belong to this network"
                raise GraphError(f"the {kind} '{name}' {fault}: give the values of this network")
            for name, value in given.items():
                fits = np.ndim(value) == len(own[name].shape)
                shape = tuple(self.from_canonical(name, value).shape) if fits else None
                if shape != tuple(own[name].shape):
                    wanted = self.to_canonical(name, np.empty(own[name].shape, np.bool_)).shape
                    raise GraphError(f"the {kind} '{name}' has shape {np.shape(value)}, this network needs {wanted}: "
                                     "give the values of this network and image format")
        for given, own in ((params, self.params), (aux, self.aux)):
            for name, value in given.items():
                self._assign(own[name], self.from_canonical(name, value))

    def _assign(self, array: Any, value: np.ndarray) -> None:
        array[:] = value

    def get_params(self) -> tuple[Arrays, Arrays]:
        """Canonical copies of all parameters and running statistics."""
        self.synchronize()
        params = {name: self.to_canonical(name, array) for name, array in self.params.items()}
        return params, {name: self.to_canonical(name, array) for name, array in self.aux.items()}

    def request_copies(self, arrays: Mapping[str, Any]) -> Callable[[], Arrays]:
        """Copy live arrays by variable: `params`, `aux`, or arrays of the optimizer. Returns a function, to be called
        once, that makes canonical arrays from the copies. Any thread may call it while the executor is used.
        """
        copies = {name: array.asnumpy() if hasattr(array, "asnumpy") else np.array(array)
                  for name, array in arrays.items()}
        return lambda: {name: self.to_canonical(name, copies.pop(name)) for name in list(copies)}

    def check_input(self, name: str, shape: Sequence[int]) -> None:
        """Raise GraphError if the batch has another shape than the executor's. Height and width may differ if the
        shapes of the network's parameters do not depend on them.
        """
        shape = tuple(shape)
        if name not in self.input_shapes:
            known = ", ".join(self.input_shapes)
            raise GraphError(f"the executor was made without a shape for '{name}': it has {known}")
        if shape in self._accepted[name]:
            return
        made = self.input_shapes[name]
        if not (name == "data" and len(shape) == len(made) == 4 and (shape[0], shape[3]) == (made[0], made[3])):
            raise wrong_shape(name, shape, made)
        before, after = (self.graph.infer_shapes(self.input_shapes | {name: size}) for size in (made, shape))
        for parameter in (*self.params, *self.aux):
            if before[Ref(parameter)] != after[Ref(parameter)]:
                raise GraphError(f"'{name}' has the shape {shape}, for which '{parameter}' would need another shape: "
                                 f"this network works with images of {made[1]}x{made[2]} only")
        self._accepted[name].add(shape)

    def create_optimizer(self, rule: Rule, ema: bool = False, clip_norm: float = 0.0) -> Optimizer:
        """Create the optimizer of all parameters that are not frozen. `ema`: keep moving averages of parameters and
        running statistics. `clip_norm`: scale the gradients down to this global norm if their norm is larger
        (`optimizers.base.clip_factor`); 0: no clipping.
        """
        trained, statistics = ({name: array for name, array in arrays.items() if name not in self.frozen}
                               for arrays in (self.params, self.aux))
        self._optimizer = ArrayOptimizer(rule, trained, self.grads, roles.weights(self.graph),
                                         trained | statistics if ema else {}, roles.rate_factors(self.graph), clip_norm)
        return self._optimizer

    # --- running ---

    @abstractmethod
    def forward_backward(self, data: Any, label: Any, accumulate: bool = False, draws: Draws = NO_DRAWS) -> None:
        """One training pass over a batch. Computes gradients of the mean loss in `grads` (added to the present ones if
        `accumulate`), running statistics in `aux`, and metrics. Asynchronous on a GPU.
        """

    def prepare_inference(self, image_size: tuple[int, int]) -> None:
        """Build the network for inference on whole batches of images of this height and width. Otherwise the first
        batch would wait for this: some seconds on a GPU for which no kernels are chosen yet. Raises GraphError if the
        network does not accept this size, or if memory is short.
        """
        images, _, _, channels = self.input_shapes["data"]
        self.check_input("data", (images, *image_size, channels))

    @abstractmethod
    def infer(self, data: Any, label: Any = None, num_valid: int = 0) -> None:
        """Inference with running statistics; `request_probabilities` returns the result. With a label, the first
        `num_valid` images count in the metrics. Asynchronous on a GPU."""

    @abstractmethod
    def forward(self, data: Any, label: Any = None) -> Any:
        """`infer` with a label for every image. Returns class probabilities (N, classes) as an array on the device,
        which the next call may overwrite."""

    @abstractmethod
    def request_probabilities(self) -> Callable[[], np.ndarray]:
        """Request the class probabilities (N, classes), float32, of the latest inference without waiting. Returns a
        function, to be called once, that waits for the probabilities; the executor may be used meanwhile.
        """

    @abstractmethod
    def read_metrics(self) -> Metrics:
        """The metrics since the last read, summed over training and inference. Waits for the device."""

    def request_metrics(self) -> Callable[[], Metrics]:
        """Like `read_metrics`, but does not wait. Returns a function, to be called once, that waits for the work
        requested so far and returns its metrics. This default implementation reads the metrics at once.
        """
        metrics, gradient_norm = self.read_metrics(), self._optimizer.gradient_norm if self._optimizer else None

        def receive() -> Metrics:
            self.gradient_norm = gradient_norm
            return metrics

        return receive

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all requested work is done."""

    def close(self) -> None:
        """Free the device's memory now instead of at the end of the process. The executor must not be used afterwards;
        arrays that it has returned stay valid."""
        self.synchronize()

    def largest_batch(self) -> int | None:
        """The largest batch size of a training step on this device, estimated from the memory that the present batch
        size needs; None if the device has no separate memory.
        """
        return None

    # Seconds that the GPU was idle for lack of a batch, in the step that the latest `end_step` waited for.
    idle_seconds: float | None = None

    # Skipped optimizer steps (a gradient was not finite, so no weight changed), at the time of the latest metrics: in
    # all, and since the last step that changed weights. Only the cuda executor skips steps: in float16, with LARS and
    # with clipping. In all other cases values that are not finite reach the weights, and then the loss.
    skipped_steps: int = 0
    skipped_in_a_row: int = 0

    # With clipping: the gradient norm before clipping, in the latest step whose metrics were read.
    gradient_norm: float | None = None

    def end_step(self) -> None:
        """Bound the work in flight; to be called after each optimizer step. This default implementation waits for all
        work. Executors on a GPU wait for the previous step, to keep the GPU busy; the time between two calls is still
        the time of one step.
        """
        self.synchronize()


def parse_device(device: str) -> tuple[str, int]:
    """Kind and number of a device: ("gpu", 1) for "gpu(1)", ("cpu", 0) for "cpu". Raises GraphError."""
    match = re.fullmatch(r"(cpu|gpu)(?:\((\d+)\))?", device)
    if not match:
        raise GraphError(f"there is no device '{device}': write cpu(0), gpu(0), gpu(1) ...")
    return match[1], int(match[2] or 0)


def wrong_shape(name: str, shape: Sequence[int], expected: Sequence[int]) -> GraphError:
    """The error for a batch whose shape differs from the executor's."""
    return GraphError(f"'{name}' has the shape {tuple(shape)}, but the executor was made for {tuple(expected)}: "
                      "make one for each batch size")
