"""Convolutions through cuDNN 9's graph API: forward (fprop), gradient of the data (dgrad) and of the weights (wgrad).

Everything is NHWC with OHWI weights. A fully connected layer is a 1x1 convolution of a 1x1 image. For each problem
cuDNN proposes several plans (engine and tile sizes). The plans are timed once, the name of the fastest plan is kept on
disk, and the next start builds only this plan. For deterministic runs nothing is timed: cuDNN's first proposal is
taken.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.disk_cache import Cache
from common.phases import TIMING, phase
from graph_passes.errors import GraphError, TransientError
from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.device import INSTALL, Gpu, first_line
from graph_passes.passes.memory import aligned
from graph_passes.passes.precision import ITEM_BYTES

MIN_CUDNN = 90100  # 9.1.0
MAX_CANDIDATES = 24  # largest number of plans timed per problem; cuDNN lists the most promising ones first
# Seconds for trying the plans of one problem, or until the first plan is found. In 16 bits 24 plans take 0.1 s. In fp32
# kernels run for milliseconds, so this takes longer. cuDNN compiles each fused plan in 0.3 to 1.2 s, or in 0.04 s if
# the process has compiled the same engine and tiles for another shape. With 1 s instead of 0.5 s, the start took a
# third longer, and ResNet-50's inference time changed by -1 to 2 % (docs/performance.md, "How many of cuDNN's fused
# plans are tried"). The time of the first proposal for the first problem of a kind does not count, because this
# proposal may load a library.
TUNING_SECONDS = 0.5
RULES = "exact-2"  # name of the rules of choice; a file written under other rules is not read
# Stored in place of the name of a fused problem's plan. REFUSED: cuDNN has refused every proposal. UNFINISHED: cuDNN
# had refused some proposals when the time was up. The number of refused proposals is stored in place of the
# milliseconds, and the next process tries the remaining proposals.
REFUSED, UNFINISHED = "", "?"
# Words of cuDNN's messages when memory is short or a library cannot be loaded. These messages do not concern the plan.
TRANSIENT_WORDS = ("ALLOC", "OUT OF MEMORY", "LOADING_FAILED")

# Numerical notes of plans that are never used: partial sums in less than fp32, and algorithms that multiply transformed
# tensors, whose rounding differs from a convolution's.
INEXACT = ("REDUCED_PRECISION_REDUCTION", "WINOGRAD", "FFT")
NOTES = (*INEXACT, "DOWN_CONVERT_INPUTS", "TENSOR_CORE", "NONDETERMINISTIC")
# Engines that compute inexactly although they have no such note, by kind of problem in float32 without TF32. A 3x3
# weight gradient (256 to 512 channels, 16 images of 28x28) took 0.26 ms on an H200, 1.7 times as fast as the
# multiplications allow, with errors of 2e-5 of the largest value. All other engines had errors of at most 6e-6, and
# took 1 ms or more.
UNTOLD = {"wgrad": "eng17"}

FIRST_UID = 1  # tensor numbers, in the order of `Plan.enqueue`
KEEP_SECONDS = 20.0  # seconds between two saves while many plans are being chosen

log = logging.getLogger("graph_passes.cuda")


@dataclass(frozen=True)
class Problem:
    """A problem for cuDNN. `kind`: 'fprop', 'fprop_stats' (also per-channel sum and sum of squares of the output,
    fp32), 'fprop_bias' (+ fp32 bias; with '_add' + a tensor like the output, with '_relu' then ReLU; the parts of the
    name are in the order of the operations), 'dgrad' or 'wgrad'. `x` and `y` are NHWC shapes, `w` is OHWI; dgrad writes
    x, wgrad writes w. If `w` has fewer channels than `x`, it is a grouped convolution.
    """

    kind: str
    x: tuple[int, int, int, int]
    w: tuple[int, int, int, int]
    y: tuple[int, int, int, int]
    pad: tuple[int, int]
    stride: tuple[int, int]
    dilate: tuple[int, int]
    dtype: str  # float16, bfloat16 or float32; forward passes with an epilogue also accept int8 and float8 (E4M3)

    @property
    def flops(self) -> int:
        """Number of multiplications and additions."""
        n, h, w, filters = self.y
        return 2 * n * h * w * filters * self.w[1] * self.w[2] * self.w[3]

    @property
    def is_fused(self) -> bool:
        """Whether the problem is more than a convolution. A plain convolution and another launch can then compute the
        same result.
        """
        return "_" in self.kind

    def __str__(self) -> str:
        size, strides = "x".join(map(str, self.w[1:3])), ", ".join(map(str, self.stride))
        return f"{self.kind} {self.x} -> {self.y}, {size}, stride ({strides}), {self.dtype}"

    @property
    def key(self) -> str:
        return json.dumps(dataclasses.astuple(self))


class Plan:
    """A cuDNN plan for one problem, which can be enqueued on any buffers of the problem's shapes. `select` builds one
    of cuDNN's proposals; `restore` reads a plan that `dump` wrote."""

    def __init__(self, library: ConvolutionLibrary, problem: Problem) -> None:
        self._library, self.problem = library, problem
        self._graph: Any = None
        # index of the selected proposal; None: the graph has only one plan, which was restored
        self._index: int | None = None
        self.name = ""
        self.time_ms = float("nan")
        self.workspace_bytes = 0

    def names(self) -> list[str]:
        if self._graph is None:
            self._graph = self._library.describe(self.problem)
        return [self._graph.get_plan_name_at_index(i) for i in range(self._graph.get_execution_plan_count())]

    def select(self, index: int) -> None:
        """Build the proposal with this index in `names`. Raises cuDNN's exception if the GPU does not support it."""
        self._graph.build_plan_at_index(index)
        self._index, self.name = index, self._graph.get_plan_name_at_index(index)
        self.workspace_bytes = self._graph.get_workspace_size_plan_at_index(index)

    def dump(self) -> bytes:
        """Serialize the plan. Raises cuDNN's exception if that is not possible."""
        head = {"name": self.name, "workspace_bytes": self.workspace_bytes}
        return json.dumps(head).encode() + b"\n" + bytes(self._graph.serialize())

    def restore(self, dumped: bytes) -> None:
        """Read a serialized plan. Raises cuDNN's exception if that is not possible."""
        head, built = dumped.split(b"\n", 1)
        self._graph = self._library.read(built)
        self._index, fields = None, json.loads(head)
        self.name, self.workspace_bytes = fields["name"], fields["workspace_bytes"]

    def enqueue(self, *addresses: int, workspace: int) -> None:
        """Enqueue the plan on the GPU's stream. `addresses` are, for fprop: x, w[, bias][, addend], y[, sum, sum of
        squares]; for dgrad: dy, w, dx; for wgrad: x, dy, dw.
        """
        pack, handle = dict(enumerate(addresses, start=FIRST_UID)), self._library.handle
        if self._index is None:
            self._graph.execute(pack, workspace, handle=handle)
        else:
            self._graph.execute_plan_at_index(pack, workspace, self._index, handle=handle)


