"""Where the tensors of a graph lie: one arena of memory, offsets from lifetimes, in place where that is legal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import OPERATORS
from graph_passes.passes.precision import ITEM_BYTES, tensor_dtypes

ALIGNMENT = 256  # bytes, as cudaMalloc's: more than any vector load and cuDNN ask for

# Outputs that may take the place of an input, by their names in the operator table: element i of the output depends on
# that input only through its element i and through sums that are complete before the first element is written.
_IN_PLACE: dict[str, dict[str, tuple[str, ...]]] = {
    "BatchNorm": {"output": ("data",)},
    "BatchNormRelu": {"output": ("data",)},
    "BatchNormAddRelu": {"output": ("data", "addend")},
    "BatchNormTrain": {"output": ("data",)},
    "BatchNormReluTrain": {"output": ("data",)},
    "BatchNormAddReluTrain": {"output": ("addend", "data")},
    "BatchNormBackward": {"data_grad": ("data", "out_grad", "out_grad_2")},
    "BatchNormReluBackward": {"data_grad": ("data", "out_grad", "out_grad_2")},
    # addend_grad is written by the reduction, while data is still read: it may replace gradients only.
    "BatchNormAddReluBackward": {"addend_grad": ("out_grad", "out_grad_2"), "data_grad": ("data",)},
    "ReluBackward": {"data_grad": ("out_grad", "out_grad_2", "output")},
    "elemwise_add": {"output": ("lhs", "rhs")},
    "AddRelu": {"output": ("lhs", "rhs")},
    "Activation": {"output": ("data",)},
    "relu": {"output": ("data",)},
    "Flatten": {"output": ("data",)},
    "FlattenBackward": {"data_grad": ("out_grad",)},
}


class Allocation(NamedTuple):
    """A tensor's place: `offset` and `num_bytes` in the arena, alive from node number `first` to `last`, both included
    (numbers in the order of the graph, variables counted). `replaces`: the tensor whose place it took over."""

    offset: int
    num_bytes: int
    first: int
    last: int
    replaces: Ref | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """Offsets of all tensors of a graph but its variables and outputs, which outlive the step and lie elsewhere."""

    graph: Graph
    allocations: Mapping[Ref, Allocation]
    external: Mapping[Ref, int]  # variables and outputs of the graph -> bytes
    arena_bytes: int

    @cached_property
    def live_bytes(self) -> list[int]:
        """Bytes that are alive while each node runs, alignment included, a place that was taken over counted once."""
        change = [0] * (len(self.graph) + 1)
        for allocation in self.allocations.values():
            # A tensor that takes over a place shares the node with the one before it, which is counted there.
            change[allocation.first + (allocation.replaces is not None)] += _aligned(allocation.num_bytes)
            change[allocation.last + 1] -= _aligned(allocation.num_bytes)
        live, total = [], 0
        for step in change[:-1]:
            total += step
            live.append(total)
        return live

    @property
    def lower_bound(self) -> int:
        """Bytes that any plan for this order and these replacements needs: the most that is alive at any node."""
        return max(self.live_bytes, default=0)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors side by side, as if nothing were ever reused."""
        return sum(_aligned(allocation.num_bytes) for allocation in self.allocations.values())

    def table(self) -> str:
        """A few lines for people: totals, the node where the peak is, and the largest tensors there."""
        number = self.live_bytes.index(self.lower_bound)
        node = list(self.graph)[number]
        at_peak = {ref: a for ref, a in self.allocations.items() if a.first <= number <= a.last}
        in_place = sum(a.replaces is not None for a in self.allocations.values())
        outside = sum(self.external.values())
        lines = [
            f"arena        {_mib(self.arena_bytes)}   {len(self.allocations)} tensors, {in_place} of them in place",
            f"lower bound  {_mib(self.lower_bound)}   arena / bound = {self.arena_bytes / self.lower_bound:.4f}",
            f"all tensors  {_mib(self.tensor_bytes)}   all / arena = {self.tensor_bytes / self.arena_bytes:.2f}",
            f"outside      {_mib(outside)}   {len(self.external)} variables and outputs",
            f"most is alive at {node.op} '{node.name}', node {number} of {len(self.graph)}; the largest tensors there:",
        ]
        for ref, a in sorted(at_peak.items(), key=lambda item: -item[1].num_bytes)[:10]:
            lines.append(f"  {_mib(a.num_bytes)}   nodes {a.first:>3} to {a.last:>3}   {ref.node}, output {ref.output}")
        return "\n".join(lines)


