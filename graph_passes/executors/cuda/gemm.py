"""Matrix products through cuBLASLt, in every precision that tensor cores have: the yardstick for a GPU's speed.

The graph's own products are 1x1 convolutions (`convolution.py`). cuBLASLt comes with cuDNN. Its C interface is called
directly; nothing is compiled here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from graph_passes.errors import GraphError
from graph_passes.executors.cuda.device import INSTALL, Gpu
from graph_passes.passes.precision import ITEM_BYTES

WORKSPACE_BYTES = 32 << 20  # NVIDIA's advice for Hopper; older GPUs need less
MAX_CANDIDATES = 8  # algorithms timed per problem; cuBLASLt lists the most promising ones first

# library_types.h (cudaDataType) and cublas_api.h (cublasComputeType_t, cublasOperation_t)
_R_32F, _R_16F, _R_8I, _R_32I, _R_16BF, _R_8F_E4M3 = 0, 2, 3, 10, 14, 28
_COMPUTE_32F, _COMPUTE_32F_FAST_TF32, _COMPUTE_32I = 68, 77, 72
# cublasLt.h: cublasLtMatmulDescAttributes_t and cublasLtMatmulPreferenceAttributes_t
_TRANSPOSE_A, _TRANSPOSE_B, _MAX_WORKSPACE_BYTES = 3, 4, 1


class _Types(NamedTuple):
    """Types of a product: our names of the operand type and the result type, and cuBLASLt's numbers for both, for the
    type of the sums, and for the type of alpha.
    """

    operand: str
    result: str
    operand_type: int
    result_type: int
    compute: int
    scale: int


_TYPES = {
    "fp32": _Types("float32", "float32", _R_32F, _R_32F, _COMPUTE_32F, _R_32F),
    "tf32": _Types("float32", "float32", _R_32F, _R_32F, _COMPUTE_32F_FAST_TF32, _R_32F),
    "fp16": _Types("float16", "float16", _R_16F, _R_16F, _COMPUTE_32F, _R_32F),
    "bf16": _Types("bfloat16", "bfloat16", _R_16BF, _R_16BF, _COMPUTE_32F, _R_32F),
    "fp8": _Types("float8", "bfloat16", _R_8F_E4M3, _R_16BF, _COMPUTE_32F, _R_32F),
    "int8": _Types("int8", "int32", _R_8I, _R_32I, _COMPUTE_32I, _R_32I),
}


@dataclass(frozen=True)
class GemmProblem:
    """C (m x n) = A (m x k) times B (k x n), all column-major; A and B may be stored transposed.

    `precision`: fp32, tf32, fp16, bf16, fp8 (E4M3, result bf16) or int8 (result int32); sums are fp32, or int32. 8-bit
    operands always get the only layout that cuBLASLt has for them: A transposed, B not.
    """

    m: int
    n: int
    k: int
    transpose_a: bool
    transpose_b: bool
    precision: str

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def transposes(self) -> tuple[bool, bool]:
        return (True, False) if self.precision in ("fp8", "int8") else (self.transpose_a, self.transpose_b)

    @property
    def dtypes(self) -> tuple[str, str, str]:
        """dtypes of A, B and C."""
        types = _TYPES[self.precision]
        return types.operand, types.operand, types.result

    @property
    def num_bytes(self) -> tuple[int, int, int]:
        """Bytes of A, B and C."""
        counts = (self.m * self.k, self.k * self.n, self.m * self.n)
        a, b, c = (count * ITEM_BYTES[dtype] for count, dtype in zip(counts, self.dtypes, strict=True))
        return a, b, c


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (("algo", ctypes.c_uint64 * 8), ("workspace_bytes", ctypes.c_size_t), ("state", ctypes.c_int),
                ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4))


class Gemm:
    """A product that can be enqueued: a problem, and one of cuBLASLt's algorithms for it."""

    def __init__(self, library: GemmLibrary, problem: GemmProblem, handles: _Handles, algorithm: _Algorithm) -> None:
        self._library, self.problem, self._handles, self._algorithm = library, problem, handles, algorithm
        scalar: type[ctypes.c_int32 | ctypes.c_float] = (
            ctypes.c_int32 if problem.precision == "int8" else ctypes.c_float)
        self._alpha, self._beta = scalar(1), scalar(0)

    def enqueue(self, a: int, b: int, c: int, workspace: int) -> None:
        """Enqueue the product. All addresses are aligned to 256 bytes; `workspace` has WORKSPACE_BYTES."""
        handles = self._handles
        self._library.call(
            "cublasLtMatmul", handles.product, ctypes.byref(self._alpha), ctypes.c_void_p(a), handles.a,
            ctypes.c_void_p(b), handles.b, ctypes.byref(self._beta), ctypes.c_void_p(c), handles.c, ctypes.c_void_p(c),
            handles.c, ctypes.byref(self._algorithm.algo), ctypes.c_void_p(workspace),
            ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_void_p(self._library.gpu.stream_handle))