class ConvolutionLibrary:
    """cuDNN on one GPU. Plans are timed in the memory of `arena`. `tf32` lets fp32 convolutions round their inputs to
    TF32. `deterministic` excludes plans that sum in a varying order. Times and the file on disk then do not choose
    between the remaining plans: each plan has its own order of sums, so another choice would give other bits.
    Benchmarks of convolutions may raise `fused_seconds`, the time for trying the plans of one fused problem.
    """

    def __init__(self, gpu: Gpu, cache: Cache, arena: Arena, tf32: bool = True, deterministic: bool = False) -> None:
        self._cudnn = import_cudnn()
        self._gpu, self._cache, self._arena = gpu, cache, arena
        self._tf32, self.deterministic = tf32, deterministic
        self.fused_seconds = TUNING_SECONDS
        self.handle = self._cudnn.create_handle()
        self._cudnn.set_stream(handle=self.handle, stream=gpu.stream_handle)
        self._plans: dict[Problem, Plan] = {}
        # part of the file name of the choices, which differ between settings
        self.variant = f"tf32_{int(tf32)}-{RULES}"
        self._choices_name = f"plans-{self.variant}"
        self._choices = self._read_choices()  # problem key -> [plan name, milliseconds]
        self._unsaved = False
        self._late: set[Problem] = set()  # fused problems without a plan in this process
        self._loaded: set[str] = set()  # kinds of problems for which this process has built a proposal
        self._kept_at: float | None = None  # time of the latest save of choices

    def plan(self, problem: Problem) -> Plan:
        """The fastest plan for the problem, ready to run; with `deterministic`, the first plan that runs. Proposals are
        timed when this machine meets the problem for the first time.

        Raises GraphError if cuDNN has no plan, and TransientError if time or memory ran out before a plan was found.
        """
        if problem not in self._plans:
            if problem in self._late:
                raise self._no_plan(problem, "not found in time", TransientError)
            chosen = None if self.deterministic else self._remembered(problem)
            if chosen is None and not self.deterministic:
                self._keep()
            self._plans[problem] = chosen or self._tuned(problem)
        return self._plans[problem]

    def notes(self, plan: Plan) -> list[str]:
        """The plan's numerical notes that are in `NOTES`. The Python API does not return them, but a plan with a
        deselected note cannot be built.
        """
        return [note for note in NOTES if self._is_barred(plan, note)]

    def _is_barred(self, plan: Plan, note: str) -> bool:
        graph = self.describe(plan.problem, [note])
        names = [graph.get_plan_name_at_index(index) for index in range(graph.get_execution_plan_count())]
        try:
            graph.build_plan_at_index(names.index(plan.name))
        except Exception as error:
            if "deselect" not in str(error).lower():
                raise
            return True
        return False

    def _unwanted(self, problem: Problem) -> list[str]:
        """Numerical notes whose plans are excluded."""
        unwanted = [*INEXACT]
        if problem.dtype != "float32" or not self._tf32:
            unwanted.append("DOWN_CONVERT_INPUTS")
        if problem.dtype == "float32" and not self._tf32:
            unwanted.append("TENSOR_CORE")
        if self.deterministic:
            unwanted.append("NONDETERMINISTIC")
        return unwanted

    def _is_untold(self, problem: Problem, plan_name: str) -> bool:
        exact = problem.dtype == "float32" and not self._tf32
        return exact and plan_name.partition("_")[0] == UNTOLD.get(problem.kind)

    def save(self) -> None:
        """Keep the choices made since the last call on disk."""
        if self._unsaved and not self.deterministic:
            merged = {**self._read_choices(), **self._choices}  # another process may have written meanwhile
            self._cache.write(self._choices_name, json.dumps(merged, indent=0).encode())
            self._unsaved = False

    # --- choosing ---

    def _keep(self) -> None:
        """Log that plans are being chosen. Saves the choices every KEEP_SECONDS, so that an interrupted run need not
        repeat them.
        """
        now = time.monotonic()
        if self._kept_at is None:
            log.warning("choosing the fastest kernels for this GPU and these shapes; this is done once and takes half "
                        "a minute, in float32 a few minutes")
        elif now - self._kept_at < KEEP_SECONDS:
            return
        else:
            self.save()
            log.warning("choosing the fastest kernels: %d chosen and kept so far", len(self._choices))
        self._kept_at = now

    def _remembered(self, problem: Problem) -> Plan | None:
        choice = self._choices.get(problem.key)
        if choice is None or choice[0] == UNFINISHED or self._is_untold(problem, choice[0]):
            return None
        if choice[0] == REFUSED:
            raise self._no_plan(problem, "as found before")
        plan = Plan(self, problem)
        plan.time_ms = choice[1]
        if self._restore(plan, choice[0]):
            return plan
        try:
            plan.select(plan.names().index(choice[0]))
        except Exception as error:  # the plan is no longer proposed, or cuDNN refuses it
            log.warning("the saved cuDNN plan for %s cannot be used (%s): it is chosen anew", problem,
                        first_line(error))
            return None
        self._dump(plan)
        return plan

    def _restore(self, plan: Plan, name: str) -> bool:
        """Read the built plan from the disk. This takes a tenth of the time for proposing and building the plan.
        Returns whether the plan could be read.
        """
        dumped = self._cache.read(self._file(plan.problem, name))
        if dumped is None:
            return False
        try:
            plan.restore(dumped)
        except Exception as error:
            log.warning("the cuDNN plan for %s cannot be read back (%s): it is built anew", plan.problem,
                        first_line(error))
            return False
        return True

    def _dump(self, plan: Plan) -> None:
        """Serialize the plan for the next start. If cuDNN cannot serialize the plan, the next start only takes longer.
        """
        try:
            dumped = plan.dump()
        except Exception as error:
            log.debug("the cuDNN plan %s for %s cannot be written out (%s)", plan.name, plan.problem, first_line(error))
            return
        self._cache.write(self._file(plan.problem, plan.name), dumped)

    def _file(self, problem: Problem, name: str) -> str:
        """The file of a built plan."""
        what = f"{self._cudnn.__version__} {self.variant} {problem.key} {name}"
        return "plan-" + hashlib.sha256(what.encode()).hexdigest()[:32]

    @phase(TIMING)
    def _tuned(self, problem: Problem) -> Plan:
        plan = Plan(self, problem)
        trial = self._try(plan)
        if not trial.timed:
            raise self._given_up(problem, trial)
        best_ms, best = min(trial.timed)
        plan.select(best)
        plan.time_ms = best_ms
        if not trial.transient:
            self._remember(problem, plan.name, best_ms)
            if not self.deterministic:  # choices of deterministic runs are not kept
                self._dump(plan)
        log.debug("%s: %s, %.4f ms, best of %d", problem, plan.name, best_ms, len(trial.timed))
        return plan

    def _try(self, plan: Plan) -> _Trial:
        """Build and time the proposals, one after the other, until the time is up."""
        problem, trial, bench = plan.problem, _Trial(), _Bench(self._gpu, self._arena, plan.problem)
        most = 1 if self.deterministic else MAX_CANDIDATES
        seconds = self.fused_seconds if problem.is_fused else TUNING_SECONDS
        ends_at = time.monotonic() + seconds if problem.kind in self._loaded else math.inf
        names = plan.names()
        last = _last_resorts(names) if problem.is_fused else set()
        order = sorted(range(len(names)), key=last.__contains__)
        for position in range(self._tried_before(problem), len(order)):
            index = order[position]
            is_late = time.monotonic() > ends_at and not self.deterministic
            if len(trial.timed) == most or (trial.timed and (is_late or index in last)):
                break
            if problem.is_fused and is_late:
                trial.stopped_at = position
                break
            if self._is_untold(problem, names[index]):
                continue
            try:
                plan.select(index)
                trial.timed.append((bench.time_ms(plan, trial.timed), index))
            except Exception as error:  # cuDNN refuses some of its own proposals while building or running them
                self._gpu.synchronize()  # raises if the GPU cannot continue, which is not the plan's fault
                trial.reason = first_line(error)
                trial.transient |= is_transient(error)
                if trial.transient and self.deterministic:  # another proposal would give other bits in a later run
                    break
            if ends_at == math.inf:
                ends_at = time.monotonic() + seconds
                self._loaded.add(problem.kind)
        return trial

    def _tried_before(self, problem: Problem) -> int:
        """The number of proposals that an earlier process had tried when its time was up."""
        name, tried = self._choices.get(problem.key, (REFUSED, 0))
        return int(tried) if name == UNFINISHED and not self.deterministic else 0

    def _given_up(self, problem: Problem, trial: _Trial) -> GraphError:
        """The error for a problem without a plan. For a fused problem, a permanent refusal is stored."""
        if trial.transient:
            return self._no_plan(problem, trial.reason, TransientError)
        if trial.stopped_at is None:
            if problem.is_fused:
                self._remember(problem, REFUSED, 0.0)
            return self._no_plan(problem, trial.reason)
        self._remember(problem, UNFINISHED, trial.stopped_at)
        self._late.add(problem)
        return self._no_plan(problem, "none of the first in time", TransientError)

    def _remember(self, problem: Problem, name: str, value: float) -> None:
        self._choices[problem.key] = [name, value]
        self._unsaved = True

    @staticmethod
    def _no_plan(problem: Problem, reason: str, kind: type[GraphError] = GraphError) -> GraphError:
        advice = "use a smaller batch size" if kind is TransientError else "use channels that are multiples of 8"
        return kind(f"cuDNN has no {problem.kind} for input {problem.x}, weight {problem.w}, stride "
                    f"{problem.stride}, {problem.dtype} ({reason}): {advice}")

    def _read_choices(self) -> dict[str, list[Any]]:
        body = self._cache.read(self._choices_name)
        return json.loads(body) if body else {}

    # --- describing a problem to cuDNN ---

    def read(self, built: bytes) -> Any:
        """cuDNN's graph with one plan, from its `serialize`. Raises cuDNN's exception."""
        graph = self._cudnn.pygraph(handle=self.handle)
        graph.deserialize(self.handle, list(built))
        return graph

    def describe(self, problem: Problem, unwanted: Sequence[str] | None = None) -> Any:
        """cuDNN's graph with its proposals; its tensors are numbered from FIRST_UID on. Proposals with the numerical
        notes `unwanted` (by default the notes that are never allowed) stay in the list but cannot be built.
        """
        cudnn = self._cudnn
        fp32 = cudnn.data_type.FLOAT
        dtype = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16, "float32": fp32,
                 "int8": cudnn.data_type.INT8, "float8": cudnn.data_type.FP8_E4M3}[problem.dtype]
        graph = cudnn.pygraph(io_data_type=dtype, intermediate_data_type=fp32, compute_data_type=fp32,
                              handle=self.handle)
        window = {"padding": list(problem.pad), "stride": list(problem.stride), "dilation": list(problem.dilate)}

        def tensor(name: str, shape: tuple[int, int, int, int]) -> Any:
            return graph.tensor(name=name, dim=_nchw(shape), stride=_nchw_strides(shape), data_type=dtype)

        def result(output: Any, shape: tuple[int, int, int, int]) -> Any:
            return output.set_dim(_nchw(shape)).set_stride(_nchw_strides(shape)).set_output(True).set_data_type(dtype)

        if problem.kind.startswith("fprop"):
            _, *epilogue = problem.kind.split("_")
            x, w = tensor("x", problem.x), tensor("w", problem.w)
            sums = {"compute_data_type": cudnn.data_type.INT32} if problem.dtype == "int8" else {}
            y = graph.conv_fprop(image=x, weight=w, **window, **sums)
            if sums:
                y.set_data_type(cudnn.data_type.INT32)
            tensors = [x, w]
            if "bias" in epilogue:
                channels = (1, 1, 1, problem.y[3])
                tensors.append(graph.tensor(name="bias", dim=_nchw(channels), stride=_nchw_strides(channels),
                                            data_type=fp32))
                y = graph.bias(input=y, bias=tensors[-1])
            if "add" in epilogue:
                tensors.append(tensor("addend", problem.y))
                y = graph.add(a=y, b=tensors[-1])
            if "relu" in epilogue:
                y = graph.relu(input=y)
            tensors.append(result(y, problem.y))
            if "stats" in epilogue:
                for sums in graph.genstats(input=y):
                    sums.set_output(True).set_data_type(fp32)
                    tensors.append(sums)
        elif problem.kind == "dgrad":
            dy, w = tensor("dy", problem.y), tensor("w", problem.w)
            dx = graph.conv_dgrad(loss=dy, filter=w, **window)
            result(dx, problem.x)
            tensors = [dy, w, dx]
        else:
            x, dy = tensor("x", problem.x), tensor("dy", problem.y)
            dw = graph.conv_wgrad(image=x, loss=dy, **window)
            result(dw, problem.w)
            tensors = [x, dy, dw]
        for number, each in enumerate(tensors, start=FIRST_UID):
            each.set_uid(number)
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            notes = self._unwanted(problem) if unwanted is None else unwanted
            graph.deselect_numeric_notes([getattr(cudnn.numerical_note, note) for note in notes])
        except Exception as error:
            raise GraphError(f"cuDNN refuses the {problem.kind} of input {problem.x} with weight {problem.w}, stride "
                             f"{problem.stride}, {problem.dtype} ({first_line(error)})") from None
        return graph


