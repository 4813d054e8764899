"""Recurrent layers through cuDNN's recurrent API. cuDNN's graph API has no recurrent operators, so the C library is
called directly.

A `RecurrentPlan` describes one problem and one algorithm to cuDNN. The cover chooses the algorithm; this module tests
whether cuDNN can run the algorithm, also within a CUDA graph.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from graph_passes.errors import GraphError, TransientError
from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.convolution import import_cudnn, is_transient
from graph_passes.executors.cuda.device import Gpu, first_line
from graph_passes.operators.rnn import GATES
from graph_passes.passes.memory import aligned
from graph_passes.passes.precision import ITEM_BYTES

# Constants of cudnn_adv.h and cudnn_graph.h.
_ALGORITHMS = {"standard": 0, "persist_static": 1, "persist_static_small_h": 3}
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_DTYPES = {"float32": 0, "float16": 2, "bfloat16": 9}
_TWO_BIASES, _LINEAR_INPUT, _ADD, _INFERENCE, _TRAINING = 2, 0, 0, 0, 1
_DEFAULT_MATH, _TENSOR_CORES, _NO_TENSOR_CORES = 0, 1, 3
# For sequences of equal length, all of cuDNN's layouts are equivalent except the batch-major layout. The layout here is
# 'packed', without padding.
_LAYOUT, _PADDED_IO = 1, 0

_SOME_ADDRESS = 1 << 40  # a dummy address of the parameters, for calls that only request offsets and read no memory

_P, _I, _Z = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudnnCreate": (_P,),
    "cudnnSetStream": (_P, _P),
    "cudnnCreateDropoutDescriptor": (_P,),
    "cudnnSetDropoutDescriptor": (_P, _P, ctypes.c_float, _P, _Z, ctypes.c_ulonglong),
    "cudnnCreateRNNDescriptor": (_P,),
    "cudnnSetRNNDescriptor_v8": (_P, *[_I] * 8, *[ctypes.c_int32] * 4, _P, ctypes.c_uint32),
    "cudnnBuildRNNDynamic": (_P, _P, _I),
    "cudnnCreateRNNDataDescriptor": (_P,),
    "cudnnSetRNNDataDescriptor": (_P, *[_I] * 5, _P, _P),
    "cudnnCreateTensorDescriptor": (_P,),
    "cudnnSetTensorNdDescriptor": (_P, _I, _I, _P, _P),
    "cudnnGetRNNWeightSpaceSize": (_P, _P, _P),
    "cudnnGetRNNWeightParams": (_P, _P, ctypes.c_int32, _Z, _P, ctypes.c_int32, *[_P] * 4),
    "cudnnGetRNNTempSpaceSizes": (_P, _P, _I, _P, _P, _P),
    "cudnnRNNForward": (_P, _P, _I, *[_P] * 11, _Z, _P, _Z, _P, _Z, _P),
    "cudnnRNNBackwardData_v8": (*[_P] * 16, _Z, _P, _Z, _P, _Z, _P),
    "cudnnRNNBackwardWeights_v8": (_P, _P, _I, *[_P] * 7, _Z, _P, _Z, _P, _Z, _P),
}


@dataclass(frozen=True)
class RecurrentProblem:
    """A problem for cuDNN: the sizes of an RNN of `operators/rnn.py`. `num_parameters` is the number of parameters in
    our graph.
    """

    mode: str
    num_layers: int
    bidirectional: bool
    steps: int
    sequences: int
    features: int
    hidden: int
    num_parameters: int
    dtype: str  # float16, bfloat16, float32
    training: bool
    algorithm: str

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_layers * self.directions, self.sequences, self.hidden

    def __str__(self) -> str:
        both = ", both directions" if self.bidirectional else ""
        return (f"{self.mode} of {self.num_layers} x {self.hidden}{both} for {self.steps} steps of {self.sequences} x "
                f"{self.features}, {self.dtype}, algorithm {self.algorithm}")


class RecurrentPlan:
    """cuDNN's descriptors for one problem. The descriptors live as long as the process, because they own the kernels
    that cuDNN compiles, and CUDA graphs may refer to these kernels.
    """

    def __init__(self, cudnn: _Cudnn, problem: RecurrentProblem, tf32: bool) -> None:
        self._cudnn, self.problem = cudnn, problem
        if problem.dtype == "float32" and not tf32 and problem.algorithm != "standard":
            # Observed on an H200: sigmoid and tanh of these algorithms differ from NumPy's by more than fp32's
            # rounding.
            raise GraphError(f"cuDNN computes {problem} less exactly than float32: use the algorithm standard, or tf32")
        if problem.algorithm == "persist_static_small_h" and problem.num_layers * problem.directions > 1:
            raise GraphError(f"cuDNN computes wrong gradients of {problem}: use another algorithm")
        item_bytes, dtype = ITEM_BYTES[problem.dtype], _DTYPES[problem.dtype]
        dropout = cudnn.create("Dropout")
        cudnn("cudnnSetDropoutDescriptor", dropout, cudnn.handle, 0.0, None, 0, 0)
        fp32_math = _DEFAULT_MATH if tf32 else _NO_TENSOR_CORES
        math = fp32_math if problem.dtype == "float32" else _TENSOR_CORES
        self._rnn = cudnn.create("RNN")
        cudnn("cudnnSetRNNDescriptor_v8", self._rnn, _ALGORITHMS[problem.algorithm], _MODES[problem.mode], _TWO_BIASES,
              int(problem.bidirectional), _LINEAR_INPUT, dtype, _DTYPES["float32"], math, problem.features,
              problem.hidden, problem.hidden, problem.num_layers, dropout, _PADDED_IO)
        self._x = self._sequences(dtype, problem.features)
        self._y = self._sequences(dtype, problem.directions * problem.hidden)
        self._state = cudnn.create("Tensor")
        layers, sequences, hidden = problem.state_shape
        cudnn("cudnnSetTensorNdDescriptor", self._state, dtype, 3, (_I * 3)(layers, sequences, hidden),
              (_I * 3)(sequences * hidden, hidden, 1))
        self.weight_bytes = cudnn.size("cudnnGetRNNWeightSpaceSize", cudnn.handle, self._rnn)
        if (self.weight_bytes, self._places()) != (problem.num_parameters * item_bytes, self._expected_places()):
            raise GraphError(f"cuDNN has another order of parameters for {problem}: use another algorithm")
        workspace, reserve = ctypes.c_size_t(), ctypes.c_size_t()
        self._use = _TRAINING if problem.training else _INFERENCE
        cudnn("cudnnGetRNNTempSpaceSizes", cudnn.handle, self._rnn, self._use, self._x, ctypes.byref(workspace),
              ctypes.byref(reserve))
        self.workspace_bytes, self.reserve_bytes = workspace.value, reserve.value

    def forward(self, x: int, parameters: int, h: int, c: int, y: int, last_h: int, last_c: int, reserve: int,
                *, workspace: int) -> None:
        """Enqueue the forward pass. Every argument is an address; 0 for a tensor that does not exist. Asynchronous."""
        self._cudnn("cudnnRNNForward", self._cudnn.handle, self._rnn, self._use, None, self._x, x, self._y, y,
                    self._state, h, last_h, self._state, c, last_c, self.weight_bytes, parameters,
                    self.workspace_bytes, workspace, self.reserve_bytes, reserve)

    def backward(self, dy: int, x: int, parameters: int, h: int, c: int, y: int, reserve: int, dx: int,
                 dparameters: int, dh: int, dc: int, *, workspace: int) -> None:
        """Enqueue all gradients. cuDNN only adds to the parameters' gradients, so they are first set to 0. The data
        gradients write to `reserve` the values from which the parameters' gradients are computed. Asynchronous."""
        temporary = self.workspace_bytes, workspace, self.reserve_bytes, reserve
        self._cudnn("cudnnRNNBackwardData_v8", self._cudnn.handle, self._rnn, None, self._y, y, dy, self._x, dx,
                    self._state, h, None, dh, self._state, c, None, dc, self.weight_bytes, parameters, *temporary)
        self._cudnn.gpu.fill(dparameters, 0, self.weight_bytes)
        self._cudnn("cudnnRNNBackwardWeights_v8", self._cudnn.handle, self._rnn, _ADD, None, self._x, x, self._state, h,
                    self._y, y, self.weight_bytes, dparameters, *temporary)

    def _sequences(self, dtype: int, features: int) -> Any:
        """The descriptor of (T, N, features) with all sequences of equal length."""
        problem, descriptor = self.problem, self._cudnn.create("RNNData")
        lengths = (_I * problem.sequences)(*[problem.steps] * problem.sequences)
        self._cudnn("cudnnSetRNNDataDescriptor", descriptor, dtype, _LAYOUT, problem.steps, problem.sequences, features,
                    lengths, None)
        return descriptor

    def _places(self) -> list[int]:
        """cuDNN's offset in bytes of every matrix, then of every bias, among the parameters: for each layer and
        direction first the input's gates, then the state's."""
        matrices, biases = [], []
        unused = [self._cudnn.create("Tensor") for _ in range(2)]
        gates = 2 * GATES[self.problem.mode]
        for layer, gate in itertools.product(range(self.problem.state_shape[0]), range(gates)):
            matrix, bias = _P(), _P()
            self._cudnn("cudnnGetRNNWeightParams", self._cudnn.handle, self._rnn, layer, self.weight_bytes,
                        _SOME_ADDRESS, gate, unused[0], ctypes.byref(matrix), unused[1], ctypes.byref(bias))
            matrices.append((matrix.value or 0) - _SOME_ADDRESS)
            biases.append((bias.value or 0) - _SOME_ADDRESS)
        return matrices + biases

    def _expected_places(self) -> list[int]:
        """The offsets that `operators/rnn.py` assumes."""
        problem = self.problem
        sizes = []
        for number in range(problem.state_shape[0]):
            width = problem.features if number < problem.directions else problem.directions * problem.hidden
            sizes += [problem.hidden * columns for columns in (width, problem.hidden)
                      for _ in range(GATES[problem.mode])]
        sizes += [problem.hidden] * len(sizes)
        return [start * ITEM_BYTES[problem.dtype] for start in itertools.accumulate(sizes[:-1], initial=0)]


