"""What the rules of all operators share: where the tensors lie, the launches so far, what one rule leaves to others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from graph_passes.errors import GraphError
from graph_passes.executors.cuda.convolution import Problem
from graph_passes.executors.cuda.kernels import Size, instance
from graph_passes.executors.cuda.parameters import VECTOR, ParameterStore
from graph_passes.executors.cuda.planner import Decision
from graph_passes.executors.cuda.program import Buffer, Launch, Program
from graph_passes.executors.cuda.statistics_group import StatisticsGroup
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import Shape, window
from graph_passes.operators_backward import FORWARD_OF, forward_node
from graph_passes.passes import output_names, tensor_dtypes
from graph_passes.passes.precision import ITEM_BYTES

Buffers = tuple["Buffer | None", ...]
TILE_CHANNELS = 64  # channels that a block of batch_norm.cu works on
REDUCE_BLOCK: Size = (8, 96, 1)  # threads: vectors along the channels, rows
APPLY_BLOCK: Size = (8, 32, 1)


@dataclass
class Persistent:
    """Buffers beside the parameters that outlive a step."""

    data: Buffer  # (N, H, W, C padded), the network's dtype
    label: Buffer  # (N,) float32
    mixup: Buffer  # float32: lambda of mixup, 1 without
    probabilities: Buffer  # (N, classes) float32
    metrics: Buffer  # softmax.cu's Metrics
    num_valid: Buffer  # int32: how many rows of the batch count
    loss_scale: Buffer  # float32, part of the optimizer's state
    tickets: Buffer  # zeros, left as zeros by every reduction


@dataclass
class Fusions:
    """What the rules of nodes that share launches tell each other, an earlier one the later ones."""

    done: set[str] = field(default_factory=set)  # nodes whose launches have been emitted with an earlier one's
    # A tensor -> its sum and sum of squares, which the convolution that wrote it may have left beside it.
    sums: dict[Ref, Buffer] = field(default_factory=dict)
    # Max poolings that are one launch with the BatchNormRelu before them -> that one's input where it won.
    pooled: dict[str, Buffer] = field(default_factory=dict)
    stems: set[str] = field(default_factory=set)  # convolutions that are launches of stem.cu
    # Gradients of a stem's output that are not written, but made by the launch that reads them -> what makes them:
    # the BatchNormReluBackward, the MaxPoolingBackward behind it, and what that reads.
    pool_gradients: dict[Ref, tuple[Node, Node, Buffer]] = field(default_factory=dict)
    paired: set[str] = field(default_factory=set)  # BatchNormAddRelus and the BatchNorms that are one launch with them
    # Gradients of a convolution's data that the BatchNorm reading them may make itself -> their node.
    held: dict[Ref, Node] = field(default_factory=dict)
    dz: dict[str, Buffer] = field(default_factory=dict)  # BatchNorm + ReLU without addend -> its `batch_norm.dz`


class Builder:
    """The program in the making. A rule finds the buffers of its node's inputs here, and emits launches. Its scratch,
    cuDNN's workspace and `partials`, the sums of single blocks, grows with what is emitted."""

    def __init__(self, graph: Graph, shapes: Mapping[Ref, Shape], store: ParameterStore, persistent: Persistent,
                 tools: Toolchain, group: StatisticsGroup | None) -> None:
        self.graph, self.shapes, self.persistent, self.group = graph, shapes, persistent, group
        self.gpu, self.convolutions = tools.gpu, tools.convolutions
        self._kernels, self._planner = tools.kernels, tools.planner
        self.dtype, self.item_bytes = store.dtype, ITEM_BYTES[store.dtype]
        self._dtypes = tensor_dtypes(graph)
        self.is_training = "output_names" in graph.attrs
        self.buffers: dict[Ref, Buffer] = {Ref("data"): persistent.data}
        self._bind_variables(store)
        self.fusions = Fusions()
        self.decisions: list[Decision] = []
        self._workspace, self.partials = Buffer("workspace", (0,), "uint8"), Buffer("partials", (0,), "float32")
        self.program = Program(scratch=(self._workspace, self.partials))

    def _bind_variables(self, store: ParameterStore) -> None:
        """Parameters, running statistics and gradients have their places already."""
        for name in store.parameters:
            self.buffers[Ref(name)] = store.value(name)
        for name, buffer in store.statistics.slices.items():
            self.buffers[Ref(name)] = buffer
        if self.is_training:
            for name, ref in output_names(self.graph).items():
                if name.endswith("_grad"):
                    self.buffers[ref] = store.gradients[name.removesuffix("_grad")]

    # --- tensors ---

    def input(self, node: Node, index: int) -> Buffer:
        return self.buffers[node.inputs[index]]

    def output(self, node: Node, index: int = 0, shape: Shape | None = None) -> Buffer:
        """The buffer of one output of a node; gradients of parameters have theirs already."""
        ref = Ref(node.name, index)
        if ref not in self.buffers:
            name = node.name if index == 0 else f"{node.name}:{index}"
            self.buffers[ref] = Buffer(name, tuple(shape or self.shapes[ref]), self._dtypes[ref])
        return self.buffers[ref]

    def readers(self, node: Node, index: int = 0) -> tuple[Node, ...]:
        """The nodes that read one output of a node."""
        return self.graph.consumers.get(Ref(node.name, index), ())

    def vectors(self, buffer: Buffer) -> int:
        """How many vectors of `VECTOR` elements a tensor of the network's dtype has."""
        return buffer.num_bytes // (VECTOR * self.item_bytes)

    # --- kernels of ours ---

    def kernel(self, name: str, *arguments: object) -> str:
        """A template's instance for the network's dtype, which is its first argument."""
        return instance(name, self.dtype, *arguments)

    def launch(self, node: Node, source: str, kernel: str, grid: Size, block: Size, arguments: tuple[Any, ...],
               reads: Buffers, writes: Buffers, in_place: tuple[Buffer, Buffer] | None = None, shared_bytes: int = 0,
               flops: int = 0) -> None:
        """Emit a kernel of ours. None is a null pointer among the arguments, and nothing among reads and writes."""
        function = self._kernels.get(source, kernel)

        def enqueue() -> None:
            values = (a.address if isinstance(a, Buffer) else 0 if a is None else a for a in arguments)
            function.launch(grid, block, *values, shared_bytes=shared_bytes)

        self.program.launches.append(Launch(
            node.name, kernel.split("<")[0], enqueue, tuple(b for b in reads if b), tuple(b for b in writes if b),
            flops, in_place))

    def grid(self, rows: int, channels: int, block: Size = APPLY_BLOCK, blocks_per_multiprocessor: int = 4) -> Size:
        """As many blocks as the GPU holds at once, by the launch bounds of the kernel."""
        tiles = -(-channels // TILE_CHANNELS)
        blocks = self.gpu.num_multiprocessors * blocks_per_multiprocessor
        return tiles, max(1, min(blocks // tiles, -(-rows // block[1]))), 1

    def reduce_grid(self, rows: int, channels: int, num_sums: int = 2) -> Size:
        """For blocks of `REDUCE_BLOCK`, each of which leaves `num_sums` sums per channel among the partials."""
        grid = self.grid(rows, channels, REDUCE_BLOCK, blocks_per_multiprocessor=1)
        self.reserve_partials(num_sums * channels * grid[1])
        return grid

    def reserve_partials(self, floats: int) -> None:
        self.partials.shape = (max(self.partials.shape[0], floats),)

    # --- plans of cuDNN ---

    def problem(self, kind: str, node: Node, x: Buffer, w: Buffer, y: Buffer) -> Problem:
        """What cuDNN is to compute for a Convolution or FullyConnected, or a gradient of one."""
        forward = forward_node(node) if node.op in FORWARD_OF else node
        if forward.op == "FullyConnected":
            rows, columns = y.shape[0], math.prod(x.shape[1:])
            return Problem(kind, (rows, 1, 1, columns), _four(w.shape), (rows, 1, 1, math.prod(y.shape[1:])),
                           (0, 0), (1, 1), (1, 1), self.dtype)
        size = window(forward)
        return Problem(kind, _four(x.shape), _four(w.shape), _four(y.shape), size.pad, size.stride, size.dilate,
                       self.dtype)

    def plan(self, node: Node, problem: Problem, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]) -> None:
        """Emit a cuDNN plan."""
        plan = self.convolutions.plan(problem)
        self._workspace.shape = (max(self._workspace.shape[0], plan.workspace_bytes),)

        def enqueue() -> None:
            addresses = [buffer.address for buffer in (*reads, *writes)]
            if problem.kind == "fprop_stats":
                addresses.append(addresses[-1] + writes[-1].num_bytes // 2)  # the second half: sums of squares
            plan.enqueue(*addresses, workspace=self._workspace.address)

        self.program.launches.append(Launch(node.name, problem.kind, enqueue, reads, writes, flops=problem.flops))

    # --- several ways ---

    def fastest(self, node: Node, problem: str, ways: Mapping[str, Callable[[], None]]) -> None:
        """Emit the launches of the fastest of several ways, each of which emits its own; see `Planner`."""
        decision, launches = self._planner.fastest(
            node.name, problem, {name: partial(self._emitted, way) for name, way in ways.items()}, self.program.scratch)
        self.program.launches += launches
        self.decisions.append(decision)

    def _emitted(self, emit: Callable[[], None]) -> list[Launch]:
        """What it would emit."""
        before, self.program.launches = self.program.launches, []
        try:
            emit()
            return self.program.launches
        finally:
            self.program.launches = before


def rows_and_channels(node: Node, x: Buffer) -> tuple[int, int]:
    """Of a tensor as BatchNorm's kernels see it. Raises GraphError for one that they cannot index."""
    channels = x.shape[-1]
    require(channels % VECTOR == 0, node, f"has {channels} channels: use a multiple of {VECTOR}")
    rows = math.prod(x.shape[:-1])
    require(rows * channels // VECTOR < 2**32, node, f"has {rows} x {channels} elements: use a smaller batch")
    return rows, channels


def require(condition: bool, node: Node, problem: str) -> None:
    """Raise GraphError for the node, under the name of its forward operator, unless the condition holds."""
    if not condition:
        raise GraphError(f"{FORWARD_OF.get(node.op, node.op)} '{node.name}' {problem}")


def no_lowering(node: Node) -> GraphError:
    return GraphError(f"the cuda executor cannot run {node.op} '{node.name}': use the executor mxnet, or a network of "
                      "the operators that docs/cuda_executor.md lists")


def _four(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    a, b, c, d = shape
    return a, b, c, d
