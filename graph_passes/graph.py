"""The graph that every pass rewrites and every executor runs, read from and written to MXNet's Symbol JSON.

    graph = Graph.from_json(symbol.tojson())       # needs no MXNet
    for node in graph:                             # topological order
        print(node.name, node.op, node.inputs, node["kernel"] if node.op == "Convolution" else "")
    symbol = mx.sym.load_json(graph.to_json())     # unless it has fused operators of ours

A graph is immutable: nodes are known by name, and a pass builds a new graph, mostly through `rewrite`.
"""

from __future__ import annotations

import ast
import dataclasses
import errno
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from graph_passes.errors import GraphError
from graph_passes.operators import OPERATORS, Ref, Shape, infer_node_shapes

__all__ = ["VARIABLE", "Graph", "Node", "Ref", "unused_name"]

VARIABLE = "null"  # MXNet's operator name of a variable: an input, a parameter or a running statistic
# operator names in JSON of MXNet before 1.0
_OLD_NAMES = {"_Plus": "elemwise_add", "_plus": "elemwise_add", "_add": "elemwise_add"}
# attributes of MXNet before 1.0, now called __ctx_group__ and so on
_OLD_HINTS = ("ctx_group", "lr_mult", "wd_mult", "force_mirroring", "mirror_stage")


@dataclass(frozen=True)
class Node:
    """One operator or variable. `attrs` holds parsed values (tuples, numbers, bools) for operators of `OPERATORS`."""

    op: str
    name: str
    inputs: tuple[Ref, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    num_outputs: int = 0  # 0: the number in the operator table

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(Ref(*ref) for ref in self.inputs))
        attrs = OPERATORS[self.op].parse(self.name, self.attrs) if self.op in OPERATORS else self.attrs
        object.__setattr__(self, "attrs", MappingProxyType(dict(attrs)))
        if not self.num_outputs:
            known = OPERATORS.get(self.op)
            object.__setattr__(self, "num_outputs", len(known.output_names(self)) if known else 1)

    def __getitem__(self, attribute: str) -> Any:
        """The value of an operator's attribute, or MXNet's default if the node does not set it."""
        return self.attrs[attribute] if attribute in self.attrs else OPERATORS[self.op].default(attribute)

    def get(self, attribute: str, default: Any = None) -> Any:
        """The value of an attribute, or `default` if neither the node nor its operator has it."""
        if attribute in self.attrs or (self.op in OPERATORS and attribute in OPERATORS[self.op].attrs):
            return self[attribute]
        return default

    @property
    def is_variable(self) -> bool:
        return self.op == VARIABLE

    def refs(self) -> tuple[Ref, ...]:
        """References to all outputs of the node."""
        return tuple(Ref(self.name, index) for index in range(self.num_outputs))

    def input(self, role: str) -> Ref:
        """The input with this name in the operator's description."""
        return self.inputs[OPERATORS[self.op].input_names(self).index(role)]

    def output(self, role: str) -> Ref:
        """The output with this name."""
        return Ref(self.name, OPERATORS[self.op].output_names(self).index(role))

    def replace(self, **changes: Any) -> Node:
        """A copy with other fields, as `dataclasses.replace`."""
        return dataclasses.replace(self, **changes)

    def derive(self, op: str, name: str, inputs: Iterable[Ref], **attrs: Any) -> Node:
        """A node of another operator `op`. It has this node's hints, this node's attributes that `op` also has, and
        `attrs`.
        """
        own, its = OPERATORS[self.op].attrs, OPERATORS[op].attrs
        kept = {key: value for key, value in self.attrs.items() if key in its or key not in own}
        return Node(op, name, tuple(inputs), {**kept, **attrs})

    def with_attrs(self, **changes: Any) -> Node:
        """A copy with some attributes changed or added."""
        return self.replace(attrs={**self.attrs, **changes})


