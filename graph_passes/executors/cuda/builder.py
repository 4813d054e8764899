"""State that the launch rules of all operators share: the buffers of the tensors, and the launches so far.

A tensor has up to two forms. In the dense form its elements are contiguous. In the padded form the last dimension is
padded with zeros to a multiple of 8 (`VECTOR`), which cuDNN's tensor-core kernels and kernels on vectors require. Both
forms are equal if the last dimension is a multiple of 8, as in most networks. A launch rule sees dense tensors; a rule
marked by `padded_rows` sees padded tensors. If a tensor lacks the requested form, it is copied into this form.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from graph_passes.errors import GraphError
from graph_passes.executors.cuda.convolution import Problem
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import C_TYPES, HOPPER, Size, count, instance, threads
from graph_passes.executors.cuda.operands import (
    In,
    InOut,
    Operand,
    Out,
    Scratch,
    Tiled,
    in_place,
    reads,
    writes,
)
from graph_passes.executors.cuda.parameters import VECTOR, padded
from graph_passes.executors.cuda.program import Buffer, Launch, Program, View
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.graph import Node, Ref
from graph_passes.operators import OPERATORS, Shape, shown_name, window
from graph_passes.passes.precision import ITEM_BYTES, role_of

_CUDA = Declarations("batch_norm.cuh")
TILE_CHANNELS = _CUDA.value("TILE * VEC")  # channels that a block of batch_norm.cu processes
# largest number of channels of a tensor that is summed, because each tile needs a ticket
MAX_CHANNELS = 4096 * TILE_CHANNELS
# Threads of a block: vectors along the channels, rows.
REDUCE_BLOCK: Size = (_CUDA.value("TILE"), _CUDA.value("REDUCE_ROWS"), 1)
APPLY_BLOCK: Size = (_CUDA.value("TILE"), _CUDA.value("APPLY_ROWS"), 1)

# Inputs and outputs that have only one form: parameters, whose padding is part of their memory, and arrays that kernels
# index in their own way.
ONE_FORM = ("weight", "weight_grad", "parameters", "reserve", "mask", "factors", "seed", "tokens")


@dataclass(frozen=True)
class Persistent:
    """Buffers that outlive a step, besides the parameters."""

    data: Buffer  # (N, H, W, C padded), the network's dtype
    label: Buffer  # (N,) float32
    own_share: Buffer  # float32: share of an image's own label in its target; 1 without mixing
    seed: Buffer  # (2,) uint32: seed of the Dropout masks
    probabilities: Buffer  # (N, classes) float32; or (N, C), the tensor at which inference ends
    metrics: Buffer  # softmax.cu's Metrics
    num_valid: Buffer  # int32: number of valid rows of the batch
    loss_scale: Buffer  # float32, part of the optimizer's state
    tickets: Buffer  # zeros; every reduction resets its tickets to zero
    class_weights: Buffer | None = None  # (classes,) float32, if the loss has class weights


class Builder:
    """The program under construction. A launch rule finds the buffers of its node's inputs here, and emits launches.
    Scratch memory, cuDNN's workspace and `partials` (partial sums of blocks) grow as needed.

    `shapes` and `dtypes` are those of all tensors. `buffers` has the tensors that already have an address.
    """

    def __init__(self, shapes: Mapping[Ref, Shape], dtypes: Mapping[Ref, str], buffers: Mapping[Ref, Buffer],
                 dtype: str, persistent: Persistent, tools: Toolchain) -> None:
        self.shapes, self.persistent, self.group = shapes, persistent, tools.group
        self.gpu, self.convolutions, self.recurrent = tools.gpu, tools.convolutions, tools.recurrent
        self._kernels, self._dtypes = tools.kernels, dtypes
        self.dtype, self.item_bytes = dtype, ITEM_BYTES[dtype]
        self.buffers = dict(buffers)  # buffer of each tensor, in the form in which it was written
        self._bound = frozenset(buffers)
        self.images = frozenset(ref for ref, buffer in buffers.items() if buffer.shape == persistent.data.shape)
        self._pads = False
        self._forms: dict[tuple[Ref, Shape], Buffer] = {}  # copies of tensors in another form
        self._one_form: set[Ref] = set()  # tensors whose shape only the rules of their operators know
        # outputs of the present rule that must be copied to the dense form at the end of the rule
        self._unfinished: dict[Ref, Buffer] = {}
        self._workspace, self._partials = Buffer("workspace", (0,), "uint8"), Buffer("partials", (0,), "float32")
        self.program = Program(scratch=(self._workspace, self._partials))

    # --- tensors ---

    def input(self, node: Node, role: str) -> Buffer:
        """The buffer of the node's input that the operator's description calls `role`."""
        ref = node.input(role)
        if role_of(role) in ONE_FORM or (ref in self.images and _reads_padded_images(node)):
            return self.buffers[ref]
        return self.tensor(ref)

    def optional_input(self, node: Node, role: str, absent: str) -> Buffer | None:
        """The buffer of an optional input; None if the node's attribute `absent` lists it."""
        return None if node[absent] else self.input(node, role)

    def tensor(self, ref: Ref) -> Buffer:
        """The buffer of a tensor, in the form that the present rule needs: dense or padded."""
        return self._padded(ref) if self._pads else self.dense(ref)

    def dense(self, ref: Ref) -> Buffer:
        """The buffer of a tensor in its dense form."""
        return self._form(ref, self.shapes[ref]) if self.is_padded(ref) else self.buffers[ref]

    def is_padded(self, ref: Ref) -> bool:
        """Whether a tensor was written in the padded form, and has padding."""
        shape = self.shapes[ref]
        return not self.has_one_form(ref) and math.prod(self.buffers[ref].shape) != math.prod(shape)

    def matrix(self, ref: Ref, columns: int) -> Buffer:
        """The buffer of a tensor as a padded matrix with `columns` columns."""
        shape = self.shapes[ref]
        rows = math.prod(shape) // columns
        if shape[-1] == columns:
            return View(self._padded(ref), (rows, padded(columns)))
        dense = View(self.dense(ref), (rows, columns))
        return dense if columns % VECTOR == 0 else self._copied(ref, dense, (rows, padded(columns)))

    def output(self, node: Node, role: str = "", shape: Shape | None = None) -> Buffer:
        """The buffer of one output of a node, by default the first. Gradients of parameters have their buffers already.
        `shape`: the shape of a tensor that has only this form, because no rule of another operator reads it.
        """
        ref = node.output(role) if role else Ref(node.name)
        has_one_form = role_of(role or OPERATORS[node.op].output_names(node)[0]) in ONE_FORM
        if ref not in self.buffers:
            name = node.name if ref.output == 0 else f"{node.name}:{ref.output}"
            own = self.shapes[ref]
            pads = self._pads and not has_one_form
            if shape:
                self._one_form.add(ref)
            self.buffers[ref] = Buffer(name, tuple(shape or (padded_shape(own) if pads else own)), self._dtypes[ref])
        elif ref in self._bound and self._pads and not has_one_form and self._is_unpadded(ref):
            if ref not in self._unfinished:
                self._unfinished[ref] = Buffer(f"{node.name}:padded", padded_shape(self.shapes[ref]),
                                               self._dtypes[ref])
            return self._unfinished[ref]
        return self.buffers[ref]

    @contextmanager
    def output_matrix(self, node: Node, columns: int) -> Iterator[Buffer]:
        """A context with the buffer of a node's output as a padded matrix with `columns` columns. The matrix must be
        written inside the context.
        """
        ref = Ref(node.name)
        shape = self.shapes[ref]
        rows = math.prod(shape) // columns
        if shape[-1] == columns:
            yield View(self.output(node), (rows, padded(columns)))
            return
        y = self.buffers.setdefault(ref, Buffer(node.name, shape, self._dtypes[ref]))
        dense = View(y, (rows, columns))
        if columns % VECTOR == 0:
            yield dense
            return
        written = Buffer(f"{node.name}:padded", (rows, padded(columns)), y.dtype)
        yield written
        self.copy_columns(node, In(written), Out(dense), columns)

    def share(self, node: Node) -> None:
        """Make a node's output the memory of its first input, with the output's shape."""
        ref, shape = node.inputs[0], self.shapes[Ref(node.name)]
        keeps_rows = self.shapes[ref][-1:] == shape[-1:]
        x = self.buffers[ref] if keeps_rows else self.dense(ref)
        view = View(x, (*shape[:-1], x.shape[-1]) if keeps_rows else shape)
        target = self.buffers.setdefault(Ref(node.name), view)
        if target is not view:  # the target has separate memory
            self.convert(node, self.dense(ref), target)

    def convert(self, node: Node, x: Buffer, y: Buffer) -> None:
        """Copy a dense tensor, converted to another type."""
        elements = math.prod(y.shape)
        self.launch(node, "elementwise.cu", instance("convert_input", x.dtype, y.dtype), *threads(elements), In(x),
                    Out(y), ctypes.c_int64(elements), ctypes.c_int(1), ctypes.c_int(1))

    @contextmanager
    def padded_rows(self) -> Iterator[None]:
        """A context in which rules see padded tensors."""
        self._pads = True
        try:
            yield
            for ref, written in self._unfinished.items():
                self.copy_columns(Node("copy", ref.node), In(written), Out(self.buffers[ref]), self.shapes[ref][-1])
            self._unfinished.clear()
        finally:
            self._pads = False

    def _padded(self, ref: Ref) -> Buffer:
        buffer, wanted = self.buffers[ref], padded_shape(self.shapes[ref])
        if math.prod(buffer.shape) == math.prod(wanted) or self.has_one_form(ref):
            return buffer
        return self._form(ref, wanted)

    def has_one_form(self, ref: Ref) -> bool:
        """Whether a tensor has only one form, which is both written and read."""
        # vectors have one form: their memory is always padded
        return ref in self._one_form or len(self.shapes[ref]) < 2

    def _is_unpadded(self, ref: Ref) -> bool:
        return not self.has_one_form(ref) and self.shapes[ref][-1] % VECTOR != 0

    def _form(self, ref: Ref, shape: Shape) -> Buffer:
        """The form of a tensor with the given shape, which differs only in the size of the last dimension."""
        return self._copied(ref, self.buffers[ref], shape)

    def _copied(self, ref: Ref, source: Buffer, shape: Shape) -> Buffer:
        """A copy of `source`, a form of the tensor, with rows of another size."""
        if (ref, shape) not in self._forms:
            columns = min(source.shape[-1], shape[-1])
            target = self._forms[ref, shape] = Buffer(f"{ref.node}:{ref.output}:{shape[-1]}", shape, source.dtype)
            self.copy_columns(Node("copy", ref.node), In(source), Out(target), columns, fill=columns < shape[-1])
        return self._forms[ref, shape]

    def copy_columns(self, node: Node, source: In, target: Out | InOut, columns: int, from_first: int = 0,
                     to_first: int = 0, fill: bool = False) -> None:
        """Copy columns of a matrix to columns of another. `fill`: all other columns of the target become 0. Whole
        vectors are copied if all column numbers are multiples of VECTOR.
        """
        assert source.buffer and target.buffer
        from_pitch, to_pitch, dtype = source.buffer.shape[-1], target.buffer.shape[-1], source.buffer.dtype
        numbers = (columns, from_pitch, from_first, to_pitch, to_first)
        width = VECTOR if all(number % VECTOR == 0 for number in numbers) else 1
        columns, from_pitch, from_first, to_pitch, to_first = (number // width for number in numbers)
        items = math.prod(source.buffer.shape[:-1]) * (to_pitch if fill else columns)
        kind = instance("Packed", dtype) if width == VECTOR else C_TYPES.get(dtype, dtype)
        self.launch(node, "channels.cu", instance("copy_columns", kind, fill), *threads(items), source, target,
                    *map(count, (items, columns, from_pitch, from_first, to_pitch, to_first)))

    def vectors(self, buffer: Buffer) -> int:
        """The number of vectors of `VECTOR` elements in a tensor of the network's dtype."""
        return buffer.num_bytes // (VECTOR * self.item_bytes)

    # --- kernels of ours ---

    def kernel(self, name: str, *arguments: object) -> str:
        """The instance of a kernel template whose first argument is the network's dtype."""
        return instance(name, self.dtype, *arguments)

    def launch(self, node: Node, source: str, kernel: str, grid: Size, block: Size, *operands: Any,
               shared_bytes: int = 0, flops: int = 0) -> None:
        """Emit a launch of a kernel of this project. `operands` are its arguments: operands as defined in
        `operands.py`, and ctypes values.
        """
        self._kernels.begin(source, kernel)
        self.program.loads.append(partial(self._kernels.get, source, kernel))

        def enqueue() -> None:
            function = self._kernels.get(source, kernel)
            function.launch(grid, block, *map(self._argument, operands), shared_bytes=shared_bytes)

        self.program.launches.append(Launch(node.name, kernel.split("<")[0], enqueue, reads(operands), writes(operands),
                                            flops, in_place=in_place(operands)))

    def grid(self, rows: int, channels: int, block: Size = APPLY_BLOCK, blocks_per_multiprocessor: int = 4) -> Size:
        """A grid of at most as many blocks as the GPU can hold at once, by the kernel's launch bounds."""
        tiles = -(-channels // TILE_CHANNELS)
        blocks = self.gpu.num_multiprocessors * blocks_per_multiprocessor
        return tiles, max(1, min(blocks // tiles, -(-rows // block[1]))), 1

    def reduce_grid(self, rows: int, channels: int) -> Size:
        """The grid for blocks of `REDUCE_BLOCK`."""
        return self.grid(rows, channels, REDUCE_BLOCK, blocks_per_multiprocessor=1)

    def partials(self, floats: int) -> Scratch:
        """A buffer for this many floats: the partial sums that each block writes and the last block adds up."""
        self._partials.shape = (max(self._partials.shape[0], floats),)
        return Scratch(self._partials)

    @property
    def tickets(self) -> Scratch:
        """A buffer of counters, from which a block learns whether it is the last block."""
        return Scratch(self.persistent.tickets)

    # --- plans of cuDNN ---

    def problem(self, kind: str, node: Node, x: Buffer, w: Buffer, y: Buffer) -> Problem:
        """The cuDNN problem of a Convolution or FullyConnected, or of one of its gradients. Data and output of a
        FullyConnected are matrices."""
        if shown_name(node.op) == "FullyConnected":
            (rows, columns), (_, filters) = x.shape, y.shape
            return Problem(kind, (rows, 1, 1, columns), _four(w.shape), (rows, 1, 1, filters),
                           (0, 0), (1, 1), (1, 1), self.dtype)
        size = window(node)
        return Problem(kind, _four(x.shape), _four(w.shape), _four(y.shape), size.pad, size.stride, size.dilate,
                       self.dtype)

    def plan(self, node: Node, problem: Problem, *operands: Operand) -> None:
        """Emit a cuDNN plan; the operands are in the order of `Plan.enqueue`."""
        plan = self.convolutions.plan(problem)

        def enqueue(*addresses: int, workspace: int) -> None:
            if problem.kind == "fprop_stats":
                sums = operands[-1].buffer
                assert sums
                addresses = (*addresses, addresses[-1] + sums.num_bytes // 2)  # the second half: sums of squares
            plan.enqueue(*addresses, workspace=workspace)

        self.call(node, problem.kind, enqueue, *operands, workspace_bytes=plan.workspace_bytes, flops=problem.flops)

    def call(self, node: Node, operation: str, function: Callable[..., None], *operands: Operand, workspace_bytes: int,
             flops: int) -> None:
        """Emit a library call. `function` gets the addresses of the operands (0 for a null pointer), and of a workspace
        of `workspace_bytes` bytes.
        """
        self._workspace.shape = (max(self._workspace.shape[0], workspace_bytes),)

        def enqueue() -> None:
            function(*map(self._argument, operands), workspace=self._workspace.address)

        self.program.launches.append(Launch(node.name, operation, enqueue, reads(operands), writes(operands), flops,
                                            by_library=True))


    def _argument(self, operand: Any) -> Any:
        """The kernel's argument for an operand: an address as an int, or a ctypes value."""
        if isinstance(operand, Tiled):
            address, buffer = self._argument(operand.operand), operand.operand.buffer
            dtype = buffer.dtype if buffer else self.dtype
            return self.gpu.tensor_map(address, dtype, operand.tiling)
        if isinstance(operand, In | Out | InOut | Scratch):
            return operand.buffer.address if operand.buffer else 0
        return operand


Rule = Callable[[Builder, Node], None]
Launches = Mapping[str, Rule]  # operator -> function that emits the launches of a node


def padded_rows(rule: Rule, where: Callable[[Builder, Node], bool] = lambda builder, node: True) -> Rule:
    """The rule, changed to see padded tensors for nodes for which `where` is true."""

    @wraps(rule)
    def launch(builder: Builder, node: Node) -> None:
        if where(builder, node):
            with builder.padded_rows():
                rule(builder, node)
        else:
            rule(builder, node)

    launch.takes_any_channels = True  # type: ignore[attr-defined]
    return launch


def reads_padded(builder: Builder, node: Node) -> bool:
    """Whether an input is padded. Elementwise operators then work on the padded form, without a copy to the dense form.
    """
    return any(builder.is_padded(ref) for ref in node.inputs)


def rows_and_channels(node: Node, x: Buffer) -> tuple[int, int]:
    """(rows, channels) of a tensor for the BatchNorm kernels. Raises GraphError if they do not support its channels."""
    channels = x.shape[-1]
    require(channels % VECTOR == 0, node, f"has {channels} channels: use a multiple of {VECTOR}")
    require(channels <= MAX_CHANNELS, node, f"has {channels} channels: use {MAX_CHANNELS} at most")
    return math.prod(x.shape[:-1]), channels


def require(condition: bool, node: Node, problem: str) -> None:
    """Raise GraphError for the node, with operator names that users know, if the condition is false."""
    if not condition:
        raise GraphError(f"{shown_name(node.op)} '{node.attrs.get('part_of', node.name)}' {problem}")


def require_whole_vectors(builder: Builder, node: Node) -> None:
    """Raise GraphError if a fused operator reads or writes channels that are not a multiple of a vector."""
    operator = OPERATORS[node.op]
    operands = zip((*operator.input_names(node), *operator.output_names(node)), (*node.inputs, *node.refs()),
                   strict=True)
    for role, ref in operands:
        channels = builder.shapes[ref][-1]
        require(len(builder.shapes[ref]) < 4 or channels % VECTOR == 0 or role_of(role) in ONE_FORM
                or ref in builder.images, node, f"has {channels} channels: its kernel takes multiples of {VECTOR}")


def require_hopper(builder: Builder, node: Node) -> None:
    """Raise GraphError unless the GPU has Hopper's matrix instructions and TMA."""
    require(builder.gpu.capability == HOPPER, node, "is a fused operator that needs a Hopper GPU (sm_90a)")


def no_lowering(node: Node) -> GraphError:
    return GraphError(f"the cuda executor cannot run {node.op} '{node.name}': use the executor mxnet, or a network of "
                      "the operators that docs/cuda_executor.md lists")


def padded_shape(shape: Shape) -> Shape:
    """The shape of a tensor whose rows are padded to whole vectors."""
    return *shape[:-1], padded(shape[-1])


def _reads_padded_images(node: Node) -> bool:
    """Whether an operator reads the network's images with their padding channel. Convolutions do, because their weights
    have this channel too, and so do operators that copy images.
    """
    operator = OPERATORS[node.op]
    roles = map(role_of, (*operator.input_names(node), *operator.output_names(node)))
    return node.op == "reverse" or node.op.startswith("Quantise") or not {"weight", "weight_grad"}.isdisjoint(roles)


def _four(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    a, b, c, d = shape
    return a, b, c, d
