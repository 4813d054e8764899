"""Kernels on an NVIDIA GPU: matrix products with cuBLASLt, convolutions with the cuDNN plans of the cuda executor."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from gpu_report.deepbench import Convolution, Gemm
from graph_passes.errors import GraphError
from graph_passes.executors.base import parse_device
from graph_passes.executors.cuda.convolution import Problem, placed
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.gemm import WORKSPACE_BYTES, GemmLibrary, GemmProblem
from graph_passes.executors.cuda.profile import COPY_BYTES, copying
from graph_passes.executors.cuda.toolchain import toolchain
from graph_passes.passes.memory import aligned
from train.devices import Placement

SAMPLE_MS = 1.0  # duration of one sample, which is a series of launches
MAX_LAUNCHES = 100
# Seconds for trying cuDNN's plans for one fused convolution, enough to try all plans. With half a second, the limit in
# networks, FP8 reaches two thirds of its speed.
FUSED_SECONDS = 10.0
DTYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8", "int8": "int8"}
KINDS = {"forward": "fprop", "data gradient": "dgrad", "weight gradient": "wgrad"}
LEAST_CAPABILITY = {"tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}  # precision -> least compute capability


def open_machine(placement: Placement) -> CudaMachine:
    """The GPU, ready to time kernels. Raises GraphError if a library is missing."""
    return CudaMachine(parse_device(placement.device)[1])


class CudaMachine:
    """Implements `kernels.Machine` on a GPU."""

    copy_bytes = COPY_BYTES

    def __init__(self, device_id: int) -> None:
        self.gpu = Gpu(device_id)
        self._tools = {is_tf32: toolchain(self.gpu, is_tf32) for is_tf32 in (False, True)}
        for tools in self._tools.values():
            tools.convolutions.fused_seconds = FUSED_SECONDS
        self._arena = self._tools[False].arena
        self.precisions = tuple(precision for precision in ("fp16", "fp32", "tf32", "bf16", "int8", "fp8")
                                if self.gpu.capability >= LEAST_CAPABILITY.get(precision, (0, 0)))

    def close(self) -> None:
        """Free the memory, so that the next sections can use it."""
        self.gpu.free_all()

    @contextlib.contextmanager
    def copy(self) -> Iterator[Callable[[], float]]:
        with copying(self.gpu, self._tools[False].kernels) as enqueue, self.gpu.timer(enqueue, launches=1) as sample:
            sample()
            yield sample

    @functools.cached_property
    def _gemms(self) -> GemmLibrary:
        return GemmLibrary(self.gpu)

    @contextlib.contextmanager
    def gemm(self, size: Gemm, precision: str) -> Iterator[Callable[[], float]]:
        problem = GemmProblem(*size, precision)
        a, b, c, workspace = self._place([*problem.num_bytes, WORKSPACE_BYTES], [*problem.dtypes[:2], "", ""])
        product = self._gemms.fastest(problem, a, b, c, workspace)
        with self._timer(partial(product.enqueue, a, b, c, workspace)) as sample:
            yield sample

    @contextlib.contextmanager
    def convolution(self, size: Convolution, direction: str, precision: str) -> Iterator[Callable[[], float]]:
        library = self._tools[precision != "fp32"].convolutions
        problem = _problem(size, KINDS[direction], DTYPES[precision])
        plan = library.plan(problem)
        starts, num_bytes = placed(problem)
        base, workspace = self._place([num_bytes, plan.workspace_bytes], [problem.dtype, ""])
        with self._timer(partial(plan.enqueue, *(base + start for start in starts), workspace=workspace)) as sample:
            yield sample
        library.save()

    def _place(self, sizes: Sequence[int], dtypes: Sequence[str]) -> list[int]:
        """Allocate buffers of these sizes in bytes, and fill each with random values of its type. A buffer of type ""
        stays uninitialised. Returns the buffers' addresses. Raises TransientError if the buffers do not fit into
        memory.
        """
        address = self._arena.reserve(sum(map(aligned, sizes)))
        addresses = []
        for size, dtype in zip(sizes, dtypes, strict=True):
            if dtype:
                self.gpu.fill_random(address, size, dtype)
            addresses.append(address)
            address += aligned(size)
        return addresses

    @contextlib.contextmanager
    def _timer(self, enqueue: Callable[[], None]) -> Iterator[Callable[[], float]]:
        rough = self.gpu.time_ms(enqueue, launches=1, repeats=1)
        with self.gpu.timer(enqueue, min(MAX_LAUNCHES, max(1, round(SAMPLE_MS / max(rough, 1e-3))))) as sample:
            yield sample


def _problem(size: Convolution, kind: str, dtype: str) -> Problem:
    """The convolution as a cuDNN problem. Raises GraphError for numbers of channels that the type does not allow."""
    multiple = {"float32": 1, "float16": 1, "bfloat16": 1}.get(dtype, 16)
    if size.c % multiple or size.k % multiple:
        raise GraphError(f"cuDNN has no 8-bit convolution of {size.c} channels with {size.k} filters: both must be "
                         f"multiples of {multiple}")
    if multiple > 1:
        kind = "fprop_bias_relu"
    return Problem(kind, (size.n, size.height, size.width, size.c),
                   (size.k, size.filter_height, size.filter_width, size.c),
                   (size.n, size.out_height, size.out_width, size.k), (size.pad_height, size.pad_width),
                   (size.stride_height, size.stride_width), (1, 1), dtype)