class Graph:
    """Nodes in topological order, and the graph's outputs (`heads`). Nodes that no output needs are left out.

    Raises GraphError for two nodes with one name, an input that no node produces, and a cycle.
    """

    def __init__(self, nodes: Iterable[Node], outputs: Iterable[Ref], attrs: Mapping[str, Any] | None = None) -> None:
        by_name: dict[str, Node] = {}
        for node in nodes:
            if node.name in by_name:
                raise GraphError(f"two nodes of the graph are named '{node.name}': names must be unique, rename one")
            by_name[node.name] = node
        self.outputs = tuple(Ref(*ref) for ref in outputs)
        self.attrs = dict(attrs or {})
        self.nodes: Mapping[str, Node] = MappingProxyType(_sorted(by_name, self.outputs))

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and (list(self), self.outputs) == (list(other), other.outputs)

    __hash__ = None  # type: ignore[assignment]  # graphs are compared by value and are too big to be keys

    # --- questions that passes and executors ask ---

    @cached_property
    def consumers(self) -> Mapping[Ref, tuple[Node, ...]]:
        """The readers of each output of each node. A node that reads an output twice is listed twice; graph outputs are
        not counted."""
        consumers: dict[Ref, list[Node]] = defaultdict(list)
        for node in self:
            for ref in node.inputs:
                consumers[ref].append(node)
        return {ref: tuple(nodes) for ref, nodes in consumers.items()}

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """Names of all variables: inputs, parameters, running statistics."""
        return tuple(node.name for node in self if node.is_variable)

    @cached_property
    def aux(self) -> tuple[str, ...]:
        """Names of the variables that operators update during training: running statistics."""
        written = {ref.node for node in self if node.op in OPERATORS for ref in OPERATORS[node.op].aux_inputs(node)}
        return tuple(name for name in self.variables if name in written)

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """Names of all variables that are not running statistics: inputs and parameters."""
        return tuple(name for name in self.variables if name not in set(self.aux))

    def operators(self) -> Counter[str]:
        """The number of nodes of each operator."""
        return Counter(node.op for node in self if not node.is_variable)

    def only_used_by_one(self, ref: Ref, *ops: str) -> Node | None:
        """The node that produces `ref`, if a fusion may absorb it: its operator is one of `ops`, `ref` has exactly one
        reader and is not an output of the graph, and its other outputs are unused."""
        node = self.nodes[ref.node]
        used = [Ref(node.name, i) for i in range(node.num_outputs) for _ in self.consumers.get(Ref(node.name, i), ())]
        used += [output for output in self.outputs if output.node == node.name]
        return node if node.op in ops and used == [ref] and ref not in self.outputs else None

    def sole_reader(self, ref: Ref, *ops: str) -> Node | None:
        """The only reader of `ref`, if it reads `ref` once, its operator is one of `ops`, and `ref` is not an output of
        the graph."""
        readers = self.consumers.get(ref, ())
        return readers[0] if len(readers) == 1 and readers[0].op in ops and ref not in self.outputs else None

    def unused_name(self, name: str) -> str:
        """`name`, or the first of `name_1`, `name_2`, ... that no node has."""
        return unused_name(name, self.nodes)

    def infer_shapes(self, inputs: Mapping[str, Sequence[int]]) -> dict[Ref, Shape]:
        """Shape of every output of every node, variables included, from the shapes of the input variables. If no
        operator determines the shape of a variable, the variable must have the shape as a hint (`__shape__`).

        Raises GraphError for an unknown input, an operator without a shape rule, and shapes that do not fit.
        """
        for name in inputs:
            if name not in self.nodes or not self.nodes[name].is_variable:
                known = ", ".join(n for n in self.arguments if n.endswith(("data", "label"))) or "none found"
                raise GraphError(f"the graph has no input '{name}': its inputs are {known}")
        shapes: dict[Ref, Shape] = {Ref(name): tuple(int(d) for d in shape) for name, shape in inputs.items()}
        for node in self:
            if node.is_variable:
                continue
            given = [shapes.get(ref) or _hinted(self.nodes[ref.node]) for ref in node.inputs]
            input_shapes, output_shapes = infer_node_shapes(node, given)
            for ref, shape in zip(node.inputs, input_shapes, strict=True):
                if shapes.setdefault(ref, shape) != shape:
                    raise GraphError(
                        f"'{ref.node}' has shape {shapes[ref]}, but {node.op} '{node.name}' needs {shape}: "
                        "check the input shapes and the operator's attributes"
                    )
            shapes.update({Ref(node.name, i): shape for i, shape in enumerate(output_shapes)})
        return shapes

    # --- rewriting ---

    def rewrite(self, rule: Callable[[Node], Node | Sequence[Node] | None]) -> Graph:
        """A new graph in which the nodes for which `rule` returns a replacement are replaced.

        `rule` is called with the nodes of this graph in topological order. It returns None (keep the node), the node
        that replaces it, or several nodes, the last of which replaces it. Inputs of new nodes name nodes of this graph
        or each other. Readers of the replaced node read the new one; nodes without readers disappear. A new node needs
        a name that this graph does not have (`unused_name`), or the name of the node that it replaces.
        """
        nodes: list[Node] = []
        moved: dict[str, str] = {}  # name of a replaced node -> name of the node in its place
        for node in self:
            answer = rule(node)
            new_nodes = [node] if answer is None else [answer] if isinstance(answer, Node) else list(answer)
            for new in new_nodes:
                inputs = tuple(Ref(moved.get(ref.node, ref.node), ref.output) for ref in new.inputs)
                nodes.append(new if inputs == new.inputs else new.replace(inputs=inputs))
            if new_nodes[-1].name != node.name:
                moved[node.name] = new_nodes[-1].name
        outputs = [Ref(moved.get(ref.node, ref.node), ref.output) for ref in self.outputs]
        return Graph(nodes, outputs, self.attrs)

    def replace(self, nodes: Iterable[Node], moved: Mapping[Ref, Ref]) -> Graph:
        """A new graph with `nodes` added. `moved` maps tensors to tensors: every reader of a key reads its value
        instead, except the node that produces the value. Nodes without readers disappear.

        This covers what `rewrite` cannot express: a node that replaces several nodes, or several outputs. A new node
        replaces the node with its name. New nodes read tensors of this graph or of each other; these may be moved as
        well.
        """
        def of(ref: Ref, reader: str) -> Ref:
            while ref in moved and moved[ref].node != reader:
                ref = moved[ref]
            return ref

        changed: dict[str, Node] = {**self.nodes, **{node.name: node for node in nodes}}
        for name, node in changed.items():
            inputs = tuple(of(ref, name) for ref in node.inputs)
            if inputs != node.inputs:
                changed[name] = node.replace(inputs=inputs)
        return Graph(changed.values(), [of(ref, "") for ref in self.outputs], self.attrs)

    # --- MXNet's JSON ---

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        """Read a Symbol JSON file that `symbol.save(path)` has written."""
        try:
            if Path(path).exists() and not Path(path).is_file():  # reading a pipe would block forever
                raise OSError(errno.EINVAL, "it is not a regular file")
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text file"
            raise GraphError(f"cannot read the graph file {path} ({reason}): give a Symbol JSON file") from None
        return cls.from_json(text, source=str(path))

    @classmethod
    def from_json(cls, text: str, source: str = "the JSON text") -> Graph:
        """Read MXNet's Symbol JSON (nnvm's format, also with the older `attr` and `param` of nodes).

        Raises GraphError, naming `source`, for text that is cut off or not in this format.
        """
        hint = "write the file anew with symbol.save()"
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}"
            raise GraphError(f"{source} is cut off or is not JSON ({error.msg}, {place}): {hint}") from None
        except RecursionError:
            raise GraphError(f"{source} is JSON that is nested too deeply for a graph: {hint}") from None
        if not isinstance(document, dict) or not {"nodes", "heads"} <= document.keys():
            raise GraphError(f"{source} is JSON, but not a graph of MXNet (no 'nodes' and 'heads'): {hint}")
        try:
            return _from_document(cls, document)
        except GraphError as error:
            raise GraphError(f"{source}: {error}") from None
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            kind = type(error).__name__
            raise GraphError(f"{source} is damaged or not a graph of MXNet ({kind}: {error}): {hint}") from None

    def to_json(self, indent: int | None = 2) -> str:
        """MXNet's Symbol JSON. Fused operators keep our names, which stock MXNet cannot load. `indent`: None writes the
        text on one line, which takes a third of the time.
        """
        ids = {name: i for i, name in enumerate(self.nodes)}
        versions: Counter[str] = Counter()  # nnvm counts how often a variable has been written
        nodes, row = [], [0]
        for node in self:
            written = OPERATORS[node.op].aux_inputs(node) if node.op in OPERATORS else ()
            versions.update(ref.node for ref in written)
            inputs = [[ids[ref.node], ref.output, versions[ref.node] if ref in written else 0] for ref in node.inputs]
            attrs = {key: str(value) for key, value in node.attrs.items()}
            nodes.append({"op": node.op, "name": node.name, **({"attrs": attrs} if attrs else {}), "inputs": inputs})
            row.append(row[-1] + node.num_outputs)
        document = {
            "nodes": nodes,
            "arg_nodes": [ids[name] for name in self.variables],
            "node_row_ptr": row,
            "heads": [[ids[ref.node], ref.output, 0] for ref in self.outputs],
            "attrs": self.attrs or {"mxnet_version": ["int", 10901]},
        }
        return json.dumps(document, indent=indent)