class RecurrentLibrary:
    """cuDNN's recurrent layers on one GPU. Plans are tried in `arena`. `tf32` lets fp32 layers round the inputs of
    their products to TF32."""

    def __init__(self, gpu: Gpu, arena: Arena, tf32: bool = True) -> None:
        self._gpu, self._arena, self._tf32 = gpu, arena, tf32
        self._cudnn: _Cudnn | None = None
        self._plans: dict[RecurrentProblem, RecurrentPlan | GraphError] = {}

    def plan(self, problem: RecurrentProblem) -> RecurrentPlan:
        """A plan. Raises GraphError if cuDNN cannot run the problem with that algorithm, alone and captured in a CUDA
        graph, and TransientError if memory ran out."""
        if problem not in self._plans:
            try:
                self._plans[problem] = self._tried(problem)
            except TransientError:
                raise
            except GraphError as error:
                self._plans[problem] = error
        found = self._plans[problem]
        if isinstance(found, GraphError):
            raise found
        return found

    def _tried(self, problem: RecurrentProblem) -> RecurrentPlan:
        """A plan that has run once: in its first call cuDNN loads libraries and allocates memory, which a capture
        forbids."""
        if self._cudnn is None:
            self._cudnn = _Cudnn(self._gpu)
        try:
            plan = RecurrentPlan(self._cudnn, problem, self._tf32)
            for run in self._trial(plan):
                run()
                self._gpu.synchronize()
                self._gpu.destroy(self._gpu.capture(run))
            return plan
        except GraphError:
            raise
        except Exception as error:
            self._gpu.synchronize()  # raises if the GPU cannot continue, which is not the algorithm's fault
            kind = TransientError if is_transient(error) else GraphError
            raise kind(f"cuDNN cannot run {problem} ({first_line(error)}): use another algorithm, or smaller sizes"
                       ) from None

    def _trial(self, plan: RecurrentPlan) -> list[Callable[[], None]]:
        """Functions that run the plan's passes on zeros in the arena."""
        problem, item_bytes = plan.problem, ITEM_BYTES[plan.problem.dtype]
        rows = problem.steps * problem.sequences * item_bytes
        layers, sequences, hidden = problem.state_shape
        x, y = rows * problem.features, rows * problem.directions * hidden
        state = layers * sequences * hidden * item_bytes
        forward = [x, plan.weight_bytes, state, state, y, state, state, plan.reserve_bytes]
        gradients = [y, x, plan.weight_bytes, state, state] if problem.training else []
        sizes = [*forward, *gradients, plan.workspace_bytes]
        starts = list(itertools.accumulate(map(aligned, sizes), initial=0))
        base = self._arena.reserve(starts[-1])
        self._gpu.fill(base, 0, starts[-1])
        *given, workspace = (base + start for start in starts[:-1])
        passes: list[Callable[[], None]] = [partial(plan.forward, *given[:8], workspace=workspace)]
        if problem.training:
            given_x, parameters, h, c, given_y, _, _, reserve, dy, *results = given
            passes.append(partial(plan.backward, dy, given_x, parameters, h, c, given_y, reserve, *results,
                                  workspace=workspace))
        return passes


