"""State that the launch rules of all operators share: where the tensors are, and the launches so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from graph_passes.errors import GraphError
from graph_passes.executors.cuda.convolution import Problem
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import HOPPER, Size, instance
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
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.executors.cuda.program import Buffer, Launch, Program
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.graph import Node, Ref
from graph_passes.operators import Shape, shown_name, window
from graph_passes.passes.precision import ITEM_BYTES

_CUDA = Declarations("batch_norm.cuh")
TILE_CHANNELS = _CUDA.value("TILE * VEC")  # channels that a block of batch_norm.cu works on
MAX_CHANNELS = 4096 * TILE_CHANNELS  # most channels of a tensor that is summed: each tile has a ticket
# Threads: vectors along the channels, rows.
REDUCE_BLOCK: Size = (_CUDA.value("TILE"), _CUDA.value("REDUCE_ROWS"), 1)
APPLY_BLOCK: Size = (_CUDA.value("TILE"), _CUDA.value("APPLY_ROWS"), 1)


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
    tickets: Buffer  # zeros; every reduction leaves zeros behind
    class_weights: Buffer | None = None  # (classes,) float32, if the loss has class weights


class Builder:
    """The program under construction. A launch rule finds the buffers of its node's inputs here, and emits launches.
    Scratch memory, cuDNN's workspace and `partials` (partial sums of blocks) grow as needed.

    `shapes` and `dtypes`: of all tensors. `buffers`: of the tensors that have an address already.
    """

    def __init__(self, shapes: Mapping[Ref, Shape], dtypes: Mapping[Ref, str], buffers: Mapping[Ref, Buffer],
                 dtype: str, persistent: Persistent, tools: Toolchain) -> None:
        self.shapes, self.persistent, self.group = shapes, persistent, tools.group
        self.gpu, self.convolutions, self.recurrent = tools.gpu, tools.convolutions, tools.recurrent
        self._kernels, self._dtypes = tools.kernels, dtypes
        self.dtype, self.item_bytes = dtype, ITEM_BYTES[dtype]
        self.buffers = dict(buffers)
        self._workspace, self._partials = Buffer("workspace", (0,), "uint8"), Buffer("partials", (0,), "float32")
        self.program = Program(scratch=(self._workspace, self._partials))

    # --- tensors ---

    def input(self, node: Node, role: str) -> Buffer:
        """The buffer of the input with this name in the operator's description."""
        return self.buffers[node.input(role)]

    def optional_input(self, node: Node, role: str, absent: str) -> Buffer | None:
        """The buffer of an optional input; None if the node's attribute `absent` lists it."""
        return None if node[absent] else self.input(node, role)

    def output(self, node: Node, role: str = "", shape: Shape | None = None) -> Buffer:
        """The buffer of one output of a node, by default the first. Gradients of parameters have their buffers
        already."""
        ref = node.output(role) if role else Ref(node.name)
        if ref not in self.buffers:
            name = node.name if ref.output == 0 else f"{node.name}:{ref.output}"
            self.buffers[ref] = Buffer(name, tuple(shape or self.shapes[ref]), self._dtypes[ref])
        return self.buffers[ref]

    def vectors(self, buffer: Buffer) -> int:
        """The number of vectors of `VECTOR` elements in a tensor of the network's dtype."""
        return buffer.num_bytes // (VECTOR * self.item_bytes)

    # --- kernels of ours ---

    def kernel(self, name: str, *arguments: object) -> str:
        """The template's instance for the network's dtype, which is its first argument."""
        return instance(name, self.dtype, *arguments)

    def launch(self, node: Node, source: str, kernel: str, grid: Size, block: Size, *operands: Any,
               shared_bytes: int = 0, flops: int = 0) -> None:
        """Emit a kernel of ours. `operands` are its arguments: buffers as `operands.py` has them, and ctypes values."""
        self._kernels.begin(source, kernel)
        self.program.loads.append(partial(self._kernels.get, source, kernel))

        def enqueue() -> None:
            function = self._kernels.get(source, kernel)
            function.launch(grid, block, *map(self._argument, operands), shared_bytes=shared_bytes)

        self.program.launches.append(Launch(node.name, kernel.split("<")[0], enqueue, reads(operands), writes(operands),
                                            flops, in_place=in_place(operands)))

    def grid(self, rows: int, channels: int, block: Size = APPLY_BLOCK, blocks_per_multiprocessor: int = 4) -> Size:
        """As many blocks as the GPU can hold at once, by the kernel's launch bounds."""
        tiles = -(-channels // TILE_CHANNELS)
        blocks = self.gpu.num_multiprocessors * blocks_per_multiprocessor
        return tiles, max(1, min(blocks // tiles, -(-rows // block[1]))), 1

    def reduce_grid(self, rows: int, channels: int) -> Size:
        """The grid for blocks of `REDUCE_BLOCK`."""
        return self.grid(rows, channels, REDUCE_BLOCK, blocks_per_multiprocessor=1)

    def partials(self, floats: int) -> Scratch:
        """A buffer for this many floats: the partial sums that blocks leave for the last block."""
        self._partials.shape = (max(self._partials.shape[0], floats),)
        return Scratch(self._partials)

    @property
    def tickets(self) -> Scratch:
        """A buffer of counters by which a block knows that it is the last."""
        return Scratch(self.persistent.tickets)

    # --- plans of cuDNN ---

    def problem(self, kind: str, node: Node, x: Buffer, w: Buffer, y: Buffer) -> Problem:
        """The cuDNN problem of a Convolution or FullyConnected, or of one of its gradients."""
        if shown_name(node.op) == "FullyConnected":
            rows, columns = y.shape[0], math.prod(x.shape[1:])
            return Problem(kind, (rows, 1, 1, columns), _four(w.shape), (rows, 1, 1, math.prod(y.shape[1:])),
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
        """Emit a call of a library. `function` gets the addresses of the operands (0 for a null pointer), and a
        workspace of `workspace` bytes."""
        self._workspace.shape = (max(self._workspace.shape[0], workspace_bytes),)

        def enqueue() -> None:
            function(*map(self._argument, operands), workspace=self._workspace.address)

        self.program.launches.append(Launch(node.name, operation, enqueue, reads(operands), writes(operands), flops,
                                            by_library=True))


    def _argument(self, operand: Any) -> Any:
        """The argument as the kernel takes it: an address is an int."""
        if isinstance(operand, Tiled):
            address, buffer = self._argument(operand.operand), operand.operand.buffer
            dtype = buffer.dtype if buffer else self.dtype
            return self.gpu.tensor_map(address, dtype, operand.tiling)
        if isinstance(operand, In | Out | InOut | Scratch):
            return operand.buffer.address if operand.buffer else 0
        return operand


Launches = Mapping[str, Callable[[Builder, Node], None]]  # operator -> function that emits the launches of a node


def rows_and_channels(node: Node, x: Buffer) -> tuple[int, int]:
    """(rows, channels) of a tensor for the BatchNorm kernels. Raises GraphError if they do not support its channels."""
    channels = x.shape[-1]
    require(channels % VECTOR == 0, node, f"has {channels} channels: use a multiple of {VECTOR}")
    require(channels <= MAX_CHANNELS, node, f"has {channels} channels: use {MAX_CHANNELS} at most")
    return math.prod(x.shape[:-1]), channels


def require(condition: bool, node: Node, problem: str) -> None:
    """Raise GraphError for the node, with names that users know, if the condition is false."""
    if not condition:
        raise GraphError(f"{shown_name(node.op)} '{node.attrs.get('part_of', node.name)}' {problem}")


def require_hopper(builder: Builder, node: Node) -> None:
    """Raise GraphError unless the GPU has Hopper's matrix instructions and TMA."""
    require(builder.gpu.capability == HOPPER, node, "is a fused operator that needs a Hopper GPU (sm_90a)")


def no_lowering(node: Node) -> GraphError:
    return GraphError(f"the cuda executor cannot run {node.op} '{node.name}': use the executor mxnet, or a network of "
                      "the operators that docs/cuda_executor.md lists")


def _four(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    a, b, c, d = shape
    return a, b, c, d