class _Handles(NamedTuple):
    """cuBLASLt's descriptors of a product and of its matrices' layouts."""

    product: ctypes.c_void_p
    a: ctypes.c_void_p
    b: ctypes.c_void_p
    c: ctypes.c_void_p


class GemmLibrary:
    """cuBLASLt on one GPU. Raises GraphError if the library is missing."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._library = _load()
        self._library.cublasLtGetVersion.restype = ctypes.c_size_t
        self._handle = ctypes.c_void_p()
        self._check("cublasLtCreate", self._library.cublasLtCreate(ctypes.byref(self._handle)))

    @property
    def version(self) -> int:
        """The library's version; 120900 is 12.9.0."""
        return int(self._library.cublasLtGetVersion())

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the library that takes its handle. Raises GraphError."""
        self._check(function, getattr(self._library, function)(self._handle, *arguments))

    def fastest(self, problem: GemmProblem, a: int, b: int, c: int, workspace: int) -> Gemm:
        """The fastest of cuBLASLt's algorithms, timed on the matrices at these addresses. Raises GraphError if cuBLASLt
        has no algorithm for this problem on this GPU.
        """
        timed: list[tuple[float, int]] = []
        gemms = self._proposed(problem)
        for number, gemm in enumerate(gemms):
            enqueue = partial(gemm.enqueue, a, b, c, workspace)
            try:
                enqueue()
                self.gpu.synchronize()
            except GraphError:  # cuBLASLt refuses some of its own proposals
                continue
            timed.append((self.gpu.time_ms(enqueue, launches=2), number))
        if not timed:
            raise self._none(problem)
        return gemms[min(timed)[1]]

    def _proposed(self, problem: GemmProblem) -> list[Gemm]:
        handles = self._describe(problem)
        preference = self._created("cublasLtMatmulPreferenceCreate")
        self._set("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE_BYTES,
                  ctypes.c_size_t(WORKSPACE_BYTES))
        found, count = (_Algorithm * MAX_CANDIDATES)(), ctypes.c_int()
        try:
            self.call("cublasLtMatmulAlgoGetHeuristic", *handles, handles.c, preference, MAX_CANDIDATES, found,
                      ctypes.byref(count))
        except GraphError:
            raise self._none(problem) from None
        finally:
            self._library.cublasLtMatmulPreferenceDestroy(preference)
        return [Gemm(self, problem, handles, algorithm) for algorithm in found[: count.value] if not algorithm.state]

    def _describe(self, problem: GemmProblem) -> _Handles:
        types = _TYPES[problem.precision]
        product = self._created("cublasLtMatmulDescCreate", types.compute, types.scale)
        for attribute, is_transposed in zip((_TRANSPOSE_A, _TRANSPOSE_B), problem.transposes, strict=True):
            self._set("cublasLtMatmulDescSetAttribute", product, attribute, ctypes.c_int32(is_transposed))
        m, n, k = problem.m, problem.n, problem.k
        shapes = ((k, m) if problem.transposes[0] else (m, k), (n, k) if problem.transposes[1] else (k, n), (m, n))
        layouts = [self._created("cublasLtMatrixLayoutCreate", kind, ctypes.c_uint64(rows), ctypes.c_uint64(columns),
                                 ctypes.c_int64(rows))
                   for kind, (rows, columns) in zip((types.operand_type, types.operand_type, types.result_type), shapes,
                                                    strict=True)]
        return _Handles(product, *layouts)

    def _created(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        """The descriptor that a cuBLASLt function creates. Descriptors are never freed, because each has only a few
        hundred bytes.
        """
        created = ctypes.c_void_p()
        self._check(function, getattr(self._library, function)(ctypes.byref(created), *arguments))
        return created

    def _set(self, function: str, described: ctypes.c_void_p, attribute: int, value: Any) -> None:
        status = getattr(self._library, function)(described, attribute, ctypes.byref(value),
                                                  ctypes.c_size_t(ctypes.sizeof(value)))
        self._check(function, status)

    @staticmethod
    def _check(function: str, status: int) -> None:
        if status:
            raise GraphError(f"cuBLASLt: {function} ended with status {status}")

    def _none(self, problem: GemmProblem) -> GraphError:
        needs = {"fp8": ": FP8 needs sizes that are multiples of 16, and compute capability 8.9 or newer",
                 "int8": ": INT8 needs a k that is a multiple of 4"}.get(problem.precision, "")
        return GraphError(f"cuBLASLt has no {problem.precision} product of {problem.m} x {problem.n} x {problem.k} on "
                          f"{self.gpu.name}{needs}")


def _load() -> ctypes.CDLL:
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError as error:
        raise GraphError(f"cuBLASLt cannot be found ({error}): {INSTALL}") from None
    try:
        return ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
    except (DynamicLibNotFoundError, OSError) as error:
        raise GraphError(f"cuBLASLt (libcublasLt.so) cannot be loaded ({type(error).__name__}): {INSTALL}") from None