def memory(graph: Graph, shapes: Mapping[str, Sequence[int]]) -> MemoryPlan:
    """Plan one arena for the tensors of a graph that runs one node after the other, in its own order.

        before    y = relu(x) reads x last, dy = f(y):     x at 0, y at 4096, dy at 8192: 12,288 bytes
        after     y takes the place of x, dy comes behind: x at 0, y at 0,    dy at 4096:  8,192 bytes

    `shapes` are those of the input variables, `tensor_dtypes` gives the bytes per element. A tensor lives from the node
    that writes it to the last one that reads it. Offsets are multiples of 256 bytes. Scratch space of single kernels is
    not a tensor of the graph and not planned here.

    The largest tensor is placed first, each at the lowest offset where nothing lies that is alive at the same time
    (greedy by size: Pisarchyk and Lee, arXiv:2001.03288), and tried again with size * lifetime as the order; the
    smaller arena wins. ResNet-50, fused, fp16, 224 px, batch 256: 10,043 MiB, the lower bound; all tensors side
    by side are 24,870 MiB.
    """
    sizes, dtypes = graph.infer_shapes(shapes), tensor_dtypes(graph)
    num_bytes = {ref: math.prod(shape) * ITEM_BYTES[dtypes[ref]] for ref, shape in sizes.items()}
    external = {ref: size for ref, size in num_bytes.items() if graph[ref.node].is_variable or ref in graph.outputs}

    first: dict[Ref, int] = {}
    last: dict[Ref, int] = {}
    for number, node in enumerate(graph):
        for ref in (*node.inputs, *(Ref(node.name, index) for index in range(node.num_outputs))):
            if ref not in external:
                first.setdefault(ref, number)
                last[ref] = number

    replaces: dict[Ref, Ref] = {}
    for number, node in enumerate(graph):
        for ref, candidates in _may_replace(node):
            for old in candidates:
                dies = last.get(old) == number and old not in replaces.values()
                if ref in first and dies and num_bytes[old] == num_bytes[ref]:
                    replaces[ref] = old
                    break

    places = _places(first, last, replaces, num_bytes)
    by_size = _offsets(places, lambda place: place.num_bytes)
    by_area = _offsets(places, lambda place: place.num_bytes * (place.last - place.first + 1))
    offsets, arena_bytes = min(by_size, by_area, key=lambda result: result[1])
    allocations = {
        ref: Allocation(offset, num_bytes[ref], first[ref], last[ref], replaces.get(ref))
        for place, offset in zip(places, offsets, strict=True)
        for ref in place.tensors
    }
    return MemoryPlan(graph, allocations, external, arena_bytes)


def _may_replace(node: Node) -> Iterable[tuple[Ref, list[Ref]]]:
    """Outputs of a node and the inputs whose place each may take, the preferred one first."""
    for output, names in _IN_PLACE.get(node.op, {}).items():
        operator = OPERATORS[node.op]
        inputs = dict(zip(operator.input_names(node), node.inputs, strict=True))
        # An input that the node reads twice, under two names, would be overwritten before the second is read.
        free = [inputs[name] for name in names if name in inputs and node.inputs.count(inputs[name]) == 1]
        yield Ref(node.name, operator.outputs.index(output)), free


class _Place(NamedTuple):
    """Bytes of the arena that tensors hold one after the other."""

    tensors: tuple[Ref, ...]
    num_bytes: int
    first: int
    last: int


def _places(first: Mapping[Ref, int], last: Mapping[Ref, int], replaces: Mapping[Ref, Ref],
            num_bytes: Mapping[Ref, int]) -> list[_Place]:
    """Chains of tensors that replace each other."""
    successor = {old: new for new, old in replaces.items()}
    places = []
    for head in (ref for ref in first if ref not in replaces):
        chain = [head]
        while chain[-1] in successor:
            chain.append(successor[chain[-1]])
        places.append(_Place(tuple(chain), _aligned(num_bytes[head]), first[head], last[chain[-1]]))
    return places


def _offsets(places: Sequence[_Place], importance: Callable[[_Place], int]) -> tuple[list[int], int]:
    """An offset for each place, and the bytes of the arena. The most important place is put first, each at the lowest
    offset where it fits."""
    offsets = [0] * len(places)
    placed: list[int] = []
    for index in sorted(range(len(places)), key=lambda i: (-importance(places[i]), places[i].first)):
        place = places[index]
        neighbours = [i for i in placed if places[i].first <= place.last and place.first <= places[i].last]
        offset = 0
        for other in sorted(neighbours, key=offsets.__getitem__):
            if offsets[other] - offset >= place.num_bytes:
                break
            offset = max(offset, offsets[other] + places[other].num_bytes)
        offsets[index] = offset
        placed.append(index)
    return offsets, max((o + p.num_bytes for o, p in zip(offsets, places, strict=True)), default=0)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:>10,.1f} MiB"