class _Cudnn:
    """libcudnn through its C API, on the GPU's stream. Calls raise RuntimeError with cuDNN's message."""

    def __init__(self, gpu: Gpu) -> None:
        import_cudnn()  # import_cudnn() finds and loads the library
        self.gpu, self._library = gpu, ctypes.CDLL("libcudnn.so.9")
        self._library.cudnnGetErrorString.restype = ctypes.c_char_p
        for name, arguments in _SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        self.handle = _P()
        self("cudnnCreate", ctypes.byref(self.handle))
        self("cudnnSetStream", self.handle, gpu.stream_handle)

    def __call__(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            message = ctypes.create_string_buffer(512)
            self._library.cudnnGetLastErrorString(message, _Z(len(message)))
            detail = f": {message.value.decode(errors='replace')}" if message.value else ""
            raise RuntimeError(f"{function}: {self._library.cudnnGetErrorString(status).decode()}{detail}")

    def create(self, kind: str) -> Any:
        """A new descriptor."""
        descriptor = _P()
        self(f"cudnnCreate{kind}Descriptor", ctypes.byref(descriptor))
        return descriptor

    def size(self, function: str, *arguments: Any) -> int:
        """The bytes that a function returns in its last argument."""
        found = ctypes.c_size_t()
        self(function, *arguments, ctypes.byref(found))
        return found.value
