"""How a GPU answers a pass that asks for the fastest way: each is lowered to launches, and the planner times them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from graph_passes.executors.cuda.capacity import check_sizes
from graph_passes.executors.cuda.lowering import Persistent, bound_buffers, lower_nodes
from graph_passes.executors.cuda.lowering.builder import Builder
from graph_passes.executors.cuda.parameters import Store
from graph_passes.executors.cuda.planner import Decision
from graph_passes.executors.cuda.program import Buffer, Program
from graph_passes.executors.cuda.toolchain import Toolchain
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import OPERATORS, Shape, infer_node_shapes, window
from graph_passes.passes import Ways, tensor_dtypes
from graph_passes.passes.precision import node_dtypes


class Choices:
    """The `choose` of one compilation (`passes/choice.py`), for inputs of these shapes. `decisions` has its answers,
    where there was more than one way to take."""

    def __init__(self, input_shapes: Mapping[str, Sequence[int]], store: Store, persistent: Persistent,
                 tools: Toolchain) -> None:
        self._input_shapes, self._store, self._persistent, self._tools = input_shapes, store, persistent, tools
        self._known: _Tensors | None = None
        self.decisions: list[Decision] = []
        self._answers: dict[tuple[str, ...], str] = {}

    def __call__(self, graph: Graph, node: Node, ways: Ways) -> str:
        """The fastest way, or in runs that are to be repeatable the first. Raises GraphError where none can be had."""
        way = self._choose(graph, node, ways)
        self._answers[_question(node, ways)] = way
        return way

    def again(self, graph: Graph, node: Node, ways: Ways) -> str:
        """What was answered before, for the same passes on the same network."""
        return self._answers[_question(node, ways)]

    def _choose(self, graph: Graph, node: Node, ways: Ways) -> str:
        if self._known is None or self._known.graph is not graph:
            self._known = _Tensors(graph, self._input_shapes, self._store, self._persistent)
        tensors = self._known
        programs = {name: partial(self._program, tensors, nodes) for name, nodes in ways.items()}
        planner = self._tools.planner
        if planner.deterministic or len(programs) == 1:
            return planner.first(programs)
        problem = tensors.describe(max(ways.values(), key=len), self._store.dtype)
        decision = planner.fastest(node.name, problem, programs)
        if sum(time < float("inf") for time in decision.times.values()) > 1:
            self.decisions.append(decision)
        return decision.chosen

    def _program(self, tensors: _Tensors, nodes: Sequence[Node]) -> Program:
        """The launches of some nodes of a graph, or of nodes to be, alone."""
        shapes, dtypes, buffers = tensors.around(nodes)
        builder = Builder(shapes, dtypes, buffers, self._store.dtype, self._persistent, self._tools)
        lower_nodes(builder, list(nodes))
        return builder.program


class _Tensors:
    """Of one graph: shapes, dtypes, and the buffers of those that have a place already."""

    def __init__(self, graph: Graph, input_shapes: Mapping[str, Sequence[int]], store: Store,
                 persistent: Persistent) -> None:
        self.graph = graph
        inputs = {name: shape for name, shape in input_shapes.items() if name in graph.nodes}
        self._shapes, self._dtypes = graph.infer_shapes(inputs), tensor_dtypes(graph)
        check_sizes(self._shapes)
        self._buffers = bound_buffers(graph, store, persistent)

    def around(self, nodes: Sequence[Node]) -> tuple[dict[Ref, Shape], dict[Ref, str], dict[Ref, Buffer]]:
        """All that is needed to lower these nodes; with a buffer for each tensor that they read and do not make."""
        shapes, dtypes, buffers = dict(self._shapes), dict(self._dtypes), dict(self._buffers)
        made: set[Ref] = set()
        for node in nodes:
            for ref in node.inputs:
                if ref not in made and ref not in buffers:
                    buffers[ref] = Buffer(f"{ref.node}:{ref.output}", shapes[ref], dtypes[ref])
            _, outputs = infer_node_shapes(node, [shapes[ref] for ref in node.inputs])
            for ref, shape, dtype in zip(node.refs(), outputs, node_dtypes(node), strict=True):
                shapes[ref], dtypes[ref] = tuple(shape), dtype
                made.add(ref)
        return shapes, dtypes, buffers

    def describe(self, nodes: Sequence[Node], dtype: str) -> str:
        """What the time of these nodes depends on, for people and as the key of what is remembered: operators, the
        shapes of the images and weights that they read, and of the factors of images that are dropped, windows, and
        whether integers become floats."""
        shapes, _, _ = self.around(nodes)
        parts = []
        for node in nodes:
            roles = OPERATORS[node.op].input_names(node)
            sizes = ", ".join("x".join(map(str, shapes[ref])) for role, ref in zip(roles, node.inputs, strict=True)
                              if len(shapes[ref]) > 2 or role == "factors")
            parts.append(f"{node.op}{_window(node)}{_layers(node)} {sizes}{_floats(node)}")
        return f"{' + '.join(parts)}, {dtype}"


def _question(node: Node, ways: Ways) -> tuple[str, ...]:
    return (node.name, *ways)


def _layers(node: Node) -> str:
    """Of a recurrent layer, what its shapes do not tell."""
    if not node.get("state_size"):
        return ""
    both = " both directions" if node["bidirectional"] else ""
    return f" {node['mode']} {node['num_layers']} x {node['state_size']}{both}"


def _floats(node: Node) -> str:
    """Of a convolution in INT8 whose result is not: not every kernel makes floats."""
    return " to floats" if node.op == "QuantisedConvolution" and node["dtype"] != "int8" else ""


def _window(node: Node) -> str:
    """Of a convolution, where it is more than a product of matrices."""
    if not node.get("num_filter") or len(node["kernel"]) != 2:
        return ""
    size = window(node)
    if size == ((1, 1), (1, 1), (0, 0), (1, 1)):
        return " 1x1"
    spelled = [f"{height}x{width}" for height, width in size]
    return f" {spelled[0]} stride {spelled[1]} pad {spelled[2]} dilation {spelled[3]}"