@dataclass
class _Trial:
    """The result of building and timing the proposals for a problem."""

    timed: list[tuple[float, int]] = field(default_factory=list)  # (milliseconds, index) of each timed proposal
    reason: str = "it proposes no plan"  # message of the latest refusal
    transient: bool = False  # a proposal could not be tried for lack of memory
    stopped_at: int | None = None  # index of the first proposal that was not tried for lack of time


class _Bench:
    """Memory for timing the plans of a problem. Raises TransientError if its tensors alone do not fit."""

    def __init__(self, gpu: Gpu, arena: Arena, problem: Problem) -> None:
        self._gpu, self._arena, self._dtype = gpu, arena, problem.dtype
        self._starts, self._data_bytes = placed(problem)
        arena.reserve(self._data_bytes)
        self._filled_bytes = 0  # size of the arena when it was filled last

    def time_ms(self, plan: Plan, rivals: list[tuple[float, int]]) -> float:
        """Time in ms. A plan that is clearly slower than the best so far is timed only roughly; other plans run for at
        least a millisecond.
        """
        base = self._arena.reserve(self._data_bytes + plan.workspace_bytes)
        if self._arena.num_bytes != self._filled_bytes:  # the arena's memory is new, or has moved
            self._filled_bytes = self._arena.num_bytes
            self._gpu.fill_random(base, self._data_bytes, self._dtype)  # kernels run faster on zeros
        addresses = [base + start for start in self._starts]
        enqueue = partial(plan.enqueue, *addresses, workspace=base + self._data_bytes)
        rough = self._gpu.time_ms(enqueue, launches=1, repeats=1)
        if rivals and rough > 2 * min(rivals)[0] + 0.01:  # a single launch costs 0.003 ms by itself
            return rough
        return self._gpu.time_ms(enqueue, launches=min(8, max(1, round(1 / max(rough, 1e-3)))))


