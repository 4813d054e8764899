"""Memory plan of a graph's tensors: one arena, offsets from lifetimes, in place if that is legal."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import OPERATORS
from graph_passes.passes.precision import ITEM_BYTES, tensor_dtypes

Tensor = TypeVar("Tensor", bound=Hashable)  # a tensor's key: a Ref here, or a buffer of a lowered graph

ALIGNMENT = 256  # bytes, like cudaMalloc's alignment: more than any vector load or cuDNN requires


class Allocation(NamedTuple):
    """A tensor's place: `offset` and `num_bytes` in the arena, alive from step `first` to `last`, both included."""

    offset: int
    num_bytes: int
    first: int
    last: int
    in_place: bool  # whether the tensor overwrites a tensor whose life ended in step `first`


@dataclass(frozen=True)
class MemoryPlan:
    """Offsets of all tensors of a graph except its variables and outputs, which outlive the step and have other memory.

    The steps of the allocations are indices of nodes in the graph's order, variables included.
    """

    graph: Graph
    allocations: Mapping[Ref, Allocation]
    external: Mapping[Ref, int]  # variables and outputs of the graph -> bytes
    arena_bytes: int

    @cached_property
    def live_bytes(self) -> list[int]:
        """Bytes that are alive while each node runs, including alignment; memory that is overwritten in place is
        counted once."""
        change = [0] * (len(self.graph) + 1)
        for allocation in self.allocations.values():
            # A tensor that overwrites another tensor shares a node with that tensor. This node is counted for the
            # earlier tensor.
            change[allocation.first + allocation.in_place] += aligned(allocation.num_bytes)
            change[allocation.last + 1] -= aligned(allocation.num_bytes)
        live, total = [], 0
        for step in change[:-1]:
            total += step
            live.append(total)
        return live

    @property
    def lower_bound(self) -> int:
        """Bytes that any plan with this order and these overwrites needs: the maximum over the nodes of the bytes that
        are alive.
        """
        return max(self.live_bytes, default=0)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors side by side, without reuse."""
        return sum(aligned(allocation.num_bytes) for allocation in self.allocations.values())

    def table(self) -> str:
        """A few lines of text: totals, the node at the peak, and the largest tensors at this node."""
        number = self.live_bytes.index(self.lower_bound)
        node = list(self.graph)[number]
        at_peak = {ref: a for ref, a in self.allocations.items() if a.first <= number <= a.last}
        in_place = sum(a.in_place for a in self.allocations.values())
        outside = sum(self.external.values())
        over_bound = self.arena_bytes / max(self.lower_bound, 1)
        over_arena = self.tensor_bytes / max(self.arena_bytes, 1)
        lines = [
            f"arena        {_mib(self.arena_bytes)}   {len(self.allocations)} tensors, {in_place} of them in place",
            f"lower bound  {_mib(self.lower_bound)}   arena / bound = {over_bound:.4f}",
            f"all tensors  {_mib(self.tensor_bytes)}   all / arena = {over_arena:.2f}",
            f"outside      {_mib(outside)}   {len(self.external)} variables and outputs",
            f"most is alive at {node.op} '{node.name}', node {number} of {len(self.graph)}; the largest tensors there:",
        ]
        for ref, a in sorted(at_peak.items(), key=lambda item: -item[1].num_bytes)[:10]:
            lines.append(f"  {_mib(a.num_bytes)}   nodes {a.first:>3} to {a.last:>3}   {ref.node}, output {ref.output}")
        return "\n".join(lines)


def memory(graph: Graph, shapes: Mapping[str, Sequence[int]]) -> MemoryPlan:
    """Plan one arena for the tensors of a graph whose nodes run one after the other, in the graph's order.

        before    y = relu(x) reads x last, dy = f(y):     x at 0, y at 4096, dy at 8192: 12,288 bytes
        after     y overwrites x, dy comes after it:       x at 0, y at 0,    dy at 4096:  8,192 bytes

    `shapes`: the shapes of the input variables; `tensor_dtypes` gives the bytes per element. A tensor lives from the
    node that writes it to its last reader. Offsets are multiples of 256 bytes. Scratch memory of kernels is not a
    tensor of the graph and not planned here.

    ResNet-50, fused, fp16, 224 px, batch 256: 10,043 MiB, which is the lower bound. Without reuse all tensors take
    24,870 MiB.
    """
    sizes, dtypes = graph.infer_shapes(shapes), tensor_dtypes(graph)
    num_bytes = {ref: math.prod(shape) * ITEM_BYTES[dtypes[ref]] for ref, shape in sizes.items()}
    external = {ref: size for ref, size in num_bytes.items() if graph[ref.node].is_variable or ref in graph.outputs}
    steps = [
        Step(
            reads=[ref for ref in node.inputs if ref not in external],
            writes=[ref for ref in node.refs() if ref not in external],
            in_place=_in_place(node),
        )
        for node in graph
    ]
    allocations, arena_bytes = plan_arena(steps, num_bytes)
    return MemoryPlan(graph, allocations, external, arena_bytes)


@dataclass(frozen=True)
class Step(Generic[Tensor]):
    """The tensors in the arena that one node, or one launch, reads and writes. `in_place`: for each output that may
    overwrite an input, the list of these inputs, the preferred input first.
    """

    reads: Iterable[Tensor]
    writes: Iterable[Tensor]
    in_place: Mapping[Tensor, Sequence[Tensor]]


def plan_arena(
    steps: Sequence[Step[Tensor]], num_bytes: Mapping[Tensor, int]
) -> tuple[dict[Tensor, Allocation], int]:
    """An offset for every tensor that the steps, run one after the other, read or write; and the bytes of the arena.

    A tensor lives from the step that writes it first to its last reader. It overwrites a tensor whose life ends in the
    step in which its own life begins, if the step allows this and both have equal sizes. Tensors are placed in order of
    size, the largest first, each at the lowest offset that is free during its lifetime (greedy by size: Pisarchyk and
    Lee, arXiv:2001.03288). The placement is repeated in the order of size * lifetime, and the smaller arena wins.
    """
    first: dict[Tensor, int] = {}
    last: dict[Tensor, int] = {}
    for number, step in enumerate(steps):
        for tensor in (*step.reads, *step.writes):
            first.setdefault(tensor, number)
            last[tensor] = number

    # last tensor in a place -> all tensors that occupy the place, one after the other
    chains: dict[Tensor, list[Tensor]] = {}
    for number, step in enumerate(steps):
        for tensor in step.writes:
            if first[tensor] < number:
                continue  # an earlier step has written this tensor, for example a sum that grows
            dying = [old for old in step.in_place.get(tensor, ()) if last.get(old) == number and old in chains]
            same_size = [old for old in dying if num_bytes[old] == num_bytes[tensor]]
            chains[tensor] = [*(chains.pop(same_size[0]) if same_size else []), tensor]

    places = [_Place(aligned(num_bytes[end]), first[chain[0]], last[end]) for end, chain in chains.items()]
    by_size = _offsets(places, [place.num_bytes for place in places])
    by_area = _offsets(places, [place.num_bytes * (place.last - place.first + 1) for place in places])
    offsets, arena_bytes = min(by_size, by_area, key=lambda result: result[1])
    allocations = {
        tensor: Allocation(offset, num_bytes[tensor], first[tensor], last[tensor], in_place=tensor != chain[0])
        for chain, offset in zip(chains.values(), offsets, strict=True)
        for tensor in chain
    }
    return allocations, arena_bytes


class _Place(NamedTuple):
    """Bytes of the arena that are in use from step `first` to `last`."""

    num_bytes: int
    first: int
    last: int


def _offsets(places: Sequence[_Place], importance: Sequence[int]) -> tuple[list[int], int]:
    """An offset for each place, and the bytes of the arena: the most important place first, each at the lowest free
    offset."""
    offsets = [0] * len(places)
    placed: list[int] = []
    for index in sorted(range(len(places)), key=lambda i: (-importance[i], places[i].first)):
        place = places[index]
        neighbours = [i for i in placed if places[i].first <= place.last and place.first <= places[i].last]
        offset = 0
        for other in sorted(neighbours, key=offsets.__getitem__):
            if offsets[other] - offset >= place.num_bytes:
                break
            offset = max(offset, offsets[other] + places[other].num_bytes)
        offsets[index] = offset
        placed.append(index)
    return offsets, max((offset + place.num_bytes for offset, place in zip(offsets, places, strict=True)), default=0)


def _in_place(node: Node) -> dict[Ref, list[Ref]]:
    """The overwrites that the operator of a node allows. A tensor that is read as two inputs is not overwritten:
    elements of one input may be needed after they are overwritten.
    """
    if node.op not in OPERATORS:
        return {}
    operator = OPERATORS[node.op]
    inputs = dict(zip(operator.input_names(node), node.inputs, strict=True))
    outputs = dict(zip(operator.output_names(node), node.refs(), strict=False))
    once = {name: ref for name, ref in inputs.items() if node.inputs.count(ref) == 1}
    return {outputs[output]: [once[name] for name in names if name in once]
            for output, names in operator.in_place.items() if output in outputs}


def aligned(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:>10,.1f} MiB"
