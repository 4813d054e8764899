"""Which operators can compute which tensors of a graph: the table from which `cover.py` chooses those that run.

    table = candidates(graph)                       # of a graph in which nothing is fused yet
    for each in table: print(each.label, each.node.inputs, each.writes)

A candidate is a node of today's operators. What it reads and writes are tensors of the table: those of the graph, and a
few that only fused operators make. A tensor is known by its value (`values.py`), so two candidates that give the same
expression write the same tensor. The rules of fusions (`executors/cuda/kernels/`) read the table and add to it until
there is nothing to add. A rule looks at candidates of the graph and of other rules alike, so neither the order of
the rules nor that of the candidates decides anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import OPERATORS, Shape
from graph_passes.values import Values


@dataclass(frozen=True, eq=False)
class Candidate:
    """A node whose inputs are tensors of the table. `writes`: for each of its outputs the tensor that it is, None for
    one that is left out. A kernel that may leave out an output is a candidate for each set that it may write."""

    node: Node
    writes: tuple[Ref | None, ...]
    is_fused: bool  # by a rule; else it is a node of the graph

    @property
    def op(self) -> str:
        return self.node.op

    def __getitem__(self, attribute: str) -> Any:
        return self.node[attribute]

    def input(self, role: str) -> Ref:
        return self.node.input(role)

    def output(self, role: str) -> Ref:
        """The tensor that this output is."""
        tensor = self.writes[self.node.output(role).output]
        assert tensor, (self.node, role)
        return tensor

    @property
    def made(self) -> frozenset[Ref]:
        return frozenset(tensor for tensor in self.writes if tensor)

    @property
    def label(self) -> str:
        """The kernel, for people: the operator, and in which of its forms."""
        how = self.node.get("tile") or (self["algorithm"] if self.op.startswith("RNN") else "")
        without = "without output" if self.node.get("no_output") else ""
        return " ".join(filter(None, (self.op, how, without)))


Rule = Callable[["Candidates", Candidate], Iterable[Node]]  # what can be computed in place of a candidate and others


def form(op: str, fits: Callable[[Node], bool] = lambda node: True) -> Rule:
    """The rule of an operator that computes what another one does, from the same inputs, where that one `fits`."""
    return lambda table, other: [other.node.replace(op=op)] if fits(other.node) else []


class Candidates:
    """The table. `shapes`: of tensors of the graph, where the caller knows them."""

    def __init__(self, graph: Graph, shapes: Mapping[Ref, Shape]) -> None:
        self.graph, self.shapes = graph, shapes
        self._values, self._numbers, self._tensors = Values(), dict[Ref, int](), dict[int, Ref]()
        self._known: dict[Any, Candidate] = {}
        self._makers: dict[Ref, list[Candidate]] = defaultdict(list)
        self._readers: dict[Ref, list[Candidate]] = defaultdict(list)
        for node in graph:
            self._add_own(node)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(tuple(self._known.values()))

    def __len__(self) -> int:
        return len(self._known)

    def makers(self, tensor: Ref, *ops: str) -> list[Candidate]:
        """Who writes a tensor; with `ops`, as one of these operators."""
        return [each for each in self._makers.get(tensor, ()) if not ops or each.op in ops]

    def readers(self, tensor: Ref, *ops: str) -> list[Candidate]:
        return [each for each in self._readers.get(tensor, ()) if not ops or each.op in ops]

    @property
    def updated(self) -> set[Ref]:
        """Running statistics, which are changed where they lie: two candidates must not both write one."""
        return {ref for each in self for role, ref in zip(_outputs(each.node), each.writes, strict=False)
                if ref and role.startswith("moving_")}

    def _add_own(self, node: Node) -> None:
        """A node of the graph. Where the graph computes one expression twice, these stay two tensors."""
        numbers = self._values.outputs(node, [self._numbers[ref] for ref in node.inputs])
        for ref, value in zip(node.refs(), numbers, strict=True):
            own = self._values("again", value, attrs=ref) if value in self._tensors else value
            self._numbers[ref], self._tensors[own] = own, ref
        if not node.is_variable:
            key = _key(node)
            self._enter((key, node.name) if key in self._known else key, Candidate(node, node.refs(), is_fused=False))

    def add(self, node: Node) -> Candidate:
        """What a rule has found, or what the table has of it already."""
        key = _key(node)
        if key in self._known:
            return self._known[key]
        numbers = self._values.outputs(node, [self._numbers[ref] for ref in node.inputs])
        writes = [self._tensor(value, ref) for ref, value in zip(node.refs(), numbers, strict=True)]
        written = (None, *writes[1:]) if node.get("no_output") else tuple(writes)
        return self._enter(key, Candidate(node, written, is_fused=True))

    def _tensor(self, value: int, ref: Ref) -> Ref:
        """The tensor of this value: the graph's, or one of its own by an unused name."""
        if value not in self._tensors:
            tensor = Ref(f"{ref.node}:{value}", ref.output)
            self._tensors[value], self._numbers[tensor] = tensor, value
        return self._tensors[value]

    def _enter(self, key: Any, candidate: Candidate) -> Candidate:
        self._known[key] = candidate
        for tensor in candidate.made:
            self._makers[tensor].append(candidate)
        for tensor in dict.fromkeys(candidate.node.inputs):
            self._readers[tensor].append(candidate)
        return candidate

    def apply(self, rules: Iterable[tuple[str, Rule]]) -> None:
        """Add what the rules find, each at candidates of one operator, until that is all there already."""
        by_operator: dict[str, list[Rule]] = defaultdict(list)
        for op, rule in rules:
            by_operator[op].append(rule)
        todo = [*self]
        while todo:
            size = len(self)
            for candidate in todo:
                for rule in by_operator.get(candidate.op, ()):
                    for node in rule(self, candidate):
                        self.add(node)
            todo = self._around(self._around([*self][size:]))

    def _around(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """These, and all that read or write one of their tensors but for variables: as far as a rule looks is twice."""
        tensors = dict.fromkeys(ref for each in candidates for ref in (*each.node.inputs, *each.made)
                                if ref.node not in self.graph.nodes or not self.graph[ref.node].is_variable)
        return list(dict.fromkeys(each for ref in tensors for each in (*self._makers[ref], *self._readers[ref])))

    def graph_of(self, chosen: Sequence[Candidate]) -> Graph:
        """The graph that the chosen candidates are. Raises GraphError where they wait for each other."""
        nodes, places = dict[str, Node](), dict[Ref, Ref]()
        for each in chosen:
            name = each.node.name
            while name in nodes or (name != each.node.name and name in self.graph.nodes):
                name += "_1"
            node = nodes[name] = each.node if name == each.node.name else each.node.replace(name=name)
            places |= {tensor: ref for tensor, ref in zip(each.writes, node.refs(), strict=True) if tensor}
        variables = [node for node in self.graph if node.is_variable]
        moved = [node if all(places.get(ref, ref) == ref for ref in node.inputs) else
                 node.replace(inputs=tuple(places.get(ref, ref) for ref in node.inputs)) for node in nodes.values()]
        return Graph([*variables, *moved], [places.get(ref, ref) for ref in self.graph.outputs], self.graph.attrs)


def _key(node: Node) -> Any:
    """What makes two candidates one: all but the name."""
    attrs = tuple(sorted((key, value) for key, value in node.attrs.items() if key not in ("part_of",)))
    return node.op, node.inputs, attrs, () if node.inputs else node.name


def _outputs(node: Node) -> tuple[str, ...]:
    return OPERATORS[node.op].output_names(node) if node.op in OPERATORS else ()