def _last_resorts(names: Sequence[str]) -> set[int]:
    """Indices of the proposals that are used only if no other proposal works; then the first of them is used. These are
    engines that cuDNN names without settings ('eng8', in contrast to 'eng4_k24=33'), unless no engine has settings. In
    34 fused problems in fp16 none of these engines was the fastest, and building them took two thirds of the time, up
    to 30 s each.
    """
    engines = [name.partition("_")[0] for name in names]
    with_settings = {engine for engine, name in zip(engines, names, strict=True) if engine != name}
    return {index for index, engine in enumerate(engines) if with_settings and engine not in with_settings}


def is_transient(error: Exception) -> bool:
    """Whether cuDNN's error is not the plan's fault: memory was short, or a library was missing."""
    return isinstance(error, TransientError) or any(word in str(error).upper() for word in TRANSIENT_WORDS)


def import_cudnn() -> Any:
    """The cudnn module of nvidia-cudnn-frontend, with a recent enough cuDNN. Raises GraphError."""
    try:
        import cudnn
    except ImportError as error:
        raise GraphError(f"the cuda executor needs nvidia-cudnn-frontend ({error}): {INSTALL}") from None
    try:
        version = cudnn.backend_version()
    except Exception:
        raise GraphError(f"the cuDNN library (libcudnn.so.9) is missing: {INSTALL}") from None
    if version < MIN_CUDNN:
        raise GraphError(f"cuDNN {version} is too old, 9.1 or newer is needed: {INSTALL}")
    return cudnn


def placed(problem: Problem) -> tuple[list[int], int]:
    """Offsets of a problem's tensors while it is timed, in the order of `Plan.enqueue`, and their total bytes."""
    roles = {"fprop": "xwy", "fprop_stats": "xwyss", "fprop_bias": "xwcy", "fprop_bias_relu": "xwcy",
             "fprop_bias_add_relu": "xwcyy", "dgrad": "ywx", "wgrad": "xyw"}[problem.kind]
    channels, item_bytes = problem.y[3], ITEM_BYTES[problem.dtype]
    sizes = [channels * 4 if role in "cs" else math.prod(getattr(problem, role)) * item_bytes for role in roles]
    starts = list(itertools.accumulate(map(aligned, sizes), initial=0))
    return starts[:-1], starts[-1]


def _nchw(shape: tuple[int, int, int, int]) -> list[int]:
    """The dimensions in the order NCHW, which cuDNN expects for every memory layout."""
    n, h, w, c = shape
    return [n, c, h, w]


def _nchw_strides(shape: tuple[int, int, int, int]) -> list[int]:
    _, h, w, c = shape
    return [h * w * c, 1, w * c, c]
