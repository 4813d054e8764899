"""Expand fused operators to MXNet's own, for an executor that knows only those; and correct SELU's gradient."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators.activations import SELU_ALPHA, SELU_SCALE

_STOCK = {"BatchNormRelu": "BatchNorm", "BatchNormAddRelu": "BatchNorm", "AddRelu": "elemwise_add"}


def unfuse(graph: Graph) -> Graph:
    """Undo `add_relu`, `bn_relu` and `bn_add_relu`; the ReLU takes the fused operator's name.

        before    x, ..., shortcut -> BatchNormAddRelu `r`
        after     x, ... -> BatchNorm `r_bn` -> elemwise_add `r_add` (with shortcut) -> Activation(relu) `r`

    SELU becomes ELU times a number: MXNet 1.9.1 computes SELU's gradient below 0 by a wrong formula (at -1 the gradient
    is 9 % too small, at -3 it is 30 times too small).
    """

    def expand(node: Node) -> Sequence[Node] | None:
        if node.op == "LeakyReLU" and node["act_type"] == "selu":
            elu = node.with_attrs(act_type="elu", slope=SELU_ALPHA).replace(name=graph.unused_name(f"{node.name}_elu"))
            return [elu, Node("_mul_scalar", node.name, (Ref(elu.name),), {"scalar": SELU_SCALE})]
        if node.op not in _STOCK:
            return None
        nodes: list[Node] = []
        if node.op != "AddRelu":
            nodes.append(Node("BatchNorm", graph.unused_name(f"{node.name}_bn"), node.inputs[:5], node.attrs))
        if node.op != "BatchNormRelu":
            terms = (Ref(nodes[-1].name), node.inputs[5]) if nodes else node.inputs
            nodes.append(Node("elemwise_add", graph.unused_name(f"{node.name}_add"), terms))
        return [*nodes, Node("Activation", node.name, (Ref(nodes[-1].name),), {"act_type": "relu"})]

    return graph.rewrite(expand)
