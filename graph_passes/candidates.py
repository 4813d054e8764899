"""Which operators can compute which tensors of a graph: the table of candidates from which `cover.py` chooses.

    table = candidates(graph)                       # the graph has no fused operators yet
    for each in table: print(each.label, each.node.inputs, each.writes)

A candidate is a node. It reads and writes tensors of the table: tensors of the graph, and a few tensors that only fused
operators produce. A tensor is identified by its value (`values.py`), so two candidates that compute the same expression
write the same tensor. The fusion rules (`executors/cuda/kernels/`) read the table and add to it until nothing is left
to add. A rule may start from the graph's candidates or from candidates of another rule, so the order of rules and
candidates does not matter.
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
    """A node whose inputs are tensors of the table. `writes` gives the tensor of each output; None stands for an output
    that is left out. A kernel with optional outputs has one candidate for each set of outputs that it may write.
    """

    node: Node
    writes: tuple[Ref | None, ...]
    is_fused: bool  # found by a rule; otherwise a node of the graph

    @property
    def op(self) -> str:
        return self.node.op

    def __getitem__(self, attribute: str) -> Any:
        return self.node[attribute]

    def input(self, role: str) -> Ref:
        return self.node.input(role)

    def output(self, role: str) -> Ref:
        """The tensor of this output."""
        tensor = self.writes[self.node.output(role).output]
        assert tensor, (self.node, role)
        return tensor

    @property
    def made(self) -> frozenset[Ref]:
        return frozenset(tensor for tensor in self.writes if tensor)

    @property
    def label(self) -> str:
        """The kernel's readable name: the operator and its variant."""
        how = self.node.get("tile") or (self["algorithm"] if self.op.startswith("RNN") else "")
        without = "without output" if self.node.get("no_output") else ""
        return " ".join(filter(None, (self.op, how, without)))


# A rule returns nodes that can replace a candidate and its neighbours.
Rule = Callable[["Candidates", Candidate], Iterable[Node]]


def form(op: str, fits: Callable[[Node], bool] = lambda node: True) -> Rule:
    """The rule that offers `op` for a node: `op` computes the same outputs as the node's operator from the same inputs.
    The rule applies if `fits` accepts the node.
    """
    return lambda table, other: [other.node.replace(op=op)] if fits(other.node) else []


class Candidates:
    """The table of candidates. `shapes`: the shapes of the graph's tensors, if the caller knows them."""

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
        """The candidates that write a tensor; with `ops`, only candidates with one of these operators."""
        return [each for each in self._makers.get(tensor, ()) if not ops or each.op in ops]

    def readers(self, tensor: Ref, *ops: str) -> list[Candidate]:
        return [each for each in self._readers.get(tensor, ()) if not ops or each.op in ops]

    @property
    def updated(self) -> set[Ref]:
        """Running statistics that the candidate updates in place. Two chosen candidates must not update the same
        statistics.
        """
        return {ref for each in self for role, ref in zip(_outputs(each.node), each.writes, strict=False)
                if ref and role.startswith("moving_")}

    def _add_own(self, node: Node) -> None:
        """Add a node of the graph. If the graph computes an expression twice, its two tensors stay separate."""
        numbers = self._values.outputs(node, [self._numbers[ref] for ref in node.inputs])
        for ref, value in zip(node.refs(), numbers, strict=True):
            own = self._values("again", value, attrs=ref) if value in self._tensors else value
            self._numbers[ref], self._tensors[own] = own, ref
        if not node.is_variable:
            key = _key(node)
            self._enter((key, node.name) if key in self._known else key, Candidate(node, node.refs(), is_fused=False))

    def add(self, node: Node) -> Candidate:
        """Add the candidate that a rule has found, or return the equal candidate that is in the table already."""
        key = _key(node)
        if key in self._known:
            return self._known[key]
        numbers = self._values.outputs(node, [self._numbers[ref] for ref in node.inputs])
        writes = [self._tensor(value, ref) for ref, value in zip(node.refs(), numbers, strict=True)]
        written = (None, *writes[1:]) if node.get("no_output") else tuple(writes)
        return self._enter(key, Candidate(node, written, is_fused=True))

    def _tensor(self, value: int, ref: Ref) -> Ref:
        """The tensor with this value: a tensor of the graph, or a new tensor with an unused name."""
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
        """Apply each rule to the candidates of its operator, repeatedly, until no rule adds anything."""
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
        """These candidates, and all candidates that share a tensor with them (variables do not count). A rule looks at
        most two of these steps far.
        """
        tensors = dict.fromkeys(ref for each in candidates for ref in (*each.node.inputs, *each.made)
                                if ref.node not in self.graph.nodes or not self.graph[ref.node].is_variable)
        return list(dict.fromkeys(each for ref in tensors for each in (*self._makers[ref], *self._readers[ref])))

    def graph_of(self, chosen: Sequence[Candidate]) -> Graph:
        """The graph of the chosen candidates. Raises GraphError if their dependencies form a cycle."""
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
    """A key that is equal for equal candidates: everything except the name."""
    attrs = tuple(sorted((key, value) for key, value in node.attrs.items() if key not in ("part_of",)))
    return node.op, node.inputs, attrs, () if node.inputs else node.name


def _outputs(node: Node) -> tuple[str, ...]:
    return OPERATORS[node.op].output_names(node) if node.op in OPERATORS else ()