def unused_name(name: str, taken: Container[str]) -> str:
    """`name`, or the first of `name_1`, `name_2`, ... that is not taken."""
    candidate, number = name, 0
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _hinted(node: Node) -> Shape | None:
    """The shape in a variable's hint, if all sizes are known, otherwise None. MXNet writes 0 for an unknown size."""
    shape = ast.literal_eval(node.attrs.get("__shape__", "()")) if node.is_variable else ()
    return shape if shape and 0 not in shape else None


def _from_document(cls: type[Graph], document: dict[str, Any]) -> Graph:
    entries, rows = document["nodes"], document.get("node_row_ptr")
    taken: Counter[str] = Counter(entry["name"] for entry in entries)
    nodes: list[Node] = []
    for number, entry in enumerate(entries):
        op, name = _OLD_NAMES.get(entry["op"], entry["op"]), entry["name"]
        if entry.get("subgraphs"):
            raise GraphError(f"node '{name}' ({op}) holds a graph of its own: unroll its control flow")
        # MXNet allows several operators with one name; here a name must identify a node
        if op != VARIABLE and taken[name] > 1:
            taken[name] -= 1
            name = f"{name}_{number}"
        inputs = []
        for source, index, *_ in entry["inputs"]:
            if not 0 <= source < number:
                raise GraphError(f"node '{name}' ({op}) reads node {source}, which does not come before it")
            inputs.append(Ref(nodes[source].name, index))
        hints = {f"__{key}__" if key in _OLD_HINTS else key: value for key, value in entry.get("attr", {}).items()}
        attrs = {**entry.get("param", {}), **hints, **entry.get("attrs", {})}
        # MXNet's number is used, because our table lacks some operators and hidden outputs (such as a workspace of
        # Pooling).
        num_outputs = rows[number + 1] - rows[number] if rows else 0
        nodes.append(Node(op, name, tuple(inputs), attrs, num_outputs))
    outputs = [Ref(nodes[source].name, index) for source, index, *_ in document["heads"]]
    if not outputs:
        raise GraphError("the graph has no outputs ('heads' is empty)")
    return cls(nodes, outputs, document.get("attrs"))


def _sorted(nodes: Mapping[str, Node], outputs: Iterable[Ref]) -> dict[str, Node]:
    """The nodes that the outputs need, depth first (the order in which MXNet lists arguments, too)."""
    done: dict[str, Node] = {}
    open_nodes: set[str] = set()

    def find(ref: Ref, reader: str) -> Node:
        node = nodes.get(ref.node)
        if node is None or not 0 <= ref.output < node.num_outputs:
            raise GraphError(f"{reader} reads output {ref.output} of '{ref.node}', which does not exist")
        return node

    for output in outputs:
        first = find(output, "the graph's result")
        stack = [] if first.name in done else [(first, iter(first.inputs))]  # no recursion: ResNet-152 is too deep
        while stack:
            node, inputs = stack[-1]
            open_nodes.add(node.name)  # exactly the nodes on the stack
            for ref in inputs:
                source = find(ref, f"'{node.name}'")
                if source.name in open_nodes:
                    raise GraphError(f"the graph has a cycle through '{node.name}'")
                if source.name not in done:
                    stack.append((source, iter(source.inputs)))
                    break
            else:
                done[node.name] = node
                open_nodes.discard(node.name)
                stack.pop()
    return done
