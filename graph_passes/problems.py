"""The key under which times are stored: a readable text with all properties on which a candidate's time depends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph_passes.candidates import Candidate, Candidates
from graph_passes.graph import Node
from graph_passes.operators import OPERATORS, Shape, infer_node_shapes, window
from graph_passes.passes.precision import node_dtypes, tensor_dtypes


class Tensors:
    """Shapes and dtypes of all tensors of a candidate table, for graph inputs of these shapes."""

    def __init__(self, table: Candidates, input_shapes: Mapping[str, Sequence[int]]) -> None:
        graph = table.graph
        inputs = {name: shape for name, shape in input_shapes.items() if name in graph.nodes}
        self.shapes, self.dtypes = dict(table.shapes) or graph.infer_shapes(inputs), tensor_dtypes(graph)
        waiting = [each for each in table if each.is_fused and not each.made <= self.shapes.keys()]
        while waiting:  # a node waits if only the operator of another rule produces its input
            ready = [each for each in waiting if {*each.node.inputs} <= self.shapes.keys()]
            for each in ready:
                for ref, shape, dtype in zip(each.writes, self.outputs(each.node), node_dtypes(each.node), strict=True):
                    if ref:
                        self.shapes.setdefault(ref, shape)
                        self.dtypes.setdefault(ref, dtype)
            waiting = [each for each in waiting if each not in ready]

    def outputs(self, node: Node) -> list[Shape]:
        """The shapes of a node's outputs."""
        _, outputs = infer_node_shapes(node, [self.shapes[ref] for ref in node.inputs])
        return [tuple(shape) for shape in outputs]

    def problem(self, each: Candidate, dtype: str) -> str:
        """Operator and kernel, window, and the shapes of the images, weights and stochastic-depth factors that the
        candidate reads, for a network in this dtype.
        """
        node = each.node
        roles = OPERATORS[node.op].input_names(node)
        sizes = ", ".join("x".join(map(str, self.shapes[ref])) for role, ref in zip(roles, node.inputs, strict=True)
                          if len(self.shapes[ref]) > 2 or role == "factors")
        return f"{each.label}{_window(node)}{_layers(node)} {sizes}{_ends(node)}, {dtype}"


def _layers(node: Node) -> str:
    """The properties of a recurrent layer that its shapes do not determine."""
    if not node.get("state_size"):
        return ""
    both = " both directions" if node["bidirectional"] else ""
    return f" {node['mode']} {node['num_layers']} x {node['state_size']}{both}"


def _ends(node: Node) -> str:
    """Properties that the shapes do not determine: an INT8 kernel that writes floats; masks that are recomputed;
    biases; one tensor that is read as two inputs."""
    if node.op.startswith("QuantisedConv") and node["dtype"] != "int8":
        return " to floats"
    if not node.get("no_relu", True):
        return " through ReLU"
    if node.op == "Convolution" and not node["no_bias"]:
        return " with bias"
    return " of one tensor" if len({*node.inputs}) < len(node.inputs) else ""


def _window(node: Node) -> str:
    """The window of a convolution, if it is more than a matrix product."""
    if not node.get("num_filter") or len(node["kernel"]) != 2:
        return ""
    size = window(node)
    if size == ((1, 1), (1, 1), (0, 0), (1, 1)):
        return " 1x1"
    spelled = [f"{height}x{width}" for height, width in size]
    return f" {spelled[0]} stride {spelled[1]} pad {spelled[2]} dilation {spelled[3]}"
